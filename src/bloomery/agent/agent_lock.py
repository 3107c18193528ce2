"""Lets one agent at a time lead the peer of a run directory.

The ranks hold the run lock, but an agent starts before its ranks. A second one would remove what the first
keeps in the directory for other peers, and write down that it makes no backups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bloomery import durable
from bloomery.errors import RunBusy, storage_error
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import NO_LOCKS_HERE

_LOCK = "agent.lock"
_WAIT_S = 10.0
"""The seconds that an agent waits for another one, which may be ending just now."""


@contextmanager
def only_agent(rundir: RunDirectory, *, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Hold a run directory as its only agent. Where the file system has no locks, nothing is held.

    Raises RunBusy while another process holds it, after `wait_s` seconds, and StorageError.
    """
    path = rundir.path / _LOCK
    with ExitStack() as stack:
        try:
            stack.enter_context(durable.locked(path, owner=str(os.getpid()), timeout_s=wait_s))
        except durable.LockHeld as other:
            who = other.owner.strip() or "?"
            raise RunBusy(
                f"another `bloomery peer` (process {who}) leads the peer of {rundir.path}",
                remedy="Stop that one first (Ctrl-C there), or use another --run.",
            ) from other
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise storage_error(error, path=path, doing="Taking the run") from error
        yield
