"""Names the ranks that the others wait for, when steps have become slower."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from bloomery.checkpoint.format.state import Json
from bloomery.events.heartbeat import RankActivity
from bloomery.events.run_lock import host_name
from bloomery.parallel.mesh import Mesh

STEPS = 3
"""The newest steps that are compared, as many as it takes to judge that steps became slower."""
SHARE = 0.05
"""A rank that takes more than this share longer than the others' median is named."""
_NAMED = 8
_OWN = (RankActivity.WAITING_FOR_SAMPLES, RankActivity.COMPUTING, RankActivity.UPDATING)
"""What a rank does by itself. In the other activities of a step it waits for the slowest."""


class SlowRanks:
    """Keeps how long this rank worked by itself in its newest steps, and compares that with other ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._own: deque[float] = deque(maxlen=STEPS)

    def count(self, spent: Mapping[str, Json]) -> None:
        """Count the seconds of a step, by activity."""
        seconds = [spent.get(activity, 0.0) for activity in _OWN]
        self._own.append(sum(value for value in seconds if isinstance(value, float)))

    def compare(self) -> dict[str, Json]:
        """Return which ranks worked longer by themselves than the others, for the journal.

        `slow` is [rank, host, seconds a step] of at most eight, the slowest first; it is empty where all took
        alike, or where ranks wait for each other while they compute. Collective over the peer.
        """
        mean = sum(self._own) / len(self._own) if self._own else 0.0
        gathered = self._mesh.all_gather_object([host_name(), mean])
        seconds = [float(own) for _, own in gathered]
        usual = median(sorted(seconds)[: max(len(seconds) // 2, 1)])  # of the faster half
        slow = [rank for rank, own in enumerate(seconds) if own > (1.0 + SHARE) * usual]
        slow.sort(key=lambda rank: -seconds[rank])
        named: list[Json] = [[rank, gathered[rank][0], round(seconds[rank], 4)] for rank in slow[:_NAMED]]
        return {"slow": named, "usual_s": round(usual, 4), "ranks": len(seconds)}
