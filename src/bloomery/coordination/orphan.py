"""Finds and takes over an etcd process that outlived the command that started it.

`bloomery coordinate` that is killed leaves its etcd running, which is well: peers notice nothing. The next
one on the same data takes it over, as it is, instead of failing because the port and the data are in use.
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
from bloomery.events.run_lock import life_of

_RECORD, _LOCK = "process.json", "coordinate.lock"
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class EtcdProcessRecord:
    """Which process serves a data directory, and how it was started. born: see `life_of`."""

    process: int
    born: str
    host: str
    port: int
    peer_port: int
    certificates: list[str] | None


def write_record(data: Path, record: EtcdProcessRecord) -> None:
    """Say who serves this data from now on."""
    write_unsynced(data / _RECORD, json.dumps(vars(record)) + "\n")


def find_orphan(data: Path) -> tuple[EtcdProcessRecord, OrphanProcess] | None:
    """The process that serves this data and was started by somebody before; None where none lives.

    Only for whoever holds `serving`.
    """
    content: dict[str, Any] | None = read_heartbeat(data / _RECORD)
    if content is None or set(content) != set(EtcdProcessRecord.__annotations__):
        return None
    record = EtcdProcessRecord(**content)
    found = OrphanProcess(record.process, record.born)
    return (record, found) if found.poll() is None else None


@contextmanager
def serving(data: Path) -> Iterator[None]:
    """Be the one who serves this data, as long as this lasts. Raises CoordinatorError for a second one."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        try:
            stack.enter_context(durable.locked(data / _LOCK, owner=str(os.getpid())))
        except durable.LockHeld as held:
            raise CoordinatorError(
                f"another `bloomery coordinate` (process {held.owner.strip() or '?'}) serves {data}",
                remedy="End that one, or give this one other data: --data DIR.",
            ) from held
        yield


class OrphanProcess:
    """A process that is not ours, with as much of `subprocess.Popen` as a server needs."""

    def __init__(self, process: int, born: str) -> None:
        self.pid, self._born = process, born
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None while it lives; then 0, for its status is told to its parent alone."""
        if self.returncode is None and not self._lives():
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def send_signal(self, number: int) -> None:
        """Harmless once it has ended."""
        try:
            if self._lives():
                os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _lives(self) -> bool:
        try:
            is_it = life_of(self.pid) == self._born
            return is_it and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
