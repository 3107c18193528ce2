"""Names the ranks that a rank waited for in vain, from the heartbeats of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bloomery.errors import RankLost, ReportedElsewhere
from bloomery.events.heartbeat import (
    RankActivity,
    RankBeat,
    has_died_here,
    interval_of,
    process_age_s,
    read_beat,
)
from bloomery.events.run_directory import RunDirectory
from bloomery.events.timeouts import wait_until
from bloomery.parallel.mesh import Mesh

_NOTICED_S = 2.0
"""How long to wait for heartbeats that tell of an end: who has just died looks alive for that long."""
_BEATS = 3
"""The heartbeats that a rank may leave out, or be behind, before it is named for it."""
_NAMED = 8
_IN_A_STEP = (
    RankActivity.WAITING_FOR_SAMPLES,
    RankActivity.COMPUTING,
    RankActivity.REDUCING,
    RankActivity.UPDATING,
    RankActivity.REPORTING,
)
_CONSEQUENCES = ("RankLost", "ReportedElsewhere")


@contextmanager
def naming_lost_ranks(rundir: RunDirectory, mesh: Mesh) -> Iterator[None]:
    """Add to the message of a RankLost which ranks are gone, silent or behind. Not collective.

    Rank 0 reads all heartbeats, another rank those of its own groups, so that a run of many ranks reads each
    file a few times.
    """
    began = time.time() - process_age_s()
    try:
        yield
    except ReportedElsewhere:
        raise
    except RankLost as lost:
        missing: list[str] = []

        def look() -> bool:
            missing[:] = missing_ranks(_beats(rundir, mesh), own=mesh.rank, began=began, now=time.time())
            return bool(missing)

        if not wait_until(look, within_s=_NOTICED_S, pause_s=0.25, longest_pause_s=0.25):
            raise
        more = f" {len(missing) - _NAMED} more are missing." if len(missing) > _NAMED else ""
        raise RankLost(f"{lost.message} {' '.join(missing[:_NAMED])}{more}", remedy=lost.remedy) from lost


def missing_ranks(
    beats: Sequence[tuple[int, RankBeat | None]], *, own: int, began: float, now: float
) -> list[str]:
    """Return a sentence for each rank that is gone or silent; if there is none, for each that is behind.

    beats: the ranks that were looked at, this one among them, and their heartbeats; None where there is none.
    own: this rank. began: when this process began; earlier heartbeats are of an earlier start. now: the time,
    both in seconds since 1970.
    """
    known = {rank: beat for rank, beat in beats if beat is not None and beat.time >= began}
    others = {rank: beat for rank, beat in known.items() if rank != own}
    gone = [told for beat in others.values() if (told := _end_of(beat, now=now))]
    if gone or own not in known:
        return gone
    return [
        f"{_name(beat)} has been in '{beat.activity}' of step {beat.step + 1} for {now - beat.since:.0f} s, "
        f"while this rank waited in '{known[own].activity}' of step {known[own].step + 1}."
        for beat in others.values()
        if beat.activity != RankActivity.ENDED
        and _place(beat) < _place(known[own])
        and now - beat.since > _BEATS * interval_of(beat.world)
    ]


def _end_of(beat: RankBeat, *, now: float) -> str:
    """Return how a rank ended, or that it is silent; '' where it lives, or ended because of another rank."""
    if beat.activity == RankActivity.ENDED:
        why = beat.error.partition("\n")[0]
        return (
            "" if why.startswith(_CONSEQUENCES) else f"{_name(beat)} has ended{f' ({why})' if why else ''}."
        )
    if has_died_here(beat, now=now):
        return f"{_name(beat)}, process {beat.pid}, is gone."
    silent_s = now - beat.time
    if silent_s > _BEATS * interval_of(beat.world):
        return f"{_name(beat)} has written no heartbeat for {silent_s:.0f} s; it was in '{beat.activity}'."
    return ""


def _name(beat: RankBeat) -> str:
    return f"Rank {beat.rank} on {beat.host}"


def _place(beat: RankBeat) -> tuple[int, int]:
    """How far a rank is: its completed steps, and where in the next one it is.

    What is no part of each step, such as an evaluation, comes after it: the step counts when it is recorded.
    """
    inside = beat.activity in _IN_A_STEP
    return beat.step, _IN_A_STEP.index(RankActivity(beat.activity)) if inside else len(_IN_A_STEP)


def _beats(rundir: RunDirectory, mesh: Mesh) -> list[tuple[int, RankBeat | None]]:
    groups = {*mesh.pipeline.ranks, *mesh.data.ranks, *mesh.tensor.ranks, mesh.rank}
    ranks = range(mesh.world) if mesh.is_first else sorted(groups)
    return [(rank, read_beat(rundir.heartbeat(rank=rank))) for rank in ranks]
