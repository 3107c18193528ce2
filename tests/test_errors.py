"""What people are told about an error of the operating system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.errors import (
    BloomeryError,
    ConfigError,
    CoordinatorAway,
    CoordinatorError,
    DataError,
    Mistake,
    RankLost,
    ReportedElsewhere,
    StoppedBySwitch,
    StorageError,
    ThreadEnded,
    free_bytes,
    of_disk,
    reporting_errors,
    require_space,
    storage_error,
)


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
        (errno.ENOSPC, "Free some space or raise the quota"),
        (errno.EPERM, "Make it writable"),
        (errno.EROFS, "Make it writable"),
        (errno.ESTALE, "the disk still mounted?"),
        (errno.EISDIR, "A directory is where a file is needed"),
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


def test_only_a_disks_refusal_of_a_file_is_told_as_one() -> None:
    for number in (errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSPC, errno.EACCES, errno.ESTALE, errno.ENOTDIR):
        refused = of_disk(OSError(number, os.strerror(number), "/a/file"))
        assert isinstance(refused, StorageError) and "at /a/file: " in refused.message
        assert of_disk(OSError(number, os.strerror(number))) is None, "of no file"
        assert of_disk(OSError(number, os.strerror(number), 3)) is None, "of a descriptor"
    assert of_disk(OSError(errno.ECONNREFUSED, "refused", "/a/file")) is None


class Disk:
    """The figures of a file system of 3 GB, of which a tenth is for root alone."""

    f_frsize, f_bsize, f_blocks, f_bfree, f_bavail, f_files, f_favail = 1000, 4096, 3_000_000, 500, 200, 9, 3


def test_space_is_what_ordinary_users_may_write_where_the_file_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr("bloomery.errors.os.statvfs", lambda path: looked.append(path) or Disk)
    place = tmp_path / "new" / "deep"
    assert free_bytes(place) == 200_000 and looked == [tmp_path]
    require_space(place, doing="Saving", bytes_needed=200_000)
    with pytest.raises(StorageError, match=r"Saving was refused at .*deep.*0\.3 MB needed, 0\.2 MB free"):
        require_space(place, doing="Saving", bytes_needed=250_001)
    full = storage_error(OSError(errno.ENOSPC, "full"), path=place, doing="Saving", bytes_needed=1_500_000)
    assert "(1.5 MB needed, 0.2 MB free)" in full.message
    monkeypatch.setattr(Disk, "f_favail", 0)
    assert "no inodes are left" in storage_error(OSError(errno.ENOSPC, "full"), path=place, doing="S").message
    monkeypatch.setattr(Disk, "f_files", 0)  # a file system that does not count them
    assert "inodes" not in storage_error(OSError(errno.ENOSPC, "full"), path=place, doing="S").message

    def gone(path: Path) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("bloomery.errors.os.statvfs", gone)
    for number in (errno.EDQUOT, errno.ENOSPC):
        assert "free space unknown" in storage_error(OSError(number, "x"), path=place, doing="S").message


def test_statuses_of_errors_are_those_of_the_guide() -> None:
    assert (BloomeryError("").exit_status, ConfigError([]).exit_status) == (1, 2)
    assert (StoppedBySwitch("").exit_status, RankLost("").exit_status) == (0, 3)
    assert ReportedElsewhere().exit_status == 3 and ReportedElsewhere().message == ""
    assert issubclass(CoordinatorAway, CoordinatorError)


def test_mistakes_are_numbered_with_value_place_and_remedy() -> None:
    one = Mistake(key="a.b", value=3, source="my.toml:5", problem="is odd", remedy="Make it even.")
    two = Mistake(key="c", value=None, source="command line", problem="is missing", remedy="Give it.")
    assert str(ConfigError([one, two])) == (
        "2 mistakes in the recipe:\n  1. a.b = 3  (my.toml:5): is odd\n      Make it even.\n"
        "  2. c  (command line): is missing\n      Give it."
    )
    assert ConfigError([one], of="the command").message.startswith("1 mistake in the command:\n")
    assert (
        str(DataError("told", remedy="Do this.")) == "told\n  Do this." and str(DataError("told")) == "told"
    )


def test_what_ends_a_thread_is_reported_once_and_its_return_is_not() -> None:
    told: list[CoordinatorError] = []
    away = CoordinatorAway("nobody answers")

    def raising(error: Exception) -> None:
        def run() -> None:
            raise error

        reporting_errors(run, name="rounds", on_error=told.append)()

    reporting_errors(lambda: None, name="rounds", on_error=told.append)()
    assert told == []
    raising(away)
    raising(ValueError("x" * 900))
    first, second = told
    assert first is away and isinstance(second, ThreadEnded)
    assert "thread 'rounds'" in second.message and "ValueError: " + "x" * 500 in second.message
    assert "x" * 501 not in second.message
