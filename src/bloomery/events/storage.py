"""What the disk said, told so that a person can act on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bloomery.errors import StorageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_GONE = {errno.ENOENT, errno.ESTALE}
_NO_DIRECTORY = {errno.EEXIST, errno.ENOTDIR}


def storage_error(error: OSError, *, path: Path, doing: str, bytes_needed: int | None = None) -> StorageError:
    """Return `error` as a StorageError that names the path, what was needed, what is free, and the remedy.

    doing: what failed, as in "saving a checkpoint". Raise it `from error`.
    """
    reason = error.strerror or str(error)
    message = f"{doing} failed at {path}: {reason}"
    if error.errno in _FULL:
        return StorageError(message + _space(path, bytes_needed), remedy=_remedy_when_full(error))
    if error.errno in _FORBIDDEN:
        return StorageError(message, remedy="Make it writable, or choose another place with --run DIRECTORY.")
    if error.errno in _GONE:
        return StorageError(
            message, remedy="Is the disk still mounted? Bring the directory back, or choose another."
        )
    if error.errno in _NO_DIRECTORY:
        return StorageError(
            message,
            remedy="A file is where a directory is needed: move it away, or choose another --run DIRECTORY.",
        )
    return StorageError(
        message, remedy="Check the disk (dmesg, df), then start again: what was saved is safe."
    )


def no_space(path: Path, *, doing: str, bytes_needed: int) -> StorageError:
    """Return the refusal for a write that is known not to fit, before a byte of it was written."""
    return StorageError(
        f"{doing} was refused at {path}: no space" + _space(path, bytes_needed),
        remedy="Free some space, or lower checkpoint.keep_last; earlier checkpoints are untouched.",
    )


def free_bytes(path: Path) -> int:
    """Return the bytes an ordinary user may still write where `path` is, or would be."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _space(path: Path, bytes_needed: int | None) -> str:
    needed = "" if bytes_needed is None else f"{_megabytes(bytes_needed)} needed, "
    try:
        return f" ({needed}{_megabytes(free_bytes(path))} free)"
    except OSError:  # the place is gone too: the message stands without the figure
        return f" ({needed}free space unknown)"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _remedy_when_full(error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return "A limit on file sizes is set (ulimit -f): raise it. Earlier checkpoints are untouched."
    return "Free some space or raise the quota; earlier checkpoints are untouched."
