"""Starts, stops, kills and restarts the processes of a chaos run, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from bloomery.errors import PeerError

EXIT_S = 30.0
"""The seconds after which a process that was asked to end is killed."""


@dataclass(kw_only=True)
class ManagedProcess:
    """One process and all that it starts. A context manager that ends them.

    name: what messages call the process.
    environment: the environment variables of the process.
    log: the file to which the output of all of them is appended.
    starts: how often the process was started.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    def start(self) -> None:
        """Start the process unless it runs already."""
        if self.alive:
            return
        self.kill()  # children may have outlived the process that was started before
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
        """Whether the process itself runs; processes that it started may outlive it for a moment."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status; None before the process has ended."""
        return self._process.poll() if self._process is not None else None

    def family(self) -> list[psutil.Process]:
        """Return the process and its descendants that live, in the order in which they were seen."""
        if self._process is not None and self.alive:  # else its number may be that of a stranger by now
            try:
                first = psutil.Process(self._process.pid)
                for process in (first, *first.children(recursive=True)):
                    self._known.setdefault(process.pid, process)
            except psutil.NoSuchProcess:
                pass
        return [process for process in self._known.values() if _lives(process)]

    def ranks(self) -> list[psutil.Process]:
        """Return the training processes, which are those with a RANK in their environment."""
        return [process for process in self.family()[1:] if "RANK" in _environment(process)]

    def signal(self, number: int, *, whom: Sequence[psutil.Process] | None = None) -> None:
        """Send a signal. whom: the processes to send it to; None: the process and its descendants."""
        for process in self.family() if whom is None else whom:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def kill(self) -> None:
        """Kill the process and its descendants with SIGKILL, and wait until they have ended."""
        killed = self.family()
        self.signal(signal.SIGKILL, whom=killed)
        if self._process is not None:
            self._process.wait(EXIT_S)
        until = time.monotonic() + EXIT_S
        while any(map(_lives, killed)) and time.monotonic() < until:  # the kernel needs a moment to end them
            time.sleep(0.01)
        self._known.clear()

    def leave(self) -> None:
        """Ask the process to end by SIGTERM, as a scheduler does. Returns at once."""
        if self._process is not None and self.alive:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Wait until the process has ended, and return its exit status. Raises PeerError.

        seconds: how long to wait at most.
        """
        if self._process is None:
            raise PeerError(f"{self.name} was never started.")
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as late:
            raise PeerError(
                f"{self.name} did not end within {seconds:.0f} s.", remedy=f"Its output is in {self.log}."
            ) from late

    def close(self) -> None:
        """Ask the process to end, wait for EXIT_S at most, and kill what still runs."""
        self.signal(signal.SIGCONT)
        self.leave()
        until = time.monotonic() + EXIT_S
        while self.alive and time.monotonic() < until:
            time.sleep(0.05)
        self.kill()

    def __enter__(self) -> ManagedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Make the first SIGTERM or SIGINT raise KeyboardInterrupt, and ignore the ones after it.

    Whoever ends a command may send more than one signal: a second one must not interrupt what ends the
    processes of the scenario, or it would leave some of them running.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_marked(mark: str, value: str) -> None:
    """Kill this user's other processes that have `mark`=`value`, and those that they start meanwhile."""
    until = time.monotonic() + EXIT_S
    while (left := marked(mark, value)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def marked(mark: str, value: str) -> list[psutil.Process]:
    """Return this user's other processes whose environment has `mark`=`value`.

    A scenario marks all its processes, so those it has left running can be found.
    """
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _environment(process).get(mark) == value and _lives(process)
    ]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):  # the process has ended, or belongs to another user
        return {}
