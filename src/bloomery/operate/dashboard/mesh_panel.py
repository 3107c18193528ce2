"""Builds the mesh panel of a run's page: each rank's place, activity, own time per step, and memory."""

from __future__ import annotations

import time
from statistics import median

import msgspec

from bloomery.config.recipe import Recipe
from bloomery.events.heartbeat import RankActivity, has_died_here, interval_of, read_beat
from bloomery.events.journal import read_tail
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.ledger.operations import seconds_of
from bloomery.plan.ranks import Degrees, degrees_of

OWN = (RankActivity.WAITING_FOR_SAMPLES, RankActivity.COMPUTING, RankActivity.UPDATING)
"""What a rank does by itself. In the other activities of a step it waits for the slowest."""
SLOW_SHARE = 0.1
"""A rank that works by itself for this share longer than the median of the faster half is slow."""
_RANK_TAIL_BYTES, _MOST_RANKS, _RANK_STEPS = 48 << 10, 512, 20


class RankRow(msgspec.Struct, kw_only=True):
    """One rank: its activity, and its mean seconds per step by activity over its last steps.

    place: its index on each axis of the mesh; {} where the recipe does not say. own_s: seconds by itself.
    silent_s: for how long it has written no heartbeat; None if it is not silent. died: its process is gone.
    memory_bytes: what it held after its newest step; None where that is not known.
    """

    rank: int
    host: str
    activity: str
    step: int
    silent_s: float | None
    died: bool
    seconds: dict[str, float]
    own_s: float
    place: dict[str, int]
    memory_bytes: float | None
    is_slow: bool = False


class StageMemoryInUse(msgspec.Struct, kw_only=True):
    """The memory in use on the ranks of one pipeline stage, in bytes.

    ranks: the number of ranks that told theirs. fullest: the rank that holds `most_bytes`.
    """

    stage: int
    ranks: int
    mean_bytes: float
    most_bytes: float
    fullest: int


class MeshPanel(msgspec.Struct, kw_only=True):
    """The ranks that have a heartbeat.

    degrees: the sizes of the axes; {} where the recipe does not say. told: the slow ranks, in a sentence.
    """

    rows: list[RankRow]
    degrees: dict[str, int]
    stages: list[StageMemoryInUse]
    told: str


def mesh_panel(reader: RunReader, recipe: Recipe | None, *, now: float | None = None) -> MeshPanel:
    """Return the ranks of a run, from their heartbeats and their own journals."""
    now = time.time() if now is None else now
    first = read_beat(reader.rundir.heartbeat())
    world = first.world if first is not None else 0
    degrees = degrees_of(recipe.parallel, world=world) if recipe is not None and world else None
    found = (_row(reader, rank, degrees, now=now) for rank in range(min(world, _MOST_RANKS)))
    rows = [row for row in found if row is not None]
    return MeshPanel(
        rows=rows,
        degrees={} if degrees is None else _sizes(degrees),
        stages=_stages(rows),
        told=_mark_slow(rows),
    )


def _row(reader: RunReader, rank: int, degrees: Degrees | None, *, now: float) -> RankRow | None:
    beat = read_beat(reader.rundir.heartbeat(rank=rank))
    if beat is None:
        return None
    has_ended = beat.activity == RankActivity.ENDED
    silent_s, died = now - beat.time, has_died_here(beat, now=now)
    is_silent = not has_ended and (died or silent_s > 3 * interval_of(beat.world))
    seconds = _mean_spent(reader, rank)
    return RankRow(
        rank=rank,
        host=beat.host[:80],
        activity=beat.activity[:80],
        step=beat.step,
        silent_s=silent_s if is_silent else None,
        died=died,
        seconds=seconds,
        own_s=sum(seconds.get(activity, 0.0) for activity in OWN),
        place={} if degrees is None else {str(axis): at for axis, at in degrees.place(rank).items()},
        memory_bytes=beat.memory_bytes or None,
    )


def _sizes(degrees: Degrees) -> dict[str, int]:
    return {"pipeline": degrees.pipeline, "data": degrees.data, "tensor": degrees.tensor}


def _mean_spent(reader: RunReader, rank: int) -> dict[str, float]:
    """Return the mean seconds per step by activity; {} where the rank's journal cannot be read now."""
    try:
        events = list(read_tail(reader.rundir.journal(rank=rank), most_bytes=_RANK_TAIL_BYTES))
    except OSError:  # the other tables are shown all the same
        return {}
    steps = [seconds_of(event.get("spent")) for event in events if event["event"] == "step"][-_RANK_STEPS:]
    known = [activity for activity in RankActivity if any(activity in spent for spent in steps)]
    return {str(name): sum(spent.get(name, 0.0) for spent in steps) / len(steps) for name in known}


def _mark_slow(rows: list[RankRow]) -> str:
    """Mark the ranks for which the others wait, and return a sentence about them."""
    working = sorted(row.own_s for row in rows if row.own_s > 0.0)
    if len(working) < 2:
        return ""
    usual_s = median(working[: max(len(working) // 2, 1)])
    for row in rows:
        row.is_slow = row.own_s > (1.0 + SLOW_SHARE) * usual_s
    slow = sorted((row for row in rows if row.is_slow), key=lambda row: -row.own_s)
    if not slow:
        return f"All ranks work alike: {usual_s:.3f} s a step by themselves."
    named = ", ".join(f"rank {row.rank} on {row.host} ({row.own_s / usual_s:.2f} ×)" for row in slow[:4])
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    return f"The others wait for {named}{more}; usual are {usual_s:.3f} s a step."


def _stages(rows: list[RankRow]) -> list[StageMemoryInUse]:
    by_stage: dict[int, list[RankRow]] = {}
    for row in rows:
        if row.memory_bytes is not None:
            by_stage.setdefault(row.place.get("pipeline", 0), []).append(row)
    stages = []
    for stage, members in sorted(by_stage.items()):
        held = [row.memory_bytes or 0.0 for row in members]
        most = max(held)
        stages.append(
            StageMemoryInUse(
                stage=stage,
                ranks=len(members),
                mean_bytes=sum(held) / len(held),
                most_bytes=most,
                fullest=members[held.index(most)].rank,
            )
        )
    return stages
