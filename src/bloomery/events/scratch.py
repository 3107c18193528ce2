"""Temporary directories that their process locks; later processes remove those whose process has ended."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from bloomery import durable

_YOUNG_S = 60.0
"""A directory younger than so many seconds may not have been locked yet by the process that made it."""


def hold_directory(directory: Path) -> int | None:
    """Lock a directory until the returned descriptor is closed.

    Returns None where another process has locked it or its file system has no locks.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with suppress(OSError):
        if durable.try_lock(file):
            return file
    os.close(file)
    return None


def remove_abandoned(root: Path, prefix: str) -> None:
    """Remove this user's directories in `root` that begin with `prefix` and that no process has locked."""
    for directory in root.glob(f"{prefix}*"):
        try:
            status = directory.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            lock = hold_directory(directory)
        except OSError:  # another process has removed it
            continue
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
