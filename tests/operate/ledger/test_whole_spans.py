"""Spans, bins and figures of small runs, as whole values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.operate.ledger.test_ledger import T0, killed_once, operation, start, step, write_run

from bloomery.errors import ConfigError
from bloomery.operate.ledger.figures import PlannedRun, duration, ledger_figures, plan_figures, read_plan
from bloomery.operate.ledger.operations import Span, read_marks
from bloomery.operate.ledger.run_history import (
    SAVE_REFUSED,
    Incident,
    RunHistory,
)
from bloomery.operate.ledger.run_ledger import RunLedger, _Sums, read_ledger
from bloomery.operate.ledger.time_class import MEANINGS, NOT_WANTED, OF_ACTIVITY, TimeClass
from bloomery.operate.ledger.timeline import rank_spans


def spans(events: list[dict], end: float, *operations: dict, finished: bool = False) -> list[tuple[Any, ...]]:
    marks = read_marks(operations, was_finished=finished)
    found = rank_spans(events, marks=marks, is_visible=lambda base: True, begin=T0, end=T0 + end)
    return [(round(span.begin - T0, 6), round(span.end - T0, 6), span.kind) for span in found]


def test_each_span_of_a_rank_is_where_it_should_be() -> None:
    events = [start(10, starting=4.0, loading=2.0)]
    events += [step(14, 1, compute=3.0, data=1.0), step(16, 2, compute=1.5, save=0.5)]
    events += [step(17, 3, compute=1.0), {**start(20, 2, at=2), "reason": "rewind: x", "spent": None}]
    events += [step(22, 3, 2, compute=1.0)]
    events += [{**operation(25, "end", incarnation=2, finished=True), "spent": None}]
    attempt = operation(2, "attempt", attempt="a")
    over = operation(26, "attempt_end", attempt="a", status=0)
    assert spans(events, 30, attempt, over, finished=True) == [
        (0.0, 2.0, TimeClass.STARTING),
        (2.0, 4.0, TimeClass.STARTING),
        (4.0, 8.0, TimeClass.STARTING),
        (8.0, 10.0, TimeClass.LOADING),
        (10.0, 11.75, TimeClass.FIRST_STEP),  # the median of the two steps after it is 1.25 s
        (11.75, 13.0, TimeClass.TRAINING),
        (13.0, 14.0, TimeClass.DATA),
        (14.0, 15.5, TimeClass.TRAINING),
        (15.5, 16.0, TimeClass.SAVING),
        (16.0, 17.0, TimeClass.TRAINING),
        (17.0, 20.0, TimeClass.LOADING),
        (20.0, 21.1, TimeClass.TRAINING),
        (21.1, 22.0, TimeClass.UNEXPLAINED),
        (22.0, 25.0, TimeClass.ENDING),
        (25.0, 26.0, TimeClass.ENDING),
        (26.0, 30.0, TimeClass.FINISHED),
    ]


def test_spans_fall_into_the_bins_and_incidents_that_they_belong_to() -> None:
    incidents = [Incident(time=T0 + 10, cause="a"), Incident(time=T0 + 15, cause=SAVE_REFUSED),
                 Incident(time=T0 + 30, cause="b")]  # fmt: skip
    sums = _Sums(incidents, begin=T0, end=T0 + 40, bins=4)
    kinds = [
        (0, 5, TimeClass.TRAINING), (5, 10, TimeClass.FAILURE), (10, 12, TimeClass.RESTART),
        (12, 14, TimeClass.STARTING), (14, 15, TimeClass.FIRST_STEP), (15, 25, TimeClass.TRAINING),
        (25, 27, TimeClass.LOST), (27, 30, TimeClass.HANG), (30, 35, TimeClass.ABSENT),
        (35, 38, TimeClass.DOWN), (38, 40, TimeClass.STOPPED),
    ]  # fmt: skip
    sums.add("0-0", [Span(T0 + begin, T0 + end, kind) for begin, end, kind in kinds])
    assert sums.incident_s == [5 + 2 + 2 + 1, 0.0, 2 + 3 + 3]
    assert sums.ranks == {
        "0-0": {TimeClass.TRAINING: 15.0, TimeClass.FAILURE: 5.0, TimeClass.RESTART: 2.0,
                TimeClass.STARTING: 2.0, TimeClass.FIRST_STEP: 1.0, TimeClass.LOST: 2.0, TimeClass.HANG: 3.0,
                TimeClass.DOWN: 3.0, TimeClass.STOPPED: 2.0}
    }  # fmt: skip
    assert [dict(part) for part in sums.bins] == [
        {TimeClass.TRAINING: 5.0, TimeClass.FAILURE: 5.0},
        {TimeClass.RESTART: 2.0, TimeClass.STARTING: 2.0, TimeClass.FIRST_STEP: 1.0, TimeClass.TRAINING: 5.0},
        {TimeClass.TRAINING: 5.0, TimeClass.LOST: 2.0, TimeClass.HANG: 3.0},
        {TimeClass.DOWN: 3.0, TimeClass.STOPPED: 2.0},
    ]
    assert sums.goodput_at_incidents() == [0.5, 5 / 15, 15 / 30]


def test_a_span_belongs_to_an_incident_that_was_noticed_a_moment_before_or_after_its_edge() -> None:
    incidents = [Incident(time=T0 + 10, cause="a"), Incident(time=T0 + 20, cause="b")]
    sums = _Sums(incidents, begin=T0, end=T0 + 40)
    kinds = [(5, 10.005, TimeClass.HANG), (19.995, 23, TimeClass.DOWN)]
    sums.add("0-0", [Span(T0 + begin, T0 + end, kind) for begin, end, kind in kinds])
    assert sums.incident_s == [pytest.approx(5.005), pytest.approx(3.005)]
    trained = _Sums(incidents, begin=T0, end=T0 + 40)
    trained.add("0-0", [Span(T0, T0 + 10, TimeClass.TRAINING)])
    assert trained.goodput_at_incidents() == [1.0, 0.5]


def test_a_run_that_never_wrote_has_the_ranks_of_its_newest_attempt(tmp_path: Path) -> None:
    attempts = [
        operation(time, "attempt", attempt=str(time), ranks=ranks) for time, ranks in ((0, 13), (9, 12))
    ]
    ledger = read_ledger(write_run(tmp_path, [], attempts, {}), until=T0 + 30)
    assert ledger is not None and list(ledger.ranks) == [f"0-{rank}" for rank in range(12)]
    assert (ledger.begin, ledger.history.began_s) == (T0, T0)


def test_a_run_that_was_stopped_and_has_a_living_rank_is_counted_until_now(tmp_path: Path) -> None:
    run = write_run(tmp_path, *killed_once())
    before = read_ledger(run, until=T0 - 5)
    assert before is not None and (before.begin, before.end, before.effective_time) == (T0, T0, 0.0)
    run.heartbeat().write_text(json.dumps({"time": T0 + 99, "world": 1, "activity": "preparing the data"}))
    ledger = read_ledger(run, now=T0 + 100, bins=1)
    assert ledger is not None and ledger.end == T0 + 100
    assert read_ledger(run, now=T0 + 1000).end == T0 + 30  # type: ignore[union-attr]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_ranks_without_a_journal_are_those_of_the_newest_start(
    tmp_path: Path, before: int, after: int
) -> None:
    events = [start(4, ranks=before), step(6, 1, compute=1.0), start(20, 2, at=1, ranks=after)]
    unknown = [operation(5, "attempt", attempt="a"), operation(19, "attempt_end", attempt="a")]
    ledger = read_ledger(write_run(tmp_path, events, unknown, {1: None, 2: (1, 1)}), until=T0 + 30)
    assert ledger is not None and list(ledger.ranks) == [f"0-{rank}" for rank in range(after)]


def test_the_figures_of_a_ledger_are_these(tmp_path: Path) -> None:
    run = write_run(tmp_path, *killed_once())
    ledger = read_ledger(run, now=T0 + 1000)
    assert ledger is not None
    plan = PlannedRun(tokens_per_s=200.0, tokens=1000, days=2.0, goodput=0.75)
    figures = ledger_figures(ledger, plan)
    (incident,) = figures.pop("incidents")
    assert {name: incident[name] for name in ("cause", "culprit", "steps_lost", "times", "step")} == {
        "cause": "killed", "culprit": "node7, rank 0", "steps_lost": 2, "times": 1, "step": 0,
    }  # fmt: skip
    assert incident["seconds"] == pytest.approx(18.0)
    assert {name: figures[name] for name in ("begin", "end", "ranks", "elapsed_s", "step", "kept_steps",
                                             "kept_tokens", "best_tokens_per_s")} == {
        "begin": T0, "end": T0 + 30, "ranks": 1, "elapsed_s": 30.0, "step": 5, "kept_steps": 5,
        "kept_tokens": 500, "best_tokens_per_s": 100.0,
    }  # fmt: skip
    assert figures["rank_seconds"] == pytest.approx(30.0) and figures["ettr"] == pytest.approx(3.5 / 30)
    assert figures["token_goodput"] == pytest.approx(500 / 3000)
    assert figures["causes"] == {"killed": {"incidents": 1, "seconds": pytest.approx(18.0), "steps_lost": 2}}
    assert sum(figures["shares"].values()) == pytest.approx(1.0)
    assert figures["plan"] == plan_figures(ledger, plan)
    assert figures["plan"]["days"] == pytest.approx(1000 / (500 / 30) / 86400)
    later = ledger_figures(replace(ledger, history=replace(ledger.history, step=9)))
    assert (later["step"], later["kept_steps"], "plan" in later) == (9, 5, False)
    for length in (9.0, 0.0):
        nothing = RunLedger(begin=T0, end=T0 + length, ranks={}, history=RunHistory())
        assert plan_figures(nothing, plan)["days"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(119.96, "120.0 s"), (120.0, "2.0 min"), (7199.0, "120.0 min"), (7200.0, "2.0 h"), (259_199.0, "72.0 h"),
     (259_200.0, "3.0 days")],
)  # fmt: skip
def test_a_longer_time_has_a_larger_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("content", ["[", "[]", '{"run": {"days": 1}}', '{"run": {"days": "x"}}'])
def test_a_file_that_is_no_plan_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_plan(path)
    (mistake,) = refused.value.mistakes
    assert (mistake.key, mistake.value, mistake.source) == ("--plan", str(path), "command line")
    path.write_text('{"run": {"days": 0, "training_days": 1, "tokens": 5}, "speed": {"tokens_per_s": 2}}')
    assert read_plan(path) == PlannedRun(tokens_per_s=2.0, tokens=5, days=0.0, goodput=0.0)
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        read_plan(tmp_path / "none")


def test_each_class_of_time_has_a_meaning_and_each_activity_a_class() -> None:
    assert set(MEANINGS) == set(TimeClass) and {TimeClass.STOPPED, TimeClass.FINISHED} == NOT_WANTED
    assert {str(name): str(kind) for name, kind in OF_ACTIVITY.items()} == {
        "starting": "start-up, imports", "preparing the data": "preparing the data",
        "building the model": "start-up, imports", "loading a checkpoint": "loading",
        "waiting for samples": "waiting for data", "forward and backward": "training",
        "reducing gradients": "training", "updating the weights": "training",
        "reducing the report": "training", "evaluating": "evaluating", "between steps": "between steps",
        "waiting for peers": "waiting for peers",
        "saving a checkpoint": "blocked by saves",
        "ending": "last save and end", "ended": "last save and end",
    }  # fmt: skip
