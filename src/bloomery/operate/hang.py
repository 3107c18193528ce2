"""Finds the ranks that hold up a hung run, from the stacks and heartbeats of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.operate.stacks import Frame, RankStack

_COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "wait_for_collective": "collective",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "batch_isend_irecv": "exchange with its pipeline neighbours",
    "send": "send to its pipeline neighbour",
    "recv": "receive from its pipeline neighbour",
    "wait_for_rank_zero": "task of rank 0",
}
_WAITS_OF_OURS = ("/bloomery/parallel/axis.py", "/rank_zero_task.py")
"""Our files with functions of _COLLECTIVES, whose own wait is native and has no frame."""
_MADE_OF_COLLECTIVES = (RankActivity.REDUCING, RankActivity.REPORTING)
_OF_ACTIVITY = {RankActivity.REDUCING: "gradient ", RankActivity.REPORTING: "report's "}
_PLACES = (
    ("/bloomery/data_loader/", "the data loader"),
    ("/bloomery/data/", "the data loader"),
    ("/bloomery/checkpoint/load/", "loading a checkpoint"),
    ("/bloomery/checkpoint/", "saving a checkpoint"),
    ("/bloomery/durable.py", "a write to the disk"),
    ("/bloomery/events/journal.py", "a write of the journal"),
)
_WAITS_OF_THREADS = ("acquire", "wait", "join", "_wait_for_tstate_lock", "result", "get")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The code that a rank has reached.

    waits: whether the rank waits for other ranks there.
    where: the place in words.
    """

    waits: bool
    where: str


@dataclass(frozen=True, kw_only=True)
class HangFinding:
    """Which ranks hold up a hung run.

    culprits: the ranks that the others wait for; empty where all ranks wait in the same place.
    hosts: the hosts of the culprits.
    summary: one sentence.
    evidence: a line for each group of ranks in the same place.
    sure: whether stacks or the kernel show it; False where only heartbeats do.
    """

    culprits: tuple[int, ...]
    hosts: tuple[str, ...]
    summary: str
    evidence: tuple[str, ...]
    sure: bool


def find_hang(
    beats: Mapping[int, RankBeat], stacks: Mapping[int, RankStack], *, silent: Sequence[int] = ()
) -> HangFinding:
    """Return which ranks hold up the run.

    beats: the newest heartbeat of each rank.
    stacks: the stacks of those ranks that gave one.
    silent: the ranks that no longer write heartbeats.
    """
    places = {
        rank: place_of(beat, stacks.get(rank), is_silent=rank in silent) for rank, beat in beats.items()
    }
    standing = [rank for rank, place in places.items() if not place.waits]
    # Those that have ended hold up nobody but ranks that still wait for them.
    ended = {rank for rank in standing if beats[rank].activity == RankActivity.ENDED}
    standing = [rank for rank in standing if rank not in ended] or standing
    # Others may stand for it in what is no collective, such as the end of a save.
    stopped = [rank for rank in standing if rank in stacks and stacks[rank].state == "T"]
    standing = stopped or standing
    if not standing:
        standing = _behind(beats, places)
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(beats):
        groups[places[rank].where].append(rank)
    evidence = tuple(f"{_ranks(ranks)} in {where}" for where, ranks in groups.items())
    culprits = tuple(sorted(standing))
    hosts = tuple(dict.fromkeys(beats[rank].host for rank in culprits))
    waiting = [rank for rank in sorted(beats) if rank not in ended.union(culprits)]
    sure = all(rank in stacks and (stacks[rank].frames or stacks[rank].state == "T") for rank in culprits)
    return HangFinding(
        culprits=culprits,
        hosts=hosts,
        summary=_summary(beats, places, culprits, waiting),
        evidence=evidence,
        sure=bool(culprits) and sure,
    )


def place_of(beat: RankBeat, stack: RankStack | None, *, is_silent: bool) -> RankPlace:
    """Return the code that a rank has reached, by its stack where there is one, else by its heartbeat."""
    if stack is not None and stack.state == "T":
        return RankPlace(waits=False, where="a stop (SIGSTOP): the process is stopped")
    if beat.activity == RankActivity.WAITING_FOR_PEERS and not is_silent:
        return RankPlace(waits=True, where="a wait for other peers")
    if stack is not None and stack.frames:
        return _by_stack(beat, stack.frames)
    if is_silent:
        return RankPlace(waits=False, where=f"silence since it began {beat.activity}")
    if beat.activity in _MADE_OF_COLLECTIVES:
        return RankPlace(waits=True, where=f"the {_OF_ACTIVITY[RankActivity(beat.activity)]}all-reduce")
    return RankPlace(waits=False, where=beat.activity or "its start")


def _by_stack(beat: RankBeat, frames: Sequence[Frame]) -> RankPlace:
    for frame in frames:
        waits_there = "/torch/distributed/" in frame.file or frame.file.endswith(_WAITS_OF_OURS)
        if frame.function in _COLLECTIVES and waits_there:
            kind = _OF_ACTIVITY.get(RankActivity(beat.activity), "") if _is_activity(beat) else ""
            return RankPlace(waits=True, where=f"the {kind}{_COLLECTIVES[frame.function]}")
    inner = frames[0]
    for frame in frames:
        for part, words in _PLACES:
            if part in frame.file:
                return RankPlace(waits=False, where=f"{words}: {inner}")
    if inner.function in _WAITS_OF_THREADS:
        caller = next((frame for frame in frames if frame.function not in _WAITS_OF_THREADS), inner)
        return RankPlace(waits=False, where=f"a wait for a lock or a thread: {caller}")
    return RankPlace(waits=False, where=f"{inner}")


def _is_activity(beat: RankBeat) -> bool:
    return beat.activity in {str(activity) for activity in RankActivity}


def _behind(beats: Mapping[int, RankBeat], places: Mapping[int, RankPlace]) -> list[int]:
    """Return the smallest group of ranks at one step and place; empty where all ranks are in one group."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, beat in beats.items():
        groups[(beat.step, places[rank].where)].append(rank)
    if len(groups) < 2:
        return []
    return min(groups.items(), key=lambda item: (len(item[1]), item[0]))[1]


def _summary(
    beats: Mapping[int, RankBeat],
    places: Mapping[int, RankPlace],
    culprits: Sequence[int],
    waiting: Sequence[int],
) -> str:
    if not beats:
        return (
            "no rank of this attempt writes a heartbeat: all hang before their first one, or another start "
            "may have taken the run"
        )
    if not culprits:
        where = places[waiting[0]].where
        return f"all ranks wait in {where}, and none is missing: the network or its library hangs"
    first = culprits[0]
    hosts = ", ".join(dict.fromkeys(beats[rank].host for rank in culprits))
    verb = "stands" if len(culprits) == 1 else "stand"
    who = f"{_ranks(culprits)} on {hosts}"
    if not waiting:
        return f"{who} {verb} in {places[first].where}"
    wait = "waits" if len(waiting) == 1 else "wait"
    where = places[waiting[0]].where
    return f"{_ranks(waiting)} {wait} in {where} for {who}, which {verb} in {places[first].where}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 6" or "ranks 0–5, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
