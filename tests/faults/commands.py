"""`bloomery …` as a person runs it: to its end, or while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

DEADLINE_S = 240.0
"""For one event, on a machine that is busy with other things."""
_TICK_S = 0.01
"""Between two looks: each reads files, on the processors that what is waited for needs."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str

    def refuses(self, *parts: str, status: int | None = None) -> None:
        """Assert that it failed with a message a person can act on, which contains all `parts`."""
        assert self.status != 0 and status in (None, self.status), self
        assert "Traceback" not in self.err, self.err
        for part in parts:
            assert part in self.err, f"{part!r} is not in:\n{self.err}"


def bloomery(*arguments: str | Path) -> Said:
    """Run a command to its end."""
    done = subprocess.run(
        _command(arguments),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=_environment(),
    )
    return Said(status=done.returncode, out=done.stdout, err=done.stderr)


class Running:
    """A command that runs beside the test."""

    def __init__(self, arguments: tuple[str | Path, ...], log: Path) -> None:
        self.begun = time.monotonic()
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(_command(arguments), stdout=out, stderr=err, env=_environment())

    def wait_until(self, seen: Callable[[], object], *, tick_s: float = _TICK_S) -> bool:
        """Look every `tick_s` until something is seen while this runs; false when it ended before."""
        deadline = time.monotonic() + DEADLINE_S
        while not seen():
            if self.is_over(within_s=tick_s):
                return bool(seen())
            assert time.monotonic() < deadline, f"waited in vain for {seen}: {self.said()}"
        return True

    def is_over(self, *, within_s: float) -> bool:
        """Whether it ends within so many seconds."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> Said:
        """Wait for its end."""
        self.process.wait(DEADLINE_S)
        return self.said()

    def said(self) -> Said:
        """What it has printed so far; its status is 0 while it runs."""
        return Said(
            status=self.process.returncode or 0,
            out=self._out.read_text(errors="replace"),
            err=self._err.read_text(errors="replace"),
        )


def wait_for(seen: Callable[[], object]) -> None:
    """Wait for something to be seen."""
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < deadline, f"waited in vain for {seen}"
        time.sleep(_TICK_S)


@contextmanager
def running(*arguments: str | Path, log: Path) -> Iterator[Running]:
    """Start a command; what it says goes to `log`.out and `log`.err. It does not outlive the block."""
    command = Running(arguments, log)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()


def events(run: Path, name: str, *, rank: int = 0) -> list[dict]:
    """The journal's events of one kind."""
    return [
        record for record in read_journal(RunDirectory(run).journal(rank=rank)) if record["event"] == name
    ]


def steps_told(run: Path, *, rank: int = 0) -> int:
    """The last step in the journal; 0 before the first."""
    return max((record["step"] for record in events(run, "step", rank=rank)), default=0)


def _command(arguments: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "bloomery", *map(str, arguments)]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("BLOOMERY_")}
