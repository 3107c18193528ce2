"""Writing files so that a kill leaves the old one or the new one, and so that a refusal says what to do."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bloomery.errors import StorageError

log = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_LOCK_TIMEOUT_S = 3600.0


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


@contextmanager
def alone_in(directory: Path, *, name: str) -> Iterator[int]:
    """Hold a directory's lock, which the system releases when its holder dies, and whoever inherited it.

    Yields the descriptor of the lock's file, which names its holder. Others say whom they wait for, and after
    an hour get a StorageError that names it.
    """
    path = directory / name
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        with refusals_named(path):
            directory.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        with file:
            _wait_for(file, path, deadline_s=deadline)
            if not _is_still_there(file, path):
                continue  # its last holder was done, and took the directory away
            with refusals_named(path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
                file.flush()
            yield file.fileno()
            return


def _wait_for(file: IO[bytes], path: Path, *, deadline_s: float) -> None:
    told = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as busy:
            holder = path.read_text(errors="replace") or "another process" if path.exists() else "nobody"
            if not told:
                log.warning(
                    "waiting for %s, which works in %s (at most %.0f s)", holder, path.parent, _LOCK_TIMEOUT_S
                )
                told = True
            if time.monotonic() > deadline_s:
                raise StorageError(
                    f"Waited {_LOCK_TIMEOUT_S:.0f} s for {holder}, which works in {path.parent}.",
                    remedy=f"Look what holds {path} (fuser -v), or choose another directory.",
                ) from busy
            time.sleep(0.1)


def _is_still_there(file: IO[bytes], path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
