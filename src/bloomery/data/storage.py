"""Writing files so that a kill leaves the old one or the new one, and so that a refusal says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery.errors import StorageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def refusals_named(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names `path` and says what to do."""
    try:
        yield
    except OSError as refused:
        reason = refused.strerror or str(refused)
        if refused.errno in _FULL:
            remedy = "Free some space or choose another directory, then start again: earlier files are whole."
        elif refused.errno in _FORBIDDEN:
            remedy = "Choose a directory that you may write to."
        else:
            remedy = "Check that the directory exists and can be written to, then start again."
        raise StorageError(f"Cannot write {path}: {reason}.", remedy=remedy) from refused


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there either whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with refusals_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            settle_directory(path.parent)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def settle_directory(directory: Path) -> None:
    """Make renames and removals in a directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
