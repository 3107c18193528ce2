"""What the records of a run say of its incidents, its marks and its figures, each by a few lines of them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.operate.ledger.test_ledger import T0, killed_once, operation, start, step, write_run

from bloomery.operate.ledger.operations import Mark, OperationMarks, read_marks, seconds_of, time_of
from bloomery.operate.ledger.run_history import (
    NO_WORD,
    SAVE_REFUSED,
    RunHistory,
    read_run_history,
    rewind_words,
)
from bloomery.operate.ledger.run_ledger import _running_attempt, read_ledger
from bloomery.operate.ledger.time_class import TimeClass


def history(events: list[dict], operations: list[dict] | None = None, *, hidden: int = 0) -> RunHistory:
    """Return the history of a run; steps of the incarnation `hidden` are no part of it."""
    return read_run_history(events, operations or [], is_visible=lambda base: base[1] != hidden)


def test_a_process_that_ended_without_a_word_is_an_incident_and_one_that_was_told_is_none() -> None:
    events = [start(4, starting=3.0), step(6, 1, compute=1.0), start(50, 2, at=1, starting=2.0)]
    (incident,) = history(events).incidents
    assert (incident.cause, incident.time, incident.step, incident.sure) == (NO_WORD, T0 + 6, 1, False)
    for told in (T0 + 6, T0 + 20, T0 + 50):
        assert history(events, [operation(told - T0, "attempt_end", attempt="a", status=1)]).incidents == ()
    assert len(history(events, [operation(5, "attempt_end", attempt="a", status=1)]).incidents) == 1
    ended = [*events[:2], operation(7, "end", finished=False), events[2]]
    assert history(ended).incidents == () and history(events[:2]).incidents == ()
    again = [*events[:2], {**events[2], "reason": "rewind: spike"}]
    assert history(again).incidents == (), "the process went back by itself"


def test_a_save_that_is_refused_in_the_same_way_is_one_incident_and_costs_no_step() -> None:
    refused = [
        operation(time, "checkpoint_failed", why=why) for time, why in ((7, "full"), (8, "full"), (9, "gone"))
    ]
    lost = [step(6, 4, 1, compute=1.0), *refused, step(10, 5, 1, compute=1.0)]
    failed = [
        operation(11, "attempt_end", attempt="a", status=1),
        operation(11, "diagnosis", attempt="a", cause="x"),
    ]
    found = history([start(4), *lost], failed, hidden=1).incidents
    assert [(one.cause, one.summary, one.times, one.steps_lost) for one in found] == [
        (SAVE_REFUSED, "full", 2, 0),
        (SAVE_REFUSED, "gone", 1, 0),
        ("x", "", 1, 2),
    ]


def test_a_diagnosis_is_told_at_the_end_of_its_attempt_with_all_that_it_holds() -> None:
    told = {
        "cause": "bad GPU", "culprit": {"host": "n1", "gpu": "3", "rank": 0}, "summary": "it fell off",
        "evidence": ["a", "b"], "gives_up": "3 restarts", "remedy": "report it", "sure": True, "attempt": "b",
    }  # fmt: skip
    ends = [operation(time, "attempt_end", attempt=name, status=1) for time, name in ((1, "a"), (5, "b"))]
    told_at_last = [
        operation(9, "diagnosis", **told) | {"step": 7},
        operation(9, "diagnosis", attempt="none"),
    ]
    operations = [*ends, *told_at_last]
    first, second = history([], operations).incidents
    assert (first.time, first.culprit, first.step) == (T0 + 5, "n1, GPU 3, rank 0", 7)
    assert (first.summary, first.evidence, first.remedy, first.sure) == (
        "it fell off",
        ("a", "b"),
        "report it",
        True,
    )
    assert first.action == "not started again: 3 restarts"
    assert (second.time, second.cause, second.culprit) == (T0 + 9, "unknown", "")
    assert (second.action, second.sure) == ("started again by the supervisor", False)


def test_tokens_and_speeds_are_of_the_steps_that_are_part_of_the_run() -> None:
    events = [start(4, ranks=3), step(6, 1, compute=1.0), step(7, 2, 9, compute=1.0), step(8, 2, compute=1.0)]
    events.append(step(9, 3, compute=1.0) | {"tokens_per_s": 40.0, "consumed_tokens": 250})
    seen = history(events, hidden=9)
    assert (seen.kept_steps, seen.kept_tokens, seen.step) == (3, 250, 3)
    assert (seen.best_tokens_per_s, seen.members) == (100.0, ((T0 + 4, 3),))
    assert (seen.began_s, seen.last_s, seen.is_over) == (T0 + 4, T0 + 9, False)
    assert history(events, [operation(1, "attempt", attempt="a")]).began_s == T0 + 1
    timeless = operation(0, "job") | {"time": None}
    assert history(events, [operation(99, "job"), timeless]).last_s == T0 + 99


def test_the_best_speed_is_that_of_nine_in_ten_and_takes_no_memory_for_each_step() -> None:
    rng = Random(7)
    peaks = []
    for count in (500, 4_000):
        speeds = [90_000 * (1 + 0.05 * rng.random()) for _ in range(count)]
        events = ({"event": "step", "step": at, "incarnation": 1, "time": T0 + at, "tokens_per_s": speed}
                  for at, speed in enumerate(speeds))  # fmt: skip
        tracemalloc.start()
        seen = read_run_history(events, [], is_visible=lambda base: True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert seen.best_tokens_per_s == pytest.approx(sorted(speeds)[int(0.9 * count)], rel=1e-4)
        assert seen.best_tokens_per_s in speeds
    assert peaks[1] < 2.5 * peaks[0], "as a list they took eight times as much"


def test_tokens_that_are_counted_anew_and_clocks_that_go_back_take_nothing_away() -> None:
    counted = [(6, 1, 100), (5, 2, 50), (7, 3, 120)]
    steps = [
        step(time, number, compute=1.0) | {"consumed_tokens": tokens} for time, number, tokens in counted
    ]
    seen = history([start(4), *steps, operation(3, "setting", key="a")])
    assert (seen.kept_tokens, seen.last_s) == (120, T0 + 7)
    whole = history([start(4), step(6, 1, compute=1.0) | {"tokens_per_s": 40}])
    assert (whole.best_tokens_per_s, whole.members) == (40.0, ((T0 + 4, 1),))


@pytest.mark.parametrize("again", [step(12, 2, compute=1.0), start(12, 2, at=1)])
def test_a_run_that_goes_on_after_its_end_is_neither_over_nor_finished(again: dict) -> None:
    events = [start(4), step(6, 1, compute=1.0), operation(9, "end", finished=True, failed=False)]
    over, longer = history(events), history([*events, again])
    assert (over.is_over, over.is_finished) == (True, True)
    assert (longer.is_over, longer.is_finished) == (False, False)


def test_a_save_that_is_refused_for_the_reason_of_a_rewind_is_an_incident_of_its_own() -> None:
    rewind = operation(7, "rewind", to_step=1, reason="full")
    found = history([start(4), rewind, operation(8, "checkpoint_failed", why="full")]).incidents
    assert [(one.cause, one.times) for one in found] == [("rewind", 1), (SAVE_REFUSED, 1)]


def test_an_incident_costs_the_steps_up_to_its_moment_though_a_clock_was_set_between_them() -> None:
    lost = [step(time, number, compute=1.0) for number, time in enumerate((12.0, 6.0, 9.0), 4)]
    failed = [operation(time, "diagnosis", attempt=str(time), cause="x") for time in (9, 20)]
    found = history([start(4, 2), *lost], failed, hidden=1).incidents
    assert [one.steps_lost for one in found] == [2, 1]


def test_a_diagnosis_whose_attempt_ended_at_no_known_time_has_its_own_and_no_step_that_is_no_number() -> None:
    end = operation(5, "attempt_end", attempt="a", status=1) | {"time": None}
    (found,) = history([], [end, operation(9, "diagnosis", attempt="a", cause="x") | {"step": "7"}]).incidents
    assert (found.time, found.step) == (T0 + 9, 0)


@pytest.mark.parametrize(
    ("operations", "is_over"),
    [
        ([], True),
        ([operation(20, "attempt", attempt="b")], False),
        (
            [operation(20, "attempt", attempt="b"), operation(21, "attempt_end", attempt="b", status=143)],
            True,
        ),
        ([operation(20, "attempt_end", attempt="b", status=1)], False),
        ([operation(20, "attempt_end", attempt="b", status=0), operation(21, "alert", word="new")], True),
        ([operation(5, "attempt", attempt="a")], True),
        ([operation(9, "attempt", attempt="b")], True),
        ([operation(20, "request", action="save")], True),
    ],
)
def test_a_run_is_over_where_the_newest_record_says_so(operations: list[dict], is_over: bool) -> None:
    events = [start(4), step(6, 1, compute=1.0), operation(9, "end", finished=False, failed=False)]
    assert history(events, operations).is_over == is_over
    failed = [*events[:2], operation(9, "end", finished=False, failed=True)]
    assert not history(failed).is_over and history(failed).changes[-1][1].startswith("failed: ")


@pytest.mark.parametrize(
    ("skip", "words"),
    [([4, 8], " without samples 4–8"), ([4, 4], ""), (None, ""), ([4], ""), ("ab", "")],
)
def test_a_rewind_says_what_it_leaves_out(skip: Any, words: str) -> None:
    assert (
        rewind_words({"to_step": 3, "skip": skip})
        == f"went back to step 3 or the checkpoint before it{words}"
    )


def marks_of(
    *operations: dict, finished: bool = False
) -> list[tuple[float, TimeClass | None, TimeClass, float | None]]:
    found = read_marks(operations, was_finished=finished).marks
    return [(mark.time - T0, mark.before, mark.after, mark.since and mark.since - T0) for mark in found]


@pytest.mark.parametrize(
    ("status", "diagnosis", "before", "after"),
    [
        (0, None, TimeClass.ENDING, TimeClass.FINISHED),
        (143, None, TimeClass.ENDING, TimeClass.STOPPED),
        (130, None, TimeClass.ENDING, TimeClass.STOPPED),
        (1, {"cause": "hang", "gives_up": ""}, TimeClass.HANG, TimeClass.RESTART),
        (1, {"cause": "killed", "gives_up": "no"}, TimeClass.FAILURE, TimeClass.DOWN),
        (1, None, TimeClass.FAILURE, TimeClass.DOWN),
    ],
)
def test_the_end_of_an_attempt_says_what_came_before_and_what_follows(
    status: int, diagnosis: dict | None, before: TimeClass, after: TimeClass
) -> None:
    told = [operation(8, "diagnosis", attempt="a", **diagnosis)] if diagnosis else []
    end = operation(7, "attempt_end", attempt="a", status=status)
    found = marks_of(operation(1, "attempt", attempt="a"), end, *told, finished=True)
    assert found == [(1, None, TimeClass.STARTING, None), (7, before, after, None)]


def test_only_the_last_end_of_a_run_that_is_finished_is_its_finish() -> None:
    ends = [operation(time, "attempt_end", attempt=str(time), status=0) for time in (3, 7)]
    assert [after for _, _, after, _ in marks_of(*ends, finished=True)] == [
        TimeClass.STOPPED,
        TimeClass.FINISHED,
    ]
    assert [after for _, _, after, _ in marks_of(*ends)] == [TimeClass.STOPPED] * 2


def test_a_job_waits_and_runs_and_the_attempt_tells_of_its_start_before_it() -> None:
    def job(time: float, state: str) -> dict:
        return operation(time, "job", state=state)

    attempt = operation(5, "attempt", attempt="a")
    found = marks_of(
        job(1, "PENDING"), job(3, "running"), attempt, job(6, "RUNNING"), job(8, "cancelled"), job(9, "x")
    )
    assert [(time, after) for time, _, after, _ in found] == [
        (1, TimeClass.QUEUE), (3, TimeClass.STARTING), (5, TimeClass.STARTING), (8, TimeClass.STOPPED),
        (1805, TimeClass.DOWN),
    ]  # fmt: skip
    assert found[-1][3] == 5, "it holds for a rank that has not written since"


def test_each_state_of_a_job_has_the_class_of_the_time_that_follows() -> None:
    states = ("pending", "held", "requeued", "running", "failed", "cancelled")
    jobs = [operation(time, "job", state=state) for time, state in enumerate(states)]
    found = [after for _, _, after, _ in marks_of(*jobs)]
    assert found[:3] == [TimeClass.QUEUE] * 3
    assert found[3:] == [TimeClass.STARTING, TimeClass.DOWN, TimeClass.STOPPED]


@pytest.mark.parametrize(
    "between", [operation(3, "job", state="pending"), operation(3, "attempt_end", attempt="a", status=1)]
)
def test_a_job_that_runs_after_its_attempt_was_over_starts_anew(between: dict) -> None:
    running = operation(5, "job", state="running")
    found = marks_of(operation(1, "attempt", attempt="a"), between, running)
    assert (5, None, TimeClass.STARTING, None) in found


def test_a_mark_of_an_unended_attempt_counts_where_nothing_else_is_known_since() -> None:
    sure, late = Mark(time=5.0, before=None, after=TimeClass.QUEUE), Mark(
        time=8.0, before=None, after=TimeClass.DOWN, since=3.0
    )  # fmt: skip

    def spans(*marks: Mark, wrote: float) -> list[tuple[float, float, TimeClass]]:
        found = OperationMarks(marks).carve(1.0, 10.0, wrote=wrote, otherwise=TimeClass.STARTING)
        return [(span.begin, span.end, span.kind) for span in found]

    assert spans(late, wrote=3.0) == [(1.0, 8.0, TimeClass.STARTING), (8.0, 10.0, TimeClass.DOWN)]
    assert spans(late, wrote=3.5) == [(1.0, 10.0, TimeClass.STARTING)]
    assert spans(late, sure, wrote=0.0) == [(1.0, 5.0, TimeClass.STARTING), (5.0, 10.0, TimeClass.QUEUE)]
    starts = OperationMarks([Mark(time=t, before=None, after=TimeClass.STARTING) for t in (2.0, 6.0, 9.0)])
    assert starts.last_start(1.0, 9.0) == 6.0 and starts.last_start(6.0, 9.0) is None


def test_a_number_of_ranks_that_no_run_has_is_damage(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    expected = read_ledger(write_run(tmp_path / "sound", events, operations, bases), now=T0 + 1000)
    for number in (1 << 62, 10**400):
        damaged = [
            operation(900, "attempt", attempt="x", ranks=number),
            operation(901, "attempt_end", attempt="x"),
        ]
        run = write_run(
            tmp_path / f"{number.bit_length()}", [*events, start(950, 9, ranks=number)], damaged, bases
        )
        ledger = read_ledger(run, now=T0 + 1000)
        assert ledger is not None and expected is not None and ledger.ranks.keys() == expected.ranks.keys()


def test_times_and_seconds_that_are_none_are_left_out() -> None:
    assert [
        time_of({"event": "x", "time": time}) for time in (5, True, "5", None, float("nan"), 10**400)
    ] == [
        5.0,
        *[None] * 5,
    ]
    spent = {"a": 1, "b": 0.0, "c": -1.0, "d": True, "e": float("inf"), "f": "2", "g": 10**400}
    assert seconds_of(spent) == {"a": 1.0} and seconds_of(None) == {}


def test_the_newest_attempt_runs_until_its_own_end() -> None:
    attempts = [operation(1, "attempt", attempt="a"), operation(2, "attempt", attempt="b")]
    assert _running_attempt(attempts) == ("b", T0 + 2)
    assert _running_attempt([*attempts, operation(3, "attempt_end", attempt="a")]) == ("b", T0 + 2)
    assert _running_attempt([*attempts, operation(3, "attempt_end", attempt="b")]) == ("", None)
