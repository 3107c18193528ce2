"""Finds and takes over an etcd process that outlived the command that started it.

A `bloomery coordinate` that is killed leaves its etcd running, and so peers notice nothing. The next one that
is started on the same data takes this etcd over, instead of failing because port and data are in use.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bloomery import durable
from bloomery.errors import CoordinatorError
from bloomery.events.heartbeat import read_heartbeat, write_unsynced
from bloomery.events.run_lock import process_identity

_RECORD, _LOCK = "process.json", "coordinate.lock"
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class EtcdProcessRecord:
    """The process that serves a data directory, and how it was started.

    process: its id.
    born: distinguishes it from a later process with the same id (see `process_identity`).
    certificates: path and SHA-256 of certificate, key and authority, which etcd reads at its start alone;
        None: it was started without TLS.
    """

    process: int
    born: str
    host: str
    port: int
    peer_port: int
    certificates: list[str] | None


def write_record(data: Path, record: EtcdProcessRecord) -> None:
    """Write down which process serves this data directory from now on."""
    write_unsynced(data / _RECORD, json.dumps(vars(record)) + "\n")


def find_orphan(data: Path) -> tuple[EtcdProcessRecord, OrphanProcess] | None:
    """Return the process that serves this data and outlived its starter, or None if there is none.

    The caller must hold `serving`.
    """
    content: dict[str, Any] | None = read_heartbeat(data / _RECORD)
    if content is None or set(content) != set(EtcdProcessRecord.__annotations__):
        return None
    record = EtcdProcessRecord(**content)
    orphan = OrphanProcess(record.process, record.born)
    return (record, orphan) if orphan.poll() is None else None


@contextmanager
def serving(data: Path) -> Iterator[None]:
    """Hold the lock of a data directory. Raises CoordinatorError if another coordinator holds it."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        try:
            stack.enter_context(durable.locked(data / _LOCK, owner=str(os.getpid())))
        except durable.LockHeld as held:
            raise CoordinatorError(
                f"another `bloomery coordinate` (process {held.owner.strip() or '?'}) serves {data}",
                remedy="End that process, or give this one another data directory: --data DIR.",
            ) from held
        yield


class OrphanProcess:
    """A process that is not our child, with the part of `subprocess.Popen` that `EtcdServer` uses."""

    def __init__(self, process: int, born: str) -> None:
        self.pid, self._born = process, born
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return None while it lives, then 0: only its parent can learn its exit status."""
        if self.returncode is None and not self._lives():
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. timeout: seconds; None: for ever. Raises TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        try:
            if self._lives():
                os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """End the process at once, by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _lives(self) -> bool:
        try:
            is_same = process_identity(self.pid) == self._born
            return is_same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
