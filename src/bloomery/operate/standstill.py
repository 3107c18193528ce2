"""Distinguishes a hung run from a slow one, by the heartbeats of all ranks and the times they measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from bloomery.events.heartbeat import RankActivity, RankBeat, interval_of, read_beat
from bloomery.events.run_directory import RunDirectory

TIMES_LONGEST = 3.0
"""The multiple of the longest turn that any rank measured of an activity, which a rank may take for it."""
EVALUATION_STEPS = 10.0
"""The multiple of a step's forward and backward that a batch of an unmeasured evaluation may take: it may
have more rows than a micro-batch, and is computed eagerly."""
AWAITED_S = 900.0
"""Seconds for which a peer may wait for others before a person is told."""


@dataclass(frozen=True, kw_only=True)
class StandstillLimits:
    """How long a run may make no progress before it counts as hung.

    least_s: seconds below which nothing counts as a standstill, however short the measured turns are.
    unmeasured_s: seconds for an activity that no rank has measured yet, the first step for instance.
    compile_s: seconds below which no turn that may compile counts as a standstill, once a first turn was
        measured: another node may have to compile what this one had kept. Less than torch's time-out of a
        collective, so that a hung rank is found before torch ends those that wait for it.
    first_s: seconds below which the first two turns of an activity in a process are no standstill, once one
        was measured: caches of the disk may be cold. What a process does once has compile_s.
    evaluation_s: seconds for a batch of an evaluation that was not measured yet, or more, if steps were long.
    ending_s: seconds for the end of a run beside the measured time of a save.
    silence_s: seconds without a new heartbeat after which a process counts as silent.
    """

    least_s: float = 10.0
    unmeasured_s: float = 1800.0
    compile_s: float = 480.0
    first_s: float = 60.0
    evaluation_s: float = 60.0
    ending_s: float = 300.0
    silence_s: float = 6.0


@dataclass(frozen=True, kw_only=True)
class RankObservation:
    """A rank's newest heartbeat, and when it changed, by the clock of the watching process.

    written_s: when the file last changed.
    moved_s: when the rank's step or count of moves last changed.
    """

    beat: RankBeat
    written_s: float
    moved_s: float

    @property
    def has_ended(self) -> bool:
        """Whether the rank says that it has ended."""
        return self.beat.activity == RankActivity.ENDED


def read_ranks_once(rundir: RunDirectory, *, now: float) -> dict[int, RankObservation]:
    """Return the newest heartbeat of each rank of the newest world, with the times one reading can know."""
    first = read_beat(rundir.heartbeat())
    ranks = {}
    for rank in range(first.world if first else 0):
        path = rundir.heartbeat(rank=rank)
        with suppress(OSError):
            beat = read_beat(path)
            if beat is not None:
                ranks[rank] = _observed(beat, written_s=path.stat().st_mtime, now=now)
    return ranks


def _observed(beat: RankBeat, *, written_s: float, now: float) -> RankObservation:
    """Return a rank's observation from one reading: the rank's own clock says how long its activity lasts."""
    written_s = min(written_s, now)
    still_s = max(0.0, beat.time - beat.since) if beat.activity != RankActivity.ENDED else 0.0
    return RankObservation(beat=beat, written_s=written_s, moved_s=written_s - still_s)


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Why a run counts as standing still.

    kind: "silent" where processes no longer write heartbeats, "stuck" where no rank has moved for too long.
    silent: the ranks that no longer write heartbeats.
    still_s: seconds since any rank moved.
    allowed_s: the seconds that were allowed.
    """

    kind: Literal["silent", "stuck"]
    silent: tuple[int, ...]
    still_s: float
    allowed_s: float

    def __str__(self) -> str:
        return f"no rank has moved for {self.still_s:.0f} s ({self.allowed_s:.0f} s allowed)"


def observe_ranks(
    observations: Mapping[int, RankObservation], beats: Mapping[int, RankBeat], *, now: float
) -> dict[int, RankObservation]:
    """Return what is known of each rank after its heartbeat was read.

    observations: what was known before.
    beats: the heartbeats that were read.
    now: when they were read, by the clock of the watching process.
    """
    seen = dict(observations)
    for rank, beat in beats.items():
        before = seen.get(rank)
        if before is None or before.beat.pid != beat.pid:
            seen[rank] = RankObservation(beat=beat, written_s=now, moved_s=now)
        elif before.beat != beat:
            is_moving = beat.moves != before.beat.moves or beat.step != before.beat.step
            seen[rank] = replace(
                before, beat=beat, written_s=now, moved_s=now if is_moving else before.moved_s
            )
    return seen


def judge_progress(
    observations: Mapping[int, RankObservation],
    *,
    now: float,
    limits: StandstillLimits,
    measured_s: Mapping[str, float],
) -> Standstill | None:
    """Return why the run counts as standing still; None while it moves, starts or has ended.

    A run hangs when no rank makes progress. A run that waits for a slow rank keeps moving, if slowly.

    now: the present time by the clock of the watching process.
    measured_s: the longest turn of each activity in earlier attempts of the same run, in seconds.
    """
    running = {rank: observation for rank, observation in observations.items() if not observation.has_ended}
    if not running:
        return None
    still_s = now - max(observation.moved_s for observation in observations.values())
    silence_s = _silence_s(running, limits)
    silent = tuple(
        sorted(rank for rank, observation in running.items() if now - observation.written_s > silence_s)
    )
    if silent and still_s > silence_s:
        return Standstill(kind="silent", silent=silent, still_s=still_s, allowed_s=silence_s)
    allowed_s = allowed_stillness_s(running, limits=limits, measured_s=measured_s)
    if still_s > allowed_s:
        return Standstill(kind="stuck", silent=silent, still_s=still_s, allowed_s=allowed_s)
    return None


def allowed_stillness_s(
    observations: Mapping[int, RankObservation], *, limits: StandstillLimits, measured_s: Mapping[str, float]
) -> float:
    """Return the seconds for which all ranks may make no progress.

    That is TIMES_LONGEST times the longest measured turn of what the ranks do now, and more by the limits.
    A turn that may compile is compared with first turns, and the first two of a process with all. Waits for
    other peers have no limit, because the agent has one for each of its reasons; where other ranks of this
    peer do something else, its limit counts.
    """
    activities = {observation.beat.activity for observation in observations.values()}
    if activities == {RankActivity.WAITING_FOR_PEERS}:
        return float("inf")
    longest = longest_turns(observations, measured_s)
    allowed = limits.least_s
    for observation in observations.values():
        activity, may_compile = observation.beat.activity, observation.beat.may_compile
        first, usual = longest.get(_first(activity)), longest.get(activity)
        measured = first if may_compile or usual is None else usual
        if activity == RankActivity.WAITING_FOR_PEERS:
            continue
        if activity == RankActivity.EVALUATING:
            allowed = max(allowed, evaluation_s(longest, limits=limits))
        elif activity == RankActivity.ENDING:
            saving_s = longest.get(RankActivity.SAVING, 0.0)
            allowed = max(allowed, limits.ending_s + TIMES_LONGEST * saving_s)
        elif measured is None:
            allowed = max(allowed, limits.unmeasured_s)
        elif may_compile:
            allowed = max(allowed, min(limits.compile_s, limits.unmeasured_s), TIMES_LONGEST * measured)
        elif _is_early(observation.beat):
            least_s = limits.compile_s if activity in _ONCE else limits.first_s
            allowed = max(allowed, least_s, TIMES_LONGEST * max(first or 0.0, measured))
        else:
            allowed = max(allowed, TIMES_LONGEST * measured)
    return allowed


def peers_awaited_s(observations: Mapping[int, RankObservation], *, now: float) -> float:
    """Return the seconds that all ranks have waited for other peers, if that is longer than usual; else 0.0.

    A wait is longer than usual after TIMES_LONGEST times the longest measured one, and AWAITED_S at least.
    """
    running = [observation for observation in observations.values() if not observation.has_ended]
    if not running or any(one.beat.activity != RankActivity.WAITING_FOR_PEERS for one in running):
        return 0.0
    longest_s = longest_turns(observations, {}).get(RankActivity.WAITING_FOR_PEERS, 0.0)
    still_s = now - max(observation.moved_s for observation in running)
    return still_s if still_s > max(AWAITED_S, TIMES_LONGEST * longest_s) else 0.0


_ONCE = frozenset({RankActivity.PREPARING, RankActivity.BUILDING, RankActivity.LOADING})
"""Activities that a process has once: only other nodes and earlier attempts say how long they take."""


def _is_early(beat: RankBeat) -> bool:
    """Return whether the rank is in one of the first two turns of its present activity in this process."""
    return beat.activity not in beat.longest_s


def evaluation_s(longest: Mapping[str, float], *, limits: StandstillLimits) -> float:
    """Return for how many seconds an evaluation may go without progress, which it reports between batches.

    No evaluation compiles. Where none was measured, the measured steps say how long a batch may take.

    longest: from `longest_turns`.
    """
    evaluating, computing = RankActivity.EVALUATING, RankActivity.COMPUTING
    measured = [longest[name] for name in (evaluating, _first(evaluating)) if name in longest]
    if measured:
        return TIMES_LONGEST * max(measured)
    step_s = longest.get(computing, longest.get(_first(computing)))
    if step_s is None:
        return limits.unmeasured_s
    return min(limits.unmeasured_s, max(limits.evaluation_s, EVALUATION_STEPS * step_s))


def longest_turns(
    observations: Mapping[int, RankObservation], measured_s: Mapping[str, float]
) -> dict[str, float]:
    """Return for how many seconds any rank was at most in each activity without a break, by activity.

    The first time of a process counts apart, under "first", a space and the activity, for it takes longer.

    measured_s: the same of earlier attempts.
    """
    longest = dict(measured_s)
    for observation in observations.values():
        beat = observation.beat
        firsts = {_first(activity): seconds for activity, seconds in beat.first_s.items()}
        for activity, seconds in {**beat.longest_s, **firsts}.items():
            longest[activity] = max(longest.get(activity, 0.0), seconds)
    return longest


def _first(activity: str) -> str:
    return f"first {activity}"


def read_beats(rundir: RunDirectory, *, ranks: Iterable[int], attempt: str) -> dict[int, RankBeat]:
    """Return the newest heartbeat of each rank; ranks without a file that can be read are left out.

    attempt: the name of the launcher's attempt whose heartbeats are returned; "": those of any attempt.
    """
    beats = {rank: read_beat(rundir.heartbeat(rank=rank)) for rank in ranks}
    return {rank: beat for rank, beat in beats.items() if beat is not None and attempt in ("", beat.attempt)}


def _silence_s(observations: Mapping[int, RankObservation], limits: StandstillLimits) -> float:
    """Return after how many seconds without a heartbeat a process counts as silent.

    It is at least twice the median over the ranks of their longest gap so far, for disks may be slow.
    """
    beats = [observation.beat for observation in observations.values()]
    interval_s = max(interval_of(beat.world) for beat in beats)
    gap_s = sorted(beat.gap_s for beat in beats)[len(beats) // 2]
    return max(limits.silence_s, 3 * interval_s, 2 * gap_s)
