"""The figures of a ledger, and what living ranks and incidents have cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.operate.ledger.test_history import history
from tests.operate.ledger.test_ledger import T0, killed_once, operation, start, step, write_run

from bloomery.errors import ConfigError
from bloomery.events.heartbeat import RankActivity
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.figures import PlannedRun, ledger_figures, percentages, plan_figures, read_plan
from bloomery.operate.ledger.operations import read_marks
from bloomery.operate.ledger.run_history import (
    Incident,
    RunHistory,
)
from bloomery.operate.ledger.run_ledger import RunLedger, _living, read_ledger
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.ledger.timeline import LivingRank, rank_spans


def ledger_of(**more: Any) -> RunLedger:
    ranks = {
        "0-0": {TimeClass.TRAINING: 60.0, TimeClass.STOPPED: 20.0, TimeClass.QUEUE: 20.0},
        "0-1": {TimeClass.TRAINING: 40.0, TimeClass.FINISHED: 10.0, TimeClass.DOWN: 50.0},
    }
    steps = [step(at, at, compute=1.0) | {"tokens_per_s": float(at)} for at in range(1, 21)]
    best = history([start(0.5), *steps]).best_tokens_per_s
    seen = RunHistory(kept_tokens=950, kept_steps=20, step=20, best_tokens_per_s=best)
    return RunLedger(begin=T0, end=T0 + 100.0, ranks=ranks, history=seen, **more)


def test_the_shares_of_a_ledger_are_of_all_ranks_time() -> None:
    ledger = ledger_of()
    assert (ledger.total_s, ledger.effective_time) == (200.0, 0.5)
    assert ledger.ettr == 100.0 / 170.0, "what was stopped or finished was not wanted, the queue was"
    assert ledger.best_tokens_per_s == 19.0
    assert ledger.token_goodput() == 950 / 1900 and ledger.token_goodput(38.0) == 950 / 3800
    figures = ledger_figures(ledger)
    assert (figures["elapsed_s"], figures["rank_seconds"], figures["ranks"]) == (100.0, 200.0, 2)
    assert figures["shares"]["in the queue"] == 0.1 and figures["seconds"]["down after a failure"] == 50.0
    assert figures["by_rank"]["0-1"]["finished"] == 10.0 and "plan" not in figures
    empty = RunLedger(begin=T0, end=T0, ranks={}, history=RunHistory())
    assert (empty.effective_time, empty.ettr, empty.token_goodput(), empty.best_tokens_per_s) == (0.0,) * 4


def test_a_plan_is_read_and_stands_beside_what_came(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(
            {"speed": {"tokens_per_s": 40.0}, "run": {"tokens": 9500, "days": 4.0, "training_days": 3.0}}
        )
    )
    plan = read_plan(path)
    assert plan == PlannedRun(tokens_per_s=40.0, tokens=9500, days=4.0, goodput=0.75)
    told = plan_figures(ledger_of(), plan)
    assert told["days"] == 9500 / 9.5 / 86400.0 and told["token_goodput_of_plan"] == 950 / 4000
    assert (told["planned_goodput"], told["goodput"], told["tokens_per_s"]) == (0.75, 0.5, 19.0)
    assert (told["planned_days"], told["planned_tokens_per_s"]) == (4.0, 40.0)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not a plan"):
        read_plan(path)


def test_shares_in_percent_are_rounded_to_those_that_lose_the_most() -> None:
    assert percentages([1.0, 1.0, 1.0]) == [33.4, 33.3, 33.3]
    assert percentages([2.0, 1.0, 0.0]) == [66.7, 33.3, 0.0] and percentages([0.0, 0.0]) == [0.0, 0.0]


def test_the_parts_of_a_window_hold_what_fell_into_them_and_each_incident_its_share(tmp_path: Path) -> None:
    run = write_run(tmp_path, *killed_once())
    ledger = read_ledger(run, now=T0 + 1000, bins=3)
    assert ledger is not None
    failed = [part.get(TimeClass.FAILURE, 0.0) for part in ledger.bins]
    assert failed == [pytest.approx(0.0), pytest.approx(10.0), pytest.approx(0.0)]
    assert [sum(part.values()) for part in ledger.bins] == [pytest.approx(10.0)] * 3
    assert ledger.goodput_at_incident == [pytest.approx(1.5 / 20)]
    assert read_ledger(run, now=T0 + 1000, until=T0 + 12, ranks="first").end == T0 + 12  # type: ignore[union-attr]


def spans_of(
    events: list[dict], living: LivingRank | None, *operations: dict
) -> list[tuple[float, float, TimeClass]]:
    found = rank_spans(
        events, marks=read_marks(operations, was_finished=False), is_visible=lambda base: True, begin=T0,
        end=T0 + 30.0, living=living,
    )  # fmt: skip
    return [(span.begin - T0, span.end - T0, span.kind) for span in found if span.begin >= T0 + 2.0]


def test_what_a_living_rank_does_explains_the_time_since_it_began() -> None:
    events = [start(1, starting=1.0), step(2, 1, compute=1.0)]
    saving = LivingRank(str(RankActivity.SAVING), T0 + 29.0)
    assert spans_of(events, saving) == [(2.0, 30.0, TimeClass.SAVING)]
    assert spans_of(events, LivingRank("dancing", T0 + 29.0)) == [(2.0, 30.0, TimeClass.UNEXPLAINED)]
    assert spans_of(events, saving._replace(began=T0 + 12.0)) == [
        (2.0, 12.0, TimeClass.DOWN), (12.0, 30.0, TimeClass.SAVING)
    ]  # fmt: skip
    again = operation(20, "attempt", attempt="b")
    assert spans_of(events, saving, again)[-1] == (20.0, 30.0, TimeClass.SAVING)
    before = saving._replace(time=T0 + 15.0)
    assert spans_of(events, before, again) == [(2.0, 30.0, TimeClass.SAVING)], "it wrote before that began"
    ended = [*events, operation(5, "end", finished=True, spent={"ending": 3.0})]
    assert spans_of(ended, None)[-1] == (5.0, 30.0, TimeClass.FINISHED)
    assert spans_of([*events, operation(5, "end", failed=True)], None)[-1] == (5.0, 30.0, TimeClass.DOWN)


def test_a_start_that_measured_nothing_began_with_its_attempt() -> None:
    bare = {**start(10), "spent": None}
    told = spans_of([bare, step(11, 1, compute=1.0)], None, operation(4, "attempt", attempt="a"))
    assert told[:2] == [(4.0, 10.0, TimeClass.LOADING), (10.0, 11.0, TimeClass.TRAINING)]
    assert spans_of([bare, step(11, 1, compute=1.0)], None)[0] == (10.0, 11.0, TimeClass.TRAINING)


def test_causes_are_told_with_all_that_they_cost_the_dearest_first() -> None:
    incidents = [
        Incident(time=T0 + 1, cause="a", times=3, steps_lost=2),
        Incident(time=T0 + 2, cause="b"),
        Incident(time=T0 + 3, cause="a", steps_lost=5),
    ]
    ledger = RunLedger(
        begin=T0, end=T0 + 9, ranks={}, history=RunHistory(incidents=incidents), incident_s=[3.0, 9.0, 4.0]
    )
    assert list(ledger.by_cause().items()) == [("b", (1, 9.0, 0)), ("a", (4, 7.0, 7))]


def test_an_incident_costs_what_it_cost_a_rank_on_average(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    for event in (*events, *operations):
        event |= {"ranks": 2} if "ranks" in event else {}
    run = write_run(tmp_path, events, operations, bases)
    run.journal(rank=1).write_bytes(run.journal().read_bytes())
    for counted in ("all", "first"):
        ledger = read_ledger(run, now=T0 + 1000, ranks=counted)  # type: ignore[arg-type]
        assert ledger is not None and ledger.incident_s == [pytest.approx(18.0)]


@pytest.mark.parametrize(
    ("beat", "lives"),
    [
        ({}, True),
        ({"attempt": "b"}, True),
        ({"attempt": "a"}, False),
        ({"error": "KeyError"}, False),
        ({"activity": "ended"}, False),
        ({"time": T0 - 34.0}, False),
        ({"time": T0 - 33.0}, True),
        ({"time": T0 + 33.0}, True),
        ({"time": T0 + 34.0}, False),
    ],
)
def test_a_rank_lives_by_a_fresh_heartbeat_of_the_attempt_that_runs(
    tmp_path: Path, beat: dict, lives: bool
) -> None:
    run = RunDirectory(tmp_path).create()
    record = {"time": T0 - 1.0, "world": 4, "activity": "saving a checkpoint", **beat}
    run.heartbeat(rank=3).write_text(json.dumps(record))
    living = _living(run, "0-3", ("b", T0 - 9.0), now=T0)
    assert (living is not None) == lives
    assert living is None or living.began == (T0 - 9.0 if beat.get("attempt") else None)


def test_the_first_step_of_each_process_may_compile() -> None:
    events = [start(1, starting=1.0)]
    for began, incarnation in ((1, 1), (11, 2)):
        events += [start(began, incarnation, starting=1.0)] if incarnation > 1 else []
        for number, seconds in enumerate((4.0, 1.0, 1.0, 1.0)):
            events.append(step(began + 4 + number, 4 * incarnation + number, incarnation, compute=seconds))
    found = rank_spans(
        events, marks=read_marks([], was_finished=False), is_visible=lambda base: True, begin=T0, end=T0 + 18
    )
    compiling = [(span.begin - T0, span.end - T0) for span in found if span.kind == TimeClass.FIRST_STEP]
    assert compiling == [(1.0, 4.0), (11.0, 14.0)]
