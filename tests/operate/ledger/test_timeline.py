"""What is done with seconds that a rank did not measure, and with more of them than there were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operate.ledger.test_ledger import T0, start, step

from bloomery.operate.ledger.figures import duration
from bloomery.operate.ledger.operations import read_marks
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.ledger.timeline import rank_spans


def seconds_by_class(events: list[dict[str, Any]], *, end: float) -> dict[TimeClass, float]:
    marks = read_marks([], was_finished=False)
    spans = rank_spans(events, marks=marks, is_visible=lambda base: True, begin=T0, end=T0 + end)
    found: dict[TimeClass, float] = {}
    for span in spans:
        found[span.kind] = found.get(span.kind, 0.0) + span.end - span.begin
    return found


def test_what_a_rank_did_not_measure_is_unexplained_and_no_training() -> None:
    events = [start(1, starting=1.0), step(2, 1, compute=1.0), step(12, 2, compute=1.0)]
    found = seconds_by_class(events, end=12)
    assert found[TimeClass.UNEXPLAINED] == pytest.approx(9.0, abs=0.11)
    assert found[TimeClass.TRAINING] == pytest.approx(2.0, abs=0.11)


def test_a_step_without_any_measured_seconds_is_unexplained() -> None:
    bare = {**step(12, 2), "spent": {"dancing": 1.0}}
    assert seconds_by_class([start(1, starting=1.0), bare], end=12)[TimeClass.UNEXPLAINED] == pytest.approx(
        11
    )


def test_more_seconds_than_there_were_are_taken_in_proportion() -> None:
    events = [start(1, starting=1.0), step(11, 1, compute=15.0, data=5.0), step(12, 2, compute=1.0)]
    found = seconds_by_class(events, end=12)
    assert found[TimeClass.DATA] == pytest.approx(2.5)
    assert found[TimeClass.TRAINING] + found[TimeClass.FIRST_STEP] == pytest.approx(8.5)
    assert TimeClass.UNEXPLAINED not in found


def test_a_first_step_that_was_lost_has_compiled_for_those_after_the_rewind() -> None:
    back = {**start(8, 2), "reason": "rewind: spike", "spent": {"loading a checkpoint": 1.0}}
    events = [start(1, starting=1.0), step(7, 1, compute=6.0), back]
    events.append(step(10, 1, 2, compute=2.0))
    events += [step(9 + number, number, 2, compute=1.0) for number in range(2, 8)]
    marks = read_marks([], was_finished=False)
    kept = lambda base: base[1] == 2  # noqa: E731
    spans = list(rank_spans(events, marks=marks, is_visible=kept, begin=T0, end=T0 + 16))
    found = {kind: sum(s.end - s.begin for s in spans if s.kind == kind) for kind in {s.kind for s in spans}}
    assert found == {
        TimeClass.STARTING: pytest.approx(1),
        TimeClass.LOST: pytest.approx(6),
        TimeClass.LOADING: pytest.approx(1),
        TimeClass.TRAINING: pytest.approx(8),
    }


@pytest.mark.parametrize("incarnation", [1, 9])
def test_a_process_begins_once_whatever_its_number_and_whatever_has_none(incarnation: int) -> None:
    note = {"event": "phase", "time": T0 + 4.5}
    steps = [step(4, 1, incarnation, compute=3.0), note]
    steps += [step(time, time - 3, incarnation, compute=1.0) for time in (5, 6, 7)]
    found = seconds_by_class([start(1, incarnation, starting=1.0), *steps], end=7)
    assert found == {
        TimeClass.STARTING: pytest.approx(1),
        TimeClass.FIRST_STEP: pytest.approx(2),
        TimeClass.TRAINING: pytest.approx(4),
    }


@pytest.mark.parametrize("lost", [0, 2])
def test_spans_come_in_the_order_of_time_to_the_end_of_a_process(lost: int) -> None:
    end = {"event": "end", "time": T0 + 6, "finished": True, "spent": {"ending": 1.0}}
    events = [start(1, starting=1.0), step(3, 1, compute=2.0), step(4, 2, compute=1.0), end]
    marks = read_marks([], was_finished=True)
    kept = lambda base: base[0] != lost  # noqa: E731
    spans = list(rank_spans(events, marks=marks, is_visible=kept, begin=T0, end=T0 + 7))
    edges = [T0, *(span.end for span in spans)]
    assert [span.begin for span in spans] == edges[:-1] and edges[-1] == T0 + 7


@pytest.mark.parametrize("again", [[], [start(18, 1, starting=3.0)]])
def test_a_process_that_began_without_a_record_of_its_own_was_down_before(
    again: list[dict[str, Any]],
) -> None:
    events = [start(1, starting=1.0), step(2, 1, compute=1.0), *again]
    events += [step(20, 2, 1 if again else 2, compute=2.0), step(21, 3, 1 if again else 2, compute=1.0)]
    assert seconds_by_class(events, end=21) == {
        TimeClass.STARTING: pytest.approx(4 if again else 1),
        TimeClass.TRAINING: pytest.approx(3),
        TimeClass.FIRST_STEP: pytest.approx(1),
        TimeClass.DOWN: pytest.approx(13 if again else 16),
    }


def test_the_excess_of_a_first_step_is_taken_from_all_that_it_computed() -> None:
    first = step(4, 1, compute=1.0)
    first["spent"]["updating the weights"] = 2.0
    found = seconds_by_class([start(1, starting=1.0), first, step(5, 2, compute=1.0)], end=5)
    assert (found[TimeClass.FIRST_STEP], found[TimeClass.TRAINING]) == (pytest.approx(2), pytest.approx(2))


@pytest.mark.parametrize(
    ("steps", "unexplained"),
    [
        ([(2, 1.5), (3.5, 1.0)], 0.3),  # no more than a tenth of a second is owed
        ([(3.1, 2.0), (4.2, 1.0), (5.3, 1.0)], 0.2),  # nor is more than that lent
        ([(2, 1.0), (2, 0.05), (3.15, 1.0)], 0.0),  # what was measured in no time is owed
        ([(2, 1.0), (3.15, 1.0)], 0.05),
        ([(1.1 + n * 0.1, 0.1) for n in range(25)], 0.0),  # sums of tenths are rounded
    ],
)
def test_a_process_owes_and_lends_a_tenth_of_a_second(
    steps: list[tuple[float, float]], unexplained: float
) -> None:
    events = [start(1, starting=1.0)]
    events += [step(time, number, compute=seconds) for number, (time, seconds) in enumerate(steps, 1)]
    found = seconds_by_class(events, end=steps[-1][0])
    assert found.get(TimeClass.UNEXPLAINED, 0.0) == pytest.approx(unexplained, abs=1e-9)
    assert (TimeClass.UNEXPLAINED in found) == (unexplained > 0.0)


def test_a_process_owes_nothing_of_the_one_before_it() -> None:
    events = [start(1, starting=1.0), step(2, 1, compute=1.2), start(5, 2, at=1, starting=1.0)]
    found = seconds_by_class([*events, step(6.15, 2, 2, compute=1.0)], end=6.15)
    assert found[TimeClass.UNEXPLAINED] == pytest.approx(0.05)


def test_seconds_are_told_in_the_unit_that_a_person_would_use() -> None:
    told = {duration(seconds): seconds for seconds in (0.0, 12.0, 270.0, 111_600.0, 1e6, 1e9)}
    assert list(told) == ["0.0 s", "12.0 s", "4.5 min", "31.0 h", "11.6 days", "11,574.1 days"]


@settings(max_examples=40)
@given(st.lists(st.floats(-0.04, 0.04), min_size=1, max_size=30))
def test_events_that_are_written_a_moment_late_leave_nothing_unexplained(late: list[float]) -> None:
    """A rank measures each second once, so that what one step has too much the next has too little."""
    events = [start(1, starting=1.0)]
    for number, moment in enumerate(late, 1):
        events.append(step(1 + number + moment, number, compute=1.0))
    events.append(step(2 + len(late), len(late) + 1, compute=1.0))
    found = seconds_by_class(events, end=2 + len(late))
    assert found.get(TimeClass.UNEXPLAINED, 0.0) < 1e-6
