"""How long ranks may make no progress before a run counts as hung, and which of them are silent."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.operate.test_hang import beat

from bloomery.events.heartbeat import ATTEMPT, Heartbeat, RankActivity, RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.progress_watch import ProgressWatch, WatchClock, takes_heartbeats
from bloomery.operate.standstill import (
    EVALUATION_STEPS,
    TIMES_LONGEST,
    RankObservation,
    StandstillLimits,
    allowed_stillness_s,
    evaluation_s,
    judge_progress,
    longest_turns,
    observe_ranks,
    peers_awaited_s,
    read_beats,
)


def sights_of(*beats: RankBeat, now: float = 0.0) -> dict[int, RankObservation]:
    return observe_ranks({}, {one.rank: one for one in beats}, now=now)


def judged(sights: dict[int, RankObservation], now: float):
    return judge_progress(sights, now=now, limits=StandstillLimits(), measured_s={})


def written(
    sights: dict[int, RankObservation], now: float, *, silent: int | None = None
) -> dict[int, RankObservation]:
    """The sights after all ranks but one have written their file again without a move."""
    beats = {rank: replace(sight.beat, time=now) for rank, sight in sights.items() if rank != silent}
    return observe_ranks(sights, beats, now=now)


COMPUTING = str(RankActivity.COMPUTING)


FIRST = f"first {COMPUTING}"


def test_a_slow_step_is_no_hang_before_three_times_the_longest() -> None:
    slow = [
        beat(rank, RankActivity.COMPUTING, longest_s={"forward and backward": 100.0}) for rank in range(2)
    ]
    sights = sights_of(*slow)
    assert judged(written(sights, 299.0), 299.0) is None
    standstill = judged(written(sights, 301.0), 301.0)
    assert standstill is not None and standstill.kind == "stuck" and standstill.allowed_s == 300.0


@pytest.mark.parametrize(("first_s", "allowed"), [(15.0, 480.0), (200.0, 600.0)])
def test_a_step_that_may_compile_is_compared_with_first_steps_alone(first_s: float, allowed: float) -> None:
    """After a restart a compilation of 15 s stood beside steps of 10 ms and counted as a hang, thrice."""
    name = str(RankActivity.COMPUTING)
    trained = sights_of(beat(0, RankActivity.COMPUTING, longest_s={name: 0.01}, first_s={name: first_s}))
    measured_s = longest_turns(trained, {})
    again = sights_of(beat(0, RankActivity.COMPUTING, longest_s={}, may_compile=True))
    limits = StandstillLimits()
    for still_s, is_stuck in ((allowed - 1, False), (allowed + 1, True)):
        sights = written(again, still_s)
        found = judge_progress(sights, now=still_s, limits=limits, measured_s=measured_s)
        assert (found is not None) == is_stuck
    later = sights_of(beat(0, RankActivity.COMPUTING, longest_s={name: 0.01}))
    assert judge_progress(written(later, 11.0), now=11.0, limits=limits, measured_s=measured_s) is not None


@pytest.mark.parametrize(
    ("longest_s", "first_s", "measured_s", "allowed"),
    [
        ({}, {}, {}, 1800.0),
        ({}, {}, {COMPUTING: 0.5, FIRST: 5.0}, 60.0),  # a first turn, after earlier attempts
        ({}, {}, {COMPUTING: 90.0, FIRST: 5.0}, 270.0),
        ({}, {}, {COMPUTING: 0.5, FIRST: 70.0}, 210.0),
        ({}, {COMPUTING: 5.0}, {}, 60.0),  # the second turn
        ({}, {COMPUTING: 50.0}, {COMPUTING: 0.5}, 150.0),
        ({COMPUTING: 0.5}, {COMPUTING: 400.0}, {}, 10.0),
    ],
)
def test_without_compilation_the_first_turns_have_a_minute_and_the_others_their_measured_time(
    longest_s: dict[str, float], first_s: dict[str, float], measured_s: dict[str, float], allowed: float
) -> None:
    sights = sights_of(beat(0, RankActivity.COMPUTING, longest_s=longest_s, first_s=first_s))
    assert allowed_stillness_s(sights, limits=StandstillLimits(), measured_s=measured_s) == allowed


def test_a_checkpoint_may_be_loaded_for_eight_minutes_on_another_node_than_the_one_that_measured_it() -> None:
    sights = sights_of(beat(0, RankActivity.LOADING, longest_s={}))
    measured_s = {f"first {RankActivity.LOADING}": 2.0}
    assert allowed_stillness_s(sights, limits=StandstillLimits(), measured_s=measured_s) == 480.0


@pytest.mark.parametrize(
    ("longest_s", "first_s", "allowed"),
    [
        ({}, {}, 1800.0),  # no step was measured either
        ({}, {"forward and backward": 4.0}, 60.0),
        ({"forward and backward": 9.0}, {"forward and backward": 400.0}, 90.0),
        ({"forward and backward": 900.0}, {}, 1800.0),
        ({"forward and backward": 9.0}, {"evaluating": 50.0}, 150.0),
        ({"forward and backward": 9.0, "evaluating": 70.0}, {"evaluating": 50.0}, 210.0),
        ({"evaluating": 0.1}, {}, 10.0),
    ],
)
def test_a_first_evaluation_is_compared_with_steps(
    longest_s: dict[str, float], first_s: dict[str, float], allowed: float
) -> None:
    trained = sights_of(
        beat(0, RankActivity.EVALUATING, longest_s=longest_s, first_s=first_s, may_compile=True)
    )
    found = allowed_stillness_s(trained, limits=StandstillLimits(), measured_s={})
    assert found == allowed


def test_waits_for_other_peers_have_no_limit_where_nobody_does_anything_else() -> None:
    waits = {rank: beat(rank, RankActivity.WAITING_FOR_PEERS, longest_s={}) for rank in range(2)}
    sights = sights_of(*waits.values())
    assert judged(written(sights, 9e5), 9e5) is None
    frozen = judged(written(sights, 7.0, silent=1), 7.0)
    assert frozen is not None and (frozen.kind, frozen.silent) == ("silent", (1,))
    mixed = sights_of(waits[0], beat(1, RankActivity.COMPUTING, longest_s={COMPUTING: 100.0}))
    assert judged(written(mixed, 299.0), 299.0) is None
    assert judged(written(mixed, 301.0), 301.0) is not None, "the rank that computes holds up the peer"


def test_a_person_is_told_of_a_wait_for_other_peers_that_is_longer_than_usual() -> None:
    def awaited(now: float, *beats: RankBeat) -> float:
        return peers_awaited_s(sights_of(*beats), now=now)

    waits = beat(0, RankActivity.WAITING_FOR_PEERS, longest_s={})
    long = beat(1, RankActivity.WAITING_FOR_PEERS, longest_s={str(RankActivity.WAITING_FOR_PEERS): 400.0})
    computes = beat(1, RankActivity.COMPUTING)
    assert awaited(900.0, waits) == 0.0 and awaited(901.0, waits) == 901.0
    assert awaited(1200.0, waits, long) == 0.0 and awaited(1201.0, waits, long) == 1201.0
    assert awaited(9e5, waits, computes) == 0.0 == awaited(9e5)
    assert awaited(9e5, waits, beat(1, RankActivity.ENDED)) == 9e5


def test_what_was_never_measured_may_take_long() -> None:
    sights = sights_of(beat(0, RankActivity.COMPUTING, longest_s={}))
    assert judged(written(sights, 1700.0), 1700.0) is None
    assert judged(written(sights, 1801.0), 1801.0) is not None


def test_a_silent_process_is_noticed_within_ten_seconds_and_named() -> None:
    sights = sights_of(*(beat(rank, RankActivity.REDUCING) for rank in range(4)))
    standstill = judged(written(sights, 7.0, silent=2), 7.0)
    assert standstill is not None and (standstill.kind, standstill.silent) == ("silent", (2,))


def test_all_ranks_that_are_silent_are_named_in_their_order() -> None:
    ranks = {rank: beat(rank, RankActivity.REDUCING) for rank in (3, 1, 0, 2)}
    sights = observe_ranks({}, ranks, now=0.0)
    sights = observe_ranks(sights, {0: replace(ranks[0], time=7.0)}, now=7.0)
    standstill = judged(sights, 7.0)
    assert standstill is not None and (standstill.kind, standstill.silent) == ("silent", (1, 2, 3))


def test_a_silent_rank_that_nobody_waits_for_is_left_alone() -> None:
    sights = written(sights_of(*(beat(rank, RankActivity.COMPUTING) for rank in range(2))), 30.0, silent=1)
    moving = observe_ranks(sights, {0: replace(sights[0].beat, moves=5)}, now=30.0)
    assert judged(moving, 30.5) is None


def test_a_hang_of_all_ranks_after_the_last_save_ends() -> None:
    sights = sights_of(*(beat(rank, RankActivity.ENDING) for rank in range(2)))
    assert judged(written(sights, 299.0), 299.0) is None
    assert judged(written(sights, 304.0), 304.0) is not None


def test_a_run_that_has_ended_does_not_hang() -> None:
    assert judged(sights_of(beat(0, RankActivity.ENDED)), 1e9) is None


def test_a_run_whose_last_rank_but_one_has_just_ended_does_not_stand_still() -> None:
    both = [beat(rank, RankActivity.COMPUTING, longest_s={COMPUTING: 1.0}) for rank in range(2)]
    sights = written(sights_of(*both), 20.0, silent=1)
    ended = replace(both[1], activity=str(RankActivity.ENDED), moves=both[1].moves + 1)
    sights = observe_ranks(sights, {1: ended}, now=20.0)
    assert judged(written(sights, 29.0, silent=1), 29.0) is None
    assert judged(written(sights, 31.0, silent=1), 31.0) is not None


def test_a_rank_moves_by_its_step_or_its_count_of_moves_and_begins_anew_with_its_process() -> None:
    sights = sights_of(*(beat(rank, RankActivity.COMPUTING, moves=5) for rank in range(4)), now=1.0)
    changed = [{"time": 9.0}, {"moves": 6}, {"step": 8}, {"pid": 10}]
    after = observe_ranks(
        sights, {rank: replace(sights[rank].beat, **more) for rank, more in enumerate(changed)}, now=9.0
    )
    assert [sight.moved_s for sight in after.values()] == [1.0, 9.0, 9.0, 9.0]
    assert [sight.written_s for sight in after.values()] == [9.0] * 4
    assert observe_ranks(after, {0: after[0].beat}, now=20.0)[0].written_s == 9.0, "nothing was written"


@pytest.mark.parametrize(
    ("more", "activity", "limits", "allowed"),
    [
        ({"longest_s": {"saving a checkpoint": 50.0}}, "ending", {"ending_s": 200.0}, 350.0),
        ({"first_s": {COMPUTING: 4.0}, "may_compile": True}, COMPUTING, {"unmeasured_s": 100.0}, 100.0),
        ({"first_s": {"preparing the data": 4.0}}, "preparing the data", {}, 480.0),
        ({"first_s": {"building the model": 4.0}}, "building the model", {}, 480.0),
        ({"first_s": {COMPUTING: 9.0}}, "evaluating", {}, 90.0),
        ({"longest_s": {COMPUTING: 2.0}}, COMPUTING, {"least_s": 4.0}, 6.0),
        ({"first_s": {COMPUTING: 4.0}}, COMPUTING, {"first_s": 70.0}, 70.0),
        ({"first_s": {COMPUTING: 1.0}}, "evaluating", {"evaluation_s": 50.0}, 50.0),
    ],
)
def test_what_a_rank_does_says_how_long_it_may_stand(
    more: dict, activity: str, limits: dict, allowed: float
) -> None:
    sights = sights_of(beat(0, RankActivity(activity), **{"longest_s": {}, **more}))
    assert allowed_stillness_s(sights, limits=StandstillLimits(**limits), measured_s={}) == allowed


def test_the_longest_turn_is_that_of_the_slowest_rank_and_of_earlier_attempts() -> None:
    sights = sights_of(*(
        beat(rank, RankActivity.COMPUTING, longest_s={COMPUTING: seconds}, first_s={COMPUTING: 2 * seconds})
        for rank, seconds in enumerate((3.0, 7.0, 5.0))
    ))  # fmt: skip
    assert longest_turns(sights, {COMPUTING: 6.0, FIRST: 20.0, "x": 1.0}) == {
        COMPUTING: 7.0,
        FIRST: 20.0,
        "x": 1.0,
    }


@pytest.mark.parametrize(
    ("world", "gaps", "silence_s"),
    [(4, (0.0, 0.0, 0.0), 6.0), (4, (5.0, 9.0, 50.0), 18.0), (1000, (0.0, 0.0, 0.0), 30.0)],
)
def test_a_process_is_silent_after_gaps_that_are_longer_than_usual(
    world: int, gaps: tuple[float, ...], silence_s: float
) -> None:
    sights = sights_of(
        *(
            beat(
                rank, RankActivity.REDUCING, world=world, gap_s=gap_s, longest_s={"reducing gradients": 99.0}
            )
            for rank, gap_s in enumerate(gaps)
        )
    )
    assert judged(written(sights, silence_s - 0.1, silent=1), silence_s - 0.1) is None
    standstill = judged(written(sights, silence_s + 0.1, silent=1), silence_s + 0.1)
    assert standstill is not None and (standstill.silent, standstill.allowed_s) == ((1,), silence_s)


@pytest.mark.parametrize(
    ("longest", "allowed_s"),
    [
        ({"evaluating": 20.0, "first evaluating": 50.0}, 50.0 * TIMES_LONGEST),
        ({"evaluating": 50.0, "first evaluating": 20.0}, 50.0 * TIMES_LONGEST),
        ({"first evaluating": 50.0, "forward and backward": 99.0}, 50.0 * TIMES_LONGEST),
        ({"forward and backward": 50.0, "first forward and backward": 90.0}, 50.0 * EVALUATION_STEPS),
        ({"first forward and backward": 90.0}, 90.0 * EVALUATION_STEPS),
        ({"forward and backward": 0.1}, 60.0),
        ({"forward and backward": 9000.0}, 1800.0),
        ({}, 1800.0),
    ],
)
def test_an_evaluation_is_allowed_what_was_measured_of_it_or_else_of_steps(
    longest: dict[str, float], allowed_s: float
) -> None:
    assert evaluation_s(longest, limits=StandstillLimits()) == allowed_s


@pytest.mark.parametrize(("attempt", "ranks"), [("", [0, 1]), ("a", [0]), ("c", [])])
def test_heartbeats_are_those_of_one_attempt_or_of_any(
    attempt: str, ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path).create()
    for rank, name in enumerate("ab"):
        monkeypatch.setenv(ATTEMPT, name)
        Heartbeat(run.heartbeat(rank=rank), rank=rank, world=3, host="n1").write()
    assert sorted(read_beats(run, ranks=range(3), attempt=attempt)) == ranks


def test_a_watcher_counts_the_seconds_in_which_it_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock, counted = WatchClock(), []
    for now[0] in (101.0, 103.5, 900.0, 901.0):
        counted.append(clock.look(most_s=2.0))
    assert counted == [1.0, 3.0, 5.0, 6.0]


def test_ranks_that_write_rarely_are_watched_as_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = ProgressWatch(RunDirectory(tmp_path).create(), StandstillLimits())
    found = []
    for now[0] in (100.0, 109.0, 118.0):
        written_then = beat(0, RankActivity.COMPUTING, world=1000, longest_s={COMPUTING: 4.0}, time=now[0])
        found.append(watch.look({0: written_then}, {}))
    assert found[:2] == [None, None] and found[2] is not None and found[2].still_s == 18.0


def test_ranks_that_never_wrote_a_heartbeat_hang_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = RunDirectory(tmp_path).create(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def looks(seconds: int) -> list[int]:
        watch, began, found = ProgressWatch(run, StandstillLimits(unmeasured_s=60.0)), now[0], list[int]()
        for _ in range(seconds):
            now[0] += 1.0
            standstill = watch.look({}, {})
            found += [int(now[0] - began)] if standstill is not None else []
        return found

    assert looks(62) == [61, 62]
    place = run.heartbeat().parent
    place.rmdir()
    place.touch()
    assert looks(62) == [], "nobody could write one"


def test_ranks_are_not_silent_while_nobody_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = RunDirectory(tmp_path).create(), [100.0]
    place = run.heartbeat().parent
    assert takes_heartbeats(run) and list(place.iterdir()) == []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch, stands = ProgressWatch(run, StandstillLimits()), beat(0, RankActivity.COMPUTING)

    def look_until(end: int) -> list[int]:
        """Return at which seconds the rank counted as standing still."""
        silent = []
        while now[0] < end:
            now[0] += 1.0
            if watch.look({0: stands}, {}) is not None:
                silent.append(int(now[0]))
        return silent

    place.rmdir()
    place.touch()
    assert not takes_heartbeats(run) and look_until(120) == []
    place.unlink()
    place.mkdir()
    assert look_until(130)[0] == 122, "six seconds after the last look at which nobody could, at 115"


def test_what_earlier_attempts_measured_says_how_long_an_attempt_may_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, measured_s = [0.0], {COMPUTING: 30.0, FIRST: 5.0}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch, found = ProgressWatch(RunDirectory(tmp_path).create(), StandstillLimits()), list[float]()
    while now[0] < 95.0:
        now[0] += 1.0
        stands = beat(0, RankActivity.COMPUTING, longest_s={}, time=now[0])
        standstill = watch.look({0: stands}, measured_s)
        found += [] if standstill is None else [standstill.allowed_s, standstill.still_s]
    assert found[:2] == [90.0, 91.0]
