"""Tells which nodes of a run have little space left in /dev/shm, and frees what the run left on others.

Both are known by the heartbeats of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.writer.leftover_memory import free_memory_of
from bloomery.events.heartbeat import interval_of, read_beat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.job_board import natural_sort_key
from bloomery.operate.run_state import RunObservation
from bloomery.operate.standstill import read_beats

SHM_FULL = 0.9
"""The used share of /dev/shm above which it is nearly full."""
_FRESH_S = 120.0
"""Seconds for which a heartbeat tells of a node's /dev/shm; three intervals where ranks write more rarely."""
_MOST_NAMED = 4
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class NodeShm:
    """The space of /dev/shm on a node, in bytes: free for its ranks, and in all."""

    host: str
    free_bytes: int
    total_bytes: int

    @property
    def used_share(self) -> float:
        """The share that is used."""
        return 1.0 - self.free_bytes / self.total_bytes

    @property
    def is_nearly_full(self) -> bool:
        """Whether a person should free some of it."""
        return self.used_share > SHM_FULL

    def __str__(self) -> str:
        free, total = self.free_bytes / _GIB, self.total_bytes / _GIB
        return f"{self.host} ({self.used_share:.0%} used, {free:.2f} of {total:.2f} GiB free)"


def shm_of_nodes(seen: RunObservation) -> tuple[NodeShm, ...]:
    """Return /dev/shm of each node on which a rank of the run lives, in natural order of their names.

    Nodes whose ranks do not tell of it, as those of earlier versions, are left out. Where ranks of a node see
    different ones, as containers do, that with the largest used share counts.
    """
    nodes: dict[str, NodeShm] = {}
    for number, rank in seen.ranks.items():
        beat = rank.beat
        fresh_s = max(_FRESH_S, 3 * interval_of(beat.world))
        if rank.has_ended or number in seen.died or seen.now - rank.written_s > fresh_s:
            continue
        if beat.host and beat.shm_bytes > 0:
            node = NodeShm(host=beat.host, free_bytes=beat.shm_free_bytes, total_bytes=beat.shm_bytes)
            nodes[beat.host] = max(nodes.get(beat.host, node), node, key=lambda known: known.used_share)
    return tuple(nodes[host] for host in sorted(nodes, key=natural_sort_key))


def shm_warning(nodes: Sequence[NodeShm]) -> str:
    """Return which nodes have a nearly full /dev/shm, and what to do; "" where none has."""
    full = [node for node in nodes if node.is_nearly_full]
    if not full:
        return ""
    more = f" and {len(full) - _MOST_NAMED} more" if len(full) > _MOST_NAMED else ""
    named = ", ".join(map(str, full[:_MOST_NAMED]))
    return f"/dev/shm is nearly full on {named}{more}: remove there what earlier jobs left, or enlarge it"


def free_memory_where_absent(rundir: RunDirectory, root: Path, *, host: str) -> Path | None:
    """Free what a run keeps in this node's memory where all its newest ranks are on other nodes; return it.

    The launcher of a node that was left out of the newest attempt calls it when its job ends: no start of
    this run would free it, and other jobs need the memory. root: of the memory file system.
    """
    newest = read_beat(rundir.heartbeat(rank=0))
    if newest is None or not newest.attempt:
        return None
    beats = read_beats(rundir, ranks=range(newest.world), attempt=newest.attempt)
    if len(beats) < newest.world or host in {beat.host for beat in beats.values()}:
        return None
    return free_memory_of(rundir, root)
