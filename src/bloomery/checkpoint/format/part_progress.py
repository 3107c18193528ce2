"""Says how far a rank has come with its part of a save, so that whoever waits for it sees a stall in minutes.

A writer leaves the number of bytes that it has written in a small file of the `.partial` directory, every few
seconds. The first rank's writer, which waits for all parts, reads that file: a rank whose number does not
grow for `stall_s` is stuck, however large the checkpoint is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from bloomery import durable

NOTE_EVERY_S = 5.0
"""Saves that are shorter leave no note."""
TELL_EVERY_S = 1.0
PROGRESS = "progress"
"""The key of a line from a writer to its trainer that says only that the writer goes on."""
_PREFIX = "progress-r"


def progress_path(partial: Path, rank: int) -> Path:
    """Return the file in which a rank notes the bytes that it has written."""
    return partial / f"{_PREFIX}{rank:05d}"


def note_progress(partial: Path, rank: int, count: int) -> None:
    """Leave a note of the bytes that a rank has written. Raises OSError."""
    durable.write_whole_unsynced(progress_path(partial, rank), str(count))


def progress_files(partial: Path) -> list[Path]:
    """Return the notes of all ranks that are in a directory."""
    return sorted(partial.glob(f"{_PREFIX}*"))


def noted_progress(partial: Path, rank: int) -> int:
    """Return the bytes that a rank has noted; 0 where it has noted none, or the note cannot be read."""
    try:
        return int(progress_path(partial, rank).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


class PartProgress:
    """Counts what a writer does for one order, tells its trainer, and notes the bytes for the first rank.

    tell: called with the count, at most once a second.
    note: leaves a note of the count for the first rank; None where nobody waits for this part.
    note_every_s: seconds between two notes.
    """

    def __init__(
        self,
        tell: Callable[[int], None],
        *,
        note: Callable[[int], None] | None = None,
        note_every_s: float = inf,
    ) -> None:
        self.count = 0
        self._tell, self._note, self._note_every_s = tell, note, note_every_s
        self._told_s = self._noted_s = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes that were written or read, or another rank's progress. Called by one thread."""
        self.count += count
        now = time.monotonic()
        if now - self._told_s >= TELL_EVERY_S:
            self._told_s = now
            self._tell(self.count)
        if self._note is not None and now - self._noted_s >= self._note_every_s:
            self._noted_s = now
            with contextlib.suppress(OSError):  # writing the part meets the same error, and reports it
                self._note(self.count)


class StallWatch:
    """Says whether a number has stayed the same for `stall_s` seconds, counted from when this was made."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s, self._seen, self._changed_s = stall_s, 0, time.monotonic()

    def is_stalled(self, number: int) -> bool:
        """Take the number as it is now, and say whether it has been the same for too long."""
        now = time.monotonic()
        if number != self._seen:
            self._seen, self._changed_s = number, now
        return now - self._changed_s > self._stall_s
