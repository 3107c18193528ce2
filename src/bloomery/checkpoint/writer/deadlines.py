"""How long each wait of a save may last: one table, so that an inner wait always ends before an outer one.

The first rank's writer waits for the other ranks' parts, each trainer for its writer's answer, and the end
of a run, or a restore, for all saves. The inner wait then names the cause. After an error, everything has to
end before the launcher kills the processes.

A save that hangs is noticed by its progress: no new bytes for STALL_S. The deadlines beside it are for a disk
that trickles; they follow from the largest part of a rank, not from the sum over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOWEST_BYTES_PER_S = 20e6
"""A copy in memory, or a network, that is slower than this for minutes counts as stuck."""
SLOWEST_RANK_BYTES_PER_S = 2e6
"""The same for one rank's share of a disk that all ranks write to."""
STALL_S = 300.0
"""A rank that has written no byte for so long is stuck. One sync of a file of a gibibyte fits in it."""
_LEAST_S = 300.0
_LEAST_TO_PARTNER_S = 60.0
_BETWEEN_S = 60.0
"""So much longer is an outer wait than the wait within it."""
CONCURRENT_SAVES = 2
"""Saves that may be under way at once: each has a shared buffer."""

BUFFERS_S = 300.0
"""For allocating the shared buffers. A gather over the ranks waits for it, which torch allows 600 s."""
POLL_S = 5.0
"""Ranks that wait for one of them gather so often, so that no collective comes near its time-out."""
AUTHENTICATION_S = 10.0
"""A connection to a replica server has so long to authenticate itself."""
WRITER_START_S = 60.0
WRITER_END_S = 3.0
"""For a writer to end when it is asked to, and again when it is killed."""
ABORT_S = 8.0
"""For saves that are under way when the run ends with an error: the launcher kills everything after 20 s."""
LOST_RANK_S = 1.0
"""The same once another rank is lost: only a save whose parts are all written can still be committed."""
BACKUP_AFTER_ERROR_S = 2.0


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
        return _LEAST_S + self.largest_part_bytes / SLOWEST_RANK_BYTES_PER_S

    @property
    def stall_s(self) -> float:
        """How long a rank may write nothing: it may still be sending its last part to a partner."""
        return max(STALL_S, send_replica_s(self.largest_part_bytes))

    @property
    def silence_s(self) -> float:
        """How long a trainer waits for the next sign of progress of its writer."""
        return self.stall_s + _BETWEEN_S

    @property
    def answer_s(self) -> float:
        """How long a trainer waits for its writer: for its own part, the others' parts, and the replica."""
        return 2 * self.parts_s + send_replica_s(self.part_bytes) + _BETWEEN_S

    @property
    def staging_s(self) -> float:
        """How long a trainer waits until its state is copied, before it changes the state."""
        return _LEAST_S + self.part_bytes / SLOWEST_BYTES_PER_S

    @property
    def prune_s(self) -> float:
        """For reading back a checkpoint (and, where it is damaged, an older one) and removing old ones."""
        return 2 * self.parts_s + _BETWEEN_S

    @property
    def finish_s(self) -> float:
        """For all saves under way, one after the other, and the pruning after them."""
        return CONCURRENT_SAVES * (self.answer_s + _BETWEEN_S) + self.prune_s


def send_replica_s(bytes: int) -> float:
    """Return how long sending a replica of so many bytes to the partner may take, in seconds."""
    return _LEAST_TO_PARTNER_S + bytes / SLOWEST_BYTES_PER_S
