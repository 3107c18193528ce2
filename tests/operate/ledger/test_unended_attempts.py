"""Attempts whose end no supervisor recorded, in the goodput ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.operate.ledger.test_ledger import T0, operation, start, step, write_run

from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.operations import Span, read_marks
from bloomery.operate.ledger.run_history import Incident
from bloomery.operate.ledger.run_ledger import _living, _running_attempt, _Sums, read_ledger
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.ledger.timeline import rank_spans


@pytest.mark.parametrize(
    ("later", "kind"),
    [
        (operation(660, "job", state="PENDING"), TimeClass.QUEUE),
        (operation(660, "job", state="CANCELLED"), TimeClass.STOPPED),
        ({**operation(600, "end"), "finished": False, "spent": {"ending": 1.0}}, TimeClass.STOPPED),
        ({**operation(600, "end"), "finished": True, "spent": {"ending": 1.0}}, TimeClass.FINISHED),
    ],
)
@pytest.mark.parametrize("wrote", [True, False])
def test_what_is_recorded_after_a_start_without_an_end_holds_longer_than_half_an_hour(
    later: dict, kind: TimeClass, wrote: bool
) -> None:
    events = [start(1, starting=1.0), step(599, 1, compute=598.0)] if wrote else []
    operations = [operation(0, "attempt", attempt="a", ranks=1)]
    (events if later["event"] == "end" else operations).append(later)
    marks = read_marks(operations, was_finished=False)
    spans = rank_spans(events, marks=marks, is_visible=lambda base: True, begin=T0, end=T0 + 10800)
    after = {span.kind for span in spans if span.end > T0 + 660}
    assert after == {kind}


def test_a_start_is_down_half_an_hour_after_the_last_of_several_that_nobody_saw_end() -> None:
    operations = [operation(0, "attempt", attempt="a"), operation(100, "attempt", attempt="b")]
    marks = read_marks(operations, was_finished=False)
    spans = list(marks.carve(T0, T0 + 9000, wrote=T0, otherwise=TimeClass.STARTING))
    assert [(span.end - T0, span.kind) for span in spans] == [
        (100, TimeClass.STARTING),
        (1900, TimeClass.STARTING),
        (9000, TimeClass.DOWN),
    ]


def test_a_job_that_is_seen_to_run_after_the_start_does_not_make_it_last() -> None:
    operations = [
        operation(0, "job", state="pending"),
        operation(50, "attempt", attempt="a"),
        operation(70, "job", state="running"),
    ]
    marks = read_marks(operations, was_finished=False)
    spans = list(marks.carve(T0, T0 + 9000, wrote=T0, otherwise=TimeClass.QUEUE))
    assert [(span.end - T0, span.kind) for span in spans] == [
        (50, TimeClass.QUEUE),
        (1850, TimeClass.STARTING),
        (9000, TimeClass.DOWN),
    ]


def test_an_attempt_that_is_named_by_a_number_has_ended_too(tmp_path: Path) -> None:
    """A heartbeat that is left of it does not make it run on."""
    operations = [
        operation(0, "attempt", attempt=7, ranks=1),
        operation(10, "attempt_end", attempt=7, status=143),
    ]
    run = write_run(tmp_path, [start(1, starting=1.0), step(9, 1, compute=8.0)], operations, {1: None})
    run.heartbeat().parent.mkdir(exist_ok=True)
    beat = {"time": T0 + 9, "since": T0 + 9, "attempt": "7", "incarnation": 1, "step": 1, "activity": "x"}
    run.heartbeat().write_text(json.dumps(beat))
    ledger = read_ledger(run, now=T0 + 18, until=T0 + 18)
    assert ledger is not None
    assert ledger.seconds[TimeClass.STOPPED] == pytest.approx(8)


def test_a_rank_of_a_peer_lives_by_its_own_heartbeat(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    record = {"time": T0 - 1.0, "world": 2, "activity": "saving a checkpoint"}
    run.heartbeat(peer="oslo-2", rank=1).write_text(json.dumps(record))
    living = [_living(run, name, ("", None), now=T0) for name in ("oslo-2-1", "0-1", "oslo-2-0")]
    assert [rank is not None for rank in living] == [True, False, False]


@pytest.mark.parametrize("kind", list(TimeClass))
def test_what_follows_an_incident_until_the_run_trains_again_is_its_cost(kind: TimeClass) -> None:
    costs = {
        TimeClass.RESTART, TimeClass.DOWN, TimeClass.QUEUE, TimeClass.STARTING, TimeClass.PREPARING,
        TimeClass.LOADING, TimeClass.FIRST_STEP,
    }  # fmt: skip
    sums = _Sums([Incident(time=T0 + 10, cause="a")], begin=T0, end=T0 + 40)
    sums.add("0-0", [Span(T0 + 10, T0 + 13, kind)])
    assert sums.incident_s == [3.0 if kind in costs else 0.0]


def test_a_report_up_to_a_time_that_is_still_to_come_ends_now(tmp_path: Path) -> None:
    events = [start(1, starting=1.0), step(9, 1, compute=8.0)]
    run = write_run(tmp_path, events, [operation(0, "attempt", attempt="a", ranks=1)], {1: None})
    ledger = read_ledger(run, now=T0 + 18, until=T0 + 1000)
    assert ledger is not None and ledger.end == T0 + 18


def test_a_start_that_was_refused_as_the_run_is_in_use_does_not_end_the_attempt_that_trains() -> None:
    operations = [operation(0, "attempt", attempt="a"), operation(5, "attempt", attempt="b")]
    operations += [operation(6, "attempt_end", attempt="b", status=1)]
    operations += [operation(6, "diagnosis", attempt="b", cause="run in use")]
    assert _running_attempt(operations) == ("a", T0)
    operations += [operation(7, "attempt_end", attempt="a", status=0)]
    assert _running_attempt(operations) == ("", None)
