"""Computes a table of all time-outs of a run on one cluster, from what its ranks measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bloomery.events import timeouts
from bloomery.events.heartbeat import RankActivity, RankBeat, interval_of
from bloomery.operate.standstill import (
    EVALUATION_STEPS,
    TIMES_LONGEST,
    StandstillLimits,
    evaluation_s,
    longest_turns,
    observe_ranks,
)

_STEP = (
    RankActivity.WAITING_FOR_SAMPLES,
    RankActivity.COMPUTING,
    RankActivity.REDUCING,
    RankActivity.UPDATING,
    RankActivity.REPORTING,
)
_ACTIVITIES = {
    "a step": _STEP,
    "a save": (RankActivity.SAVING,),
    "loading": (RankActivity.LOADING,),
}
_HANG = "hang in"


@dataclass(frozen=True, kw_only=True)
class RunTimeout:
    """A time-out of a run, as `bloomery drill --timeouts` shows it.

    name: what is waited for.
    seconds: how long.
    derived: the measured times and limits that `seconds` was computed from; "fixed" for a constant.
    then: what is done when it is over.
    """

    name: str
    seconds: float
    derived: str
    then: str


def run_timeouts(
    beats: Mapping[int, RankBeat], *, limits: StandstillLimits | None = None
) -> list[RunTimeout]:
    """Return the time-outs of a run, the shortest first.

    beats: the newest heartbeat of each rank; {} before the first start, when nothing is measured.
    """
    limits = limits or StandstillLimits()
    longest = longest_turns(observe_ranks({}, beats, now=0.0), {})
    firsts = [
        beat.first_s[activity] for beat in beats.values() for activity in _STEP if activity in beat.first_s
    ]
    world = max([len(beats), *(beat.world for beat in beats.values())], default=1)
    gaps = sorted(beat.gap_s for beat in beats.values())
    gap_s = gaps[len(gaps) // 2] if gaps else 0.0
    interval_s = interval_of(world)
    silence_s = max(limits.silence_s, 3 * interval_s, 2 * gap_s)
    table = [
        RunTimeout(
            name="silence of a process",
            seconds=silence_s,
            derived=f"{limits.silence_s:g} s, 3 × interval {interval_s:.3g} s, 2 × gap {gap_s:.3g} s",
            then="ended, if no rank moves",
        )
    ]
    for name, activities in _ACTIVITIES.items():
        times = [longest[activity] for activity in activities if activity in longest]
        measured_s = max(times, default=None)
        table.append(_standstill(name, measured_s, limits, least_s=limits.least_s))
    first_s = max(firsts, default=None)
    table.append(_standstill("a compiling step", first_s, limits, least_s=limits.compile_s))
    table.append(_standstill("first eager turns", first_s, limits, least_s=limits.first_s))
    table.append(
        RunTimeout(
            name=f"{_HANG} evaluating",
            seconds=max(limits.least_s, evaluation_s(longest, limits=limits)),
            derived=f"{TIMES_LONGEST:g} × longest, or {EVALUATION_STEPS:g} × step, {limits.evaluation_s:g} s",
            then="stacks taken, then ended",
        )
    )
    saving_s = longest.get(RankActivity.SAVING, 0.0)
    table.append(
        RunTimeout(
            name="hang at the end",
            seconds=limits.ending_s + TIMES_LONGEST * saving_s,
            derived=f"{limits.ending_s:g} s + {TIMES_LONGEST:g} × save {saving_s:.3g} s",
            then="stacks taken, then ended",
        )
    )
    fixed = {
        "ranks after a killed one": (timeouts.GRACE_AFTER_SIGNAL_S, "the launcher kills them"),
        "ranks after a failed one": (timeouts.GRACE_AFTER_FAILURE_S, "the launcher kills them"),
        "ranks after one that ended": (timeouts.GRACE_S, "the launcher kills them"),
        "a key of the rendezvous": (timeouts.STORE_TIMEOUT_S, "the start fails"),
        "all ranks join": (timeouts.JOIN_TIMEOUT_S, "the start fails, with names"),
        "a collective": (float(timeouts.COLLECTIVE_TIMEOUT_S), "torch ends who waits"),
        "rank 0's task is silent": (timeouts.RANK_ZERO_SILENCE_S, "the others give up"),
        "rank 0's task hangs": (timeouts.RANK_ZERO_STALL_S, "the others give up"),
    }
    table += [
        RunTimeout(name=name, seconds=seconds, derived="fixed", then=then)
        for name, (seconds, then) in fixed.items()
    ]
    return sorted(table, key=lambda timeout: timeout.seconds)


def contradictions(table: Sequence[RunTimeout]) -> list[str]:
    """Return which standstills torch ends before the supervisor has found out who holds up the run."""
    collective_s = timeouts.COLLECTIVE_TIMEOUT_S
    return [
        f"a {timeout.name} is noticed after {timeout.seconds:.0f} s, and torch ends a collective after "
        f"{collective_s} s: its message will not say who held it up"
        for timeout in table
        if timeout.name.startswith(_HANG) and timeout.seconds >= collective_s
    ]


def _standstill(
    name: str, measured_s: float | None, limits: StandstillLimits, *, least_s: float
) -> RunTimeout:
    then = "stacks taken, then ended"
    if measured_s is None:
        return RunTimeout(
            name=f"{_HANG} {name}",
            seconds=limits.unmeasured_s,
            derived="not measured yet",
            then=then,
        )
    return RunTimeout(
        name=f"{_HANG} {name}",
        seconds=max(least_s, TIMES_LONGEST * measured_s),
        derived=f"{TIMES_LONGEST:g} × longest {measured_s:.3g} s, at least {least_s:g} s",
        then=then,
    )
