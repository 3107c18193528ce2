"""Writes the files of a dataset under a lock for one writer, with errors that say what to do."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bloomery import durable
from bloomery.errors import StorageError, storage_error

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 3600.0


@contextmanager
def refusals_named(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names `path` and says what to do."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path=path, doing="Writing data") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file durably: afterwards it is there whole, or not at all. Raises StorageError."""
    with refusals_named(path):
        durable.write_whole(path, content)


@contextmanager
def alone_in(directory: Path, *, name: str) -> Iterator[int]:
    """Hold a directory's lock, which the system releases when its holder and all who inherited it have ended.

    Yields the descriptor of the lock's file, which names the holder. Other processes log whom they wait for,
    and get a StorageError that names the holder after an hour.
    """
    path = directory / name
    owner = f"process {os.getpid()} on {os.uname().nodename}"

    def say(holder: str) -> None:
        log.warning(
            "waiting for %s, which works in %s (at most %.0f s)",
            holder or "another process",
            directory,
            _LOCK_TIMEOUT_S,
        )

    with ExitStack() as stack:
        try:
            with refusals_named(path):
                lock = durable.locked(path, owner=owner, timeout_s=_LOCK_TIMEOUT_S, on_wait=say)
                file = stack.enter_context(lock)
        except durable.LockHeld as held:
            raise StorageError(
                f"Waited {_LOCK_TIMEOUT_S:.0f} s for {held.owner or 'another process'}, which works in "
                f"{directory}.",
                remedy=f"Look what holds {path} (fuser -v), or choose another directory.",
            ) from held
        yield file
