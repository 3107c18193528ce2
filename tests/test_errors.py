"""What people are told about an error of the operating system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.errors import DataError, storage_error


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOTDIR, "A file is where a directory is needed"),
        (errno.EEXIST, "A file is where a directory is needed"),
        (errno.ENOENT, "the disk still mounted?"),
        (errno.EACCES, "Make it writable"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EDQUOT, "Free some space or raise the quota"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_each_error_of_a_disk_comes_with_what_helps_against_it(
    number: int, remedy: str, tmp_path: Path
) -> None:
    failed = OSError(number, os.strerror(number))
    refused = storage_error(failed, path=tmp_path / "data", doing="Writing data")
    assert remedy in refused.remedy
    assert refused.message.startswith(f"Writing data failed at {tmp_path / 'data'}: {os.strerror(number)}")


def test_no_message_holds_the_login_of_an_address(tmp_path: Path) -> None:
    for address in ("https://user:secret@host/x", "s3://user:secret@bucket/x", "https:/user:secret@host/x"):
        told = DataError(f"Cannot read {address}: no.", remedy=f"Look at {address}.")
        assert "secret" not in str(told) + told.message + told.remedy and "host/x" in str(told) + "host/x"
    kept = "The tag v1:/a/b@c of user@host stays"
    assert DataError(kept).message == kept


@pytest.mark.parametrize("words", [["train", "demo", "data.sources=['https://u:secret@h/a', 'b.txt']"]])
def test_no_command_prints_the_login_of_an_address(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--run", str(tmp_path / "run")]) != 0
    assert "secret" not in "".join(capsys.readouterr())
