"""What people are told about an error of the operating system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bloomery.errors import storage_error


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOTDIR, "A file is where a directory is needed"),
        (errno.EEXIST, "A file is where a directory is needed"),
        (errno.ENOENT, "Is the disk still mounted?"),
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
