"""Starts, stops, kills and restarts the processes of a chaos run, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from bloomery.errors import PeerError

GOODBYE_S = 30.0
"""How long a process that was asked to end has before it is killed."""


@dataclass(kw_only=True)
class ManagedProcess:
    """One process and all it starts. log: takes what they print. A context manager that ends them."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    def start(self) -> None:
        """Start the process, where it does not run."""
        if self.alive:
            return
        self.kill()  # children that outlived the one before
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.starts += 1

    @property
    def alive(self) -> bool:
        """Whether the process itself runs; what it started may outlive it for a moment."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status; None before it ended."""
        return self._process.poll() if self._process is not None else None

    def family(self) -> list[psutil.Process]:
        """The process and all that descend from it and live, the first one first."""
        if self._process is not None:
            try:
                first = psutil.Process(self._process.pid)
                for one in (first, *first.children(recursive=True)):
                    self._known.setdefault(one.pid, one)
            except psutil.NoSuchProcess:
                pass
        return [one for one in self._known.values() if _lives(one)]

    def ranks(self) -> list[psutil.Process]:
        """Training processes: those that were given a rank."""
        return [one for one in self.family()[1:] if "RANK" in _environment(one)]

    def signal(self, number: int, *, whom: Sequence[psutil.Process] | None = None) -> None:
        """Send a signal to some of the family, or to all of it."""
        for one in self.family() if whom is None else whom:
            try:
                one.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def kill(self) -> None:
        """Kill the whole family with SIGKILL, and wait until it is gone."""
        gone = self.family()
        self.signal(signal.SIGKILL, whom=gone)
        if self._process is not None:
            self._process.wait(GOODBYE_S)
        until = time.monotonic() + GOODBYE_S
        while any(map(_lives, gone)) and time.monotonic() < until:  # a zombie waits for whoever adopted it
            time.sleep(0.01)
        self._known.clear()

    def leave(self) -> None:
        """Ask the process to end, as a scheduler does. Returns at once."""
        if self._process is not None and self.alive:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Wait until the process ended. Returns its status. Raises PeerError."""
        if self._process is None:
            raise PeerError(f"{self.name} was never started.")
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as late:
            raise PeerError(
                f"{self.name} did not end within {seconds:.0f} s.", remedy=f"What it said: {self.log}."
            ) from late

    def close(self) -> None:
        """Ask it to end, wait, and kill what is left."""
        self.signal(signal.SIGCONT)
        self.leave()
        until = time.monotonic() + GOODBYE_S
        while self.alive and time.monotonic() < until:
            time.sleep(0.05)
        self.kill()

    def __enter__(self) -> ManagedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def marked(mark: str, value: str) -> list[psutil.Process]:
    """Processes of this user whose environment says `mark`=`value`: what a rehearsal may have left behind."""
    return [
        one
        for one in psutil.process_iter()
        if one.pid != os.getpid() and _environment(one).get(mark) == value and _lives(one)
    ]


def _lives(one: psutil.Process) -> bool:
    try:
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _environment(one: psutil.Process) -> dict[str, str]:
    try:
        return one.environ()
    except (psutil.Error, OSError):  # it ended, or belongs to somebody else
        return {}
