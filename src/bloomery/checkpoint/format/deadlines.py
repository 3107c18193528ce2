"""The deadline of each wait of a save, and the progress files that show that a slow rank still writes.

It is one table, so that an inner wait always ends before an outer one. The first rank's writer waits for
the other ranks' parts, each trainer for its writer's answer, and the end of a run, or a restore, for all
saves. The inner wait then names the cause. After an error, everything has to end before the launcher kills
the processes.

A save that hangs is noticed by its progress: no new bytes for STALL_S. A writer leaves the number of bytes
that it has written in a small file of the `.partial` directory, every few seconds, and the first rank's
writer, which waits for all parts, reads that file. The deadlines also catch a disk that is slow but not
stalled; they follow from the largest part of a rank, not from the sum over the ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from bloomery import durable

SLOWEST_BYTES_PER_S = 20e6
"""A copy in memory, or a network, that is slower than this for minutes counts as stuck."""
SLOWEST_RANK_BYTES_PER_S = 2e6
"""The same for one rank's share of a disk that all ranks write to."""
STALL_S = 300.0
"""The seconds without a written byte after which a rank is stuck. A sync of a file of 1 GiB fits in it."""
_MINIMUM_S = 300.0
_MINIMUM_TO_PARTNER_S = 60.0
_OUTER_MARGIN_S = 60.0
"""The seconds by which an outer wait exceeds the wait within it."""
CONCURRENT_SAVES = 2
"""Saves that may be under way at once: each has a shared buffer."""

BUFFERS_S = 300.0
"""The seconds for allocating shared buffers. A gather over the ranks waits for it, which may last 600 s."""
POLL_S = 5.0
"""The seconds between gathers of ranks that wait for one of them, so that no collective times out."""
AUTHENTICATION_S = 10.0
"""The seconds in which a connection to a replica server must authenticate itself."""
WRITER_START_S = 60.0
"""The seconds for a writer process to start and answer."""
WRITER_END_S = 3.0
"""The seconds for a writer to end when it is asked to, and again when it is killed."""
ABORT_S = 8.0
"""The seconds for saves under way when the run ends with an error: the launcher kills everything after 20."""
LOST_RANK_S = 1.0
"""The same once another rank is lost: only a save whose parts are all written can still be committed."""
BACKUP_AFTER_ERROR_S = 2.0
"""The seconds for which the end of a run waits for a backup under way after an error."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """The deadlines for saving one state.

    part_bytes: what this rank writes. largest_part_bytes: what the rank with the largest part writes.
    """

    part_bytes: int
    largest_part_bytes: int

    @property
    def parts_s(self) -> float:
        """How long the committing writer waits for other ranks' parts once its own is written."""
        return _MINIMUM_S + self.largest_part_bytes / SLOWEST_RANK_BYTES_PER_S

    @property
    def stall_s(self) -> float:
        """How long a rank may write nothing: it may still be sending its last part to a partner."""
        return max(STALL_S, send_replica_s(self.largest_part_bytes))

    @property
    def silence_s(self) -> float:
        """How long a trainer waits for the next sign of progress of its writer."""
        return self.stall_s + _OUTER_MARGIN_S

    @property
    def answer_s(self) -> float:
        """How long a trainer waits for its writer: for its own part, the others' parts, and the replica."""
        return 2 * self.parts_s + send_replica_s(self.part_bytes) + _OUTER_MARGIN_S

    @property
    def staging_s(self) -> float:
        """How long a trainer waits until its state is copied, before it changes the state."""
        return _MINIMUM_S + self.part_bytes / SLOWEST_BYTES_PER_S

    @property
    def prune_s(self) -> float:
        """For reading back a checkpoint (and, where it is damaged, an older one) and removing old ones."""
        return 2 * self.parts_s + _OUTER_MARGIN_S

    @property
    def finish_s(self) -> float:
        """For all saves under way, one after the other, and the pruning after them."""
        return CONCURRENT_SAVES * (self.answer_s + _OUTER_MARGIN_S) + self.prune_s


def send_replica_s(bytes: int) -> float:
    """Return how long sending a replica of so many bytes to the partner may take, in seconds."""
    return _MINIMUM_TO_PARTNER_S + bytes / SLOWEST_BYTES_PER_S


NOTE_EVERY_S = 5.0
"""The seconds between two progress notes of a rank; saves that are shorter leave none."""
REPORT_EVERY_S = 1.0
"""The least seconds between two progress reports of a writer to its trainer."""
PROGRESS = "progress"
"""The key of a line from a writer to its trainer that says only that the writer goes on."""
_PREFIX = "progress-r"


def progress_path(partial: Path, rank: int) -> Path:
    """Return the file in which a rank notes the bytes that it has written."""
    return partial / f"{_PREFIX}{rank:05d}"


def note_progress(partial: Path, rank: int, count: int) -> None:
    """Leave a note of the bytes that a rank has written, unless the save was given up. Raises OSError."""
    if partial.is_dir():
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
    """Counts the bytes of one write request, reports them to the trainer, and notes them for the first rank.

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
        if now - self._told_s >= REPORT_EVERY_S:
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
