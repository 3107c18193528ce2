"""What is still missing of a checkpoint, handed out in runs of blocks to whoever may fetch them.

When nothing is left to hand out, what others are still at is handed out again: the quicker one counts, so a
source that has become slow holds nobody up.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bloomery.checkpoint.manifest import BLOCK_BYTES

RUN_BLOCKS = 4
TWICE = 2
"""How many may fetch the same run when nothing else is left."""


@dataclass(frozen=True, kw_only=True, order=True)
class Run:
    """Neighbouring blocks of one file: bytes [begin, end)."""

    file: str
    begin: int
    end: int


class Missing:
    """The runs that are not here yet. Thread-safe."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._waiting = sorted(runs, reverse=True)
        self._at: dict[Run, int] = {}
        self._changed = threading.Condition()

    def take(self, files: Collection[str], first: Collection[str] = (), *, timeout_s: float) -> Run | None:
        """A run of one of these files, of those in `first` before all others.

        None after `timeout_s` without one, or when nothing is missing.
        """
        with self._changed:
            found = self._next(files, first)
            if found is None and self._some():
                self._changed.wait(timeout_s)
                found = self._next(files, first)
            if found is not None:
                self._at[found] = self._at.get(found, 0) + 1
            return found

    def done(self, run: Run) -> bool:
        """The run is here. Whether it was missing until now."""
        with self._changed:
            was_missing = self._at.pop(run, None) is not None
            self._changed.notify_all()
            return was_missing

    def give_back(self, run: Run) -> None:
        """It could not be fetched: somebody else may."""
        with self._changed:
            if run in self._at:
                self._at[run] -= 1
                if not self._at[run]:
                    del self._at[run]
                    self._waiting.append(run)
            self._changed.notify_all()

    def files(self) -> set[str]:
        """The files of which something is missing."""
        with self._changed:
            return {run.file for run in (*self._waiting, *self._at)}

    @property
    def is_over(self) -> bool:
        """Whether nothing is missing."""
        with self._changed:
            return not self._some()

    def wait(self, timeout_s: float) -> None:
        """Wait until something has happened."""
        with self._changed:
            if self._some():
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Something has happened elsewhere."""
        with self._changed:
            self._changed.notify_all()

    def _some(self) -> bool:
        return bool(self._waiting or self._at)

    def _next(self, files: Collection[str], first: Collection[str]) -> Run | None:
        for wanted in (first, files):
            for place in range(len(self._waiting) - 1, -1, -1):
                if self._waiting[place].file in wanted:
                    return self._waiting.pop(place)
        shared = [run for run, count in self._at.items() if count < TWICE and run.file in files]
        return min(shared, key=lambda run: (self._at[run], run), default=None)


def runs_of(file: str, blocks: Iterable[int], size: int) -> list[Run]:
    """Join neighbouring blocks into runs of up to RUN_BLOCKS."""
    found: list[list[int]] = []
    for block in blocks:
        if found and block == found[-1][-1] + 1 and len(found[-1]) < RUN_BLOCKS:
            found[-1].append(block)
        else:
            found.append([block])
    return [
        Run(file=file, begin=part[0] * BLOCK_BYTES, end=min(size, (part[-1] + 1) * BLOCK_BYTES))
        for part in found
    ]
