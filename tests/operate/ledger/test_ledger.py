"""The goodput ledger: every second has one class, and the figures are those of the arithmetic."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.cli import main
from bloomery.events.heartbeat import STARTING, Heartbeat, RankActivity, process_age_s
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.figures import percentages
from bloomery.operate.ledger.operations import Mark, OperationMarks, read_marks
from bloomery.operate.ledger.run_ledger import read_ledger
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.ledger.timeline import LivingRank, rank_spans

T0 = 1_000_000.0


def step(time: float, number: int, incarnation: int = 1, **spent: float) -> dict[str, Any]:
    names = {"data": "waiting for samples", "compute": "forward and backward", "save": "saving a checkpoint"}
    return {
        "event": "step",
        "time": T0 + time,
        "step": number,
        "incarnation": incarnation,
        "consumed_tokens": 100 * number,
        "tokens_per_s": 100.0,
        "spent": {names[name]: seconds for name, seconds in spent.items()},
    }


def start(
    time: float, incarnation: int = 1, *, at: int = 0, ranks: int = 1, **spent: float
) -> dict[str, Any]:
    return {
        "event": "start",
        "time": T0 + time,
        "step": at,
        "incarnation": incarnation,
        "reason": "start",
        "ranks": ranks,
        "spent": {"starting": spent.get("starting", 0.0), "loading a checkpoint": spent.get("loading", 0.0)},
    }


def operation(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": T0 + time, "incarnation": 0, "step": 0, **fields}


def write_run(
    path: Path, events: list[dict], operations: list[dict], bases: dict[int, tuple[int, int] | None]
) -> RunDirectory:
    run = RunDirectory(path).create()
    run.journal().write_text("".join(json.dumps(event) + "\n" for event in events))
    run.operations.write_text("".join(json.dumps(event) + "\n" for event in operations))
    for number, base in bases.items():
        held = None if base is None else {"step": base[0], "incarnation": base[1]}
        run.incarnation(number).write_text(json.dumps({"base": held}))
    return run


def killed_once() -> tuple[list[dict], list[dict], dict[int, tuple[int, int] | None]]:
    """Five steps, of which the last two are lost to a kill at 20; made again from step 3, and stopped."""
    events = [
        start(4, starting=3.0),
        step(6, 1, compute=2.0),
        step(7, 2, compute=0.5, data=0.5),
        step(8, 3, compute=0.5, save=0.5),
        step(9, 4, compute=1.0),
        step(10, 5, compute=1.0),
        start(26, 2, at=3, starting=3.0, loading=1.0),
        step(27, 4, 2, compute=1.0),
        step(28, 5, 2, compute=1.0),
        {**operation(29, "end"), "incarnation": 2, "step": 5, "finished": False, "failed": False}
        | {"reason": "signal SIGTERM", "spent": {"ending": 1.0}},
    ]
    operations = [
        operation(0, "attempt", attempt="a", ranks=1),
        operation(20, "attempt_end", attempt="a", status=137),
        operation(20.5, "diagnosis", attempt="a", gives_up="", cause="killed", sure=True)
        | {"culprit": {"host": "node7", "rank": 0, "gpu": ""}, "summary": "rank 0 was killed"},
        operation(21, "attempt", attempt="b", ranks=1),
        operation(30, "attempt_end", attempt="b", status=143),
    ]
    return events, operations, {1: None, 2: (3, 1)}


def test_each_second_of_a_killed_run_has_the_class_that_arithmetic_gives_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, *killed_once())
    ledger = read_ledger(run, now=T0 + 1000)
    assert ledger is not None
    assert (ledger.begin, ledger.end) == (T0, T0 + 30)  # it was stopped, so the time after it does not count
    assert {str(kind): pytest.approx(seconds) for kind, seconds in ledger.seconds.items()} == {
        "training": 0.5 + 0.5 + 0.5 + 1 + 1,  # of the first step's 2 s, 0.5 s is what steps 2 and 3 take
        "first step: compiling": 1.5,
        "lost work": 2,
        "waiting for data": 0.5,
        "blocked by saves": 0.5,
        "start-up, imports": 4 + 4,
        "loading": 1,
        "last save and end": 2,
        "failure until noticed": 10,
        "between attempts": 1,
    }
    assert ledger.effective_time == pytest.approx(3.5 / 30)
    assert ledger.history.kept_tokens == 500 and ledger.history.kept_steps == 5
    assert ledger.token_goodput() == pytest.approx(500 / (30 * 100))
    (incident,) = ledger.history.incidents
    assert (incident.cause, incident.steps_lost, incident.culprit) == ("killed", 2, "node7, rank 0")
    assert ledger.incident_s == [pytest.approx(2 + 10 + 1 + 4 + 1)]


def test_a_ledger_up_to_a_time_counts_nothing_that_came_after_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, *killed_once())
    early, late = read_ledger(run, until=T0 + 7.5), read_ledger(run, until=T0 + 27.5)
    assert early is not None and late is not None
    assert (early.history.step, early.history.kept_steps, early.history.incidents) == (2, 2, ())
    assert (late.history.step, late.history.kept_steps, len(late.history.incidents)) == (4, 4, 1)
    assert early.history.changes == late.history.changes == () and early.token_goodput() <= 1.0
    assert early.by_cause() == {} and list(late.by_cause()) == ["killed"]


def test_the_goodput_up_to_an_incident_is_of_all_ranks_time(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    alone = read_ledger(write_run(tmp_path / "alone", events, operations, bases), now=T0 + 1000)
    for event in (*events, *operations):
        event |= {"ranks": 2} if "ranks" in event else {}
    run = write_run(tmp_path / "both", events, operations, bases)
    run.journal(rank=1).write_bytes(run.journal().read_bytes())
    both = read_ledger(run, now=T0 + 1000)
    assert alone is not None and both is not None and len(both.ranks) == 2
    (share,) = alone.goodput_at_incident
    assert 0.0 < share < 0.5 and both.goodput_at_incident == [pytest.approx(share)]


def test_time_that_a_person_had_stopped_lowers_the_effective_time_and_not_the_ettr(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    events.append(start(130, 3, at=5))
    events.append(step(131, 6, 3, compute=1.0))
    ledger = read_ledger(write_run(tmp_path, events, operations, {**bases, 3: (5, 2)}), until=T0 + 131)
    assert ledger is not None
    assert ledger.seconds[TimeClass.STOPPED] == pytest.approx(100)
    assert ledger.effective_time == pytest.approx(4.5 / 131)
    assert ledger.ettr == pytest.approx(4.5 / 31)


def test_a_run_that_nobody_started_again_is_down_until_now_and_a_given_up_one_too(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    operations[2]["gives_up"] = "3 restarts in a row brought no newer checkpoint"
    run = write_run(tmp_path, events[:6], operations[:3], {1: bases[1]})
    ledger = read_ledger(run, now=T0 + 120)
    assert ledger is not None and ledger.seconds[TimeClass.DOWN] == pytest.approx(100)
    assert ledger.seconds[TimeClass.FAILURE] == pytest.approx(10)


def test_the_queue_is_told_from_a_run_that_is_down(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    jobs = [operation(22, "job", state="PENDING"), operation(24, "job", state="RUNNING")]
    operations = [*operations[:2], *jobs, operation(25, "attempt", attempt="b", ranks=1)]
    events[6] = start(26, 2, at=3, loading=0.5)
    ledger = read_ledger(write_run(tmp_path, events, operations, bases), until=T0 + 28)
    assert ledger is not None
    assert ledger.seconds[TimeClass.QUEUE] == pytest.approx(2)
    assert ledger.seconds[TimeClass.DOWN] == pytest.approx(2)


def test_a_hang_is_no_training_and_a_rank_that_left_the_layout_has_no_time(tmp_path: Path) -> None:
    events = [start(1, ranks=2, starting=1.0), step(2, 1, compute=1.0)]
    operations = [
        operation(0, "attempt", attempt="a", ranks=2),
        operation(12, "attempt_end", attempt="a", status=1),
        operation(12, "diagnosis", attempt="a", gives_up="", cause="hang"),
        operation(12, "attempt", attempt="b", ranks=1),
    ]
    run = write_run(
        tmp_path, [*events, start(14, 2, at=1, ranks=1), step(20, 2, 2, compute=6.0)], operations, {}
    )
    run.incarnation(1).write_text('{"base": null}')
    run.incarnation(2).write_text('{"base": {"step": 1, "incarnation": 1}}')
    run.journal(rank=1).write_text("".join(json.dumps(event) + "\n" for event in events))
    ledger = read_ledger(run, until=T0 + 20)
    assert ledger is not None
    assert ledger.ranks["0-0"][TimeClass.HANG] == ledger.ranks["0-1"][TimeClass.HANG] == pytest.approx(10)
    assert sum(ledger.ranks["0-0"].values()) == pytest.approx(20)
    assert sum(ledger.ranks["0-1"].values()) == pytest.approx(14)  # up to the start without it


@pytest.mark.parametrize("until", [12.0, 18.0])
def test_a_rank_that_has_started_again_and_does_nothing_yet_explains_its_seconds_and_no_others(
    tmp_path: Path, until: float
) -> None:
    """Its heartbeat names no activity while it joins the others, and says nothing of the hang before."""
    events = [start(1, starting=1.0), step(2, 1, compute=1.0)]
    operations = [
        operation(0, "attempt", attempt="a", ranks=1),
        operation(10, "attempt_end", attempt="a", status=1),
        operation(10, "diagnosis", attempt="a", gives_up="", cause="hang"),
        operation(12, "attempt", attempt="b", ranks=1),
    ]
    run = write_run(tmp_path, events, operations, {1: None})
    beat = {"time": T0 + 17, "since": T0 + 16, "attempt": "b", "incarnation": 1, "step": 1}
    run.heartbeat().parent.mkdir(exist_ok=True)
    run.heartbeat().write_text(json.dumps(beat))
    ledger = read_ledger(run, now=T0 + 18, until=T0 + until)
    assert ledger is not None
    assert {str(kind): pytest.approx(seconds) for kind, seconds in ledger.seconds.items()} == {
        "training": 1,
        "start-up, imports": 1 + until - 12,
        "hang until noticed": 8,
        "between attempts": 2,
    }


def test_a_start_that_died_with_its_launcher_is_down_and_not_starting_for_the_rest_of_the_night(
    tmp_path: Path,
) -> None:
    operations = [
        operation(0, "attempt", attempt="a", ranks=1),
        operation(10, "attempt_end", attempt="a", status=137),
        operation(10, "diagnosis", attempt="a", gives_up="", cause="killed"),
        operation(12, "attempt", attempt="b", ranks=1),
        operation(30012, "attempt", attempt="c", ranks=1),
    ]
    events = [start(1, starting=1.0), step(9, 1, compute=8.0), start(30022, 2, at=1, starting=10.0)]
    events.append(step(30023, 2, 2, compute=1.0))
    run = write_run(tmp_path, events, operations, {1: None, 2: (1, 1)})
    ledger = read_ledger(run, until=T0 + 30023)
    assert ledger is not None
    assert ledger.seconds[TimeClass.STARTING] == pytest.approx(1 + 1800 + 10)
    assert ledger.seconds[TimeClass.DOWN] == pytest.approx(30000 - 1800)


def test_a_rank_that_joined_at_a_larger_start_and_never_wrote_is_down_after_half_an_hour(
    tmp_path: Path,
) -> None:
    operations = [
        operation(0, "attempt", attempt="a", ranks=1),
        operation(10, "attempt_end", attempt="a", status=137),
        operation(12, "attempt", attempt="b", ranks=2),
    ]
    events = [start(1, starting=1.0), start(22, 2, ranks=2, starting=5.0), step(23, 1, 2, compute=1.0)]
    run = write_run(tmp_path, events, operations, {1: None, 2: (0, 1)})
    ledger = read_ledger(run, until=T0 + 30017)
    assert ledger is not None
    assert ledger.ranks["0-1"] == {
        TimeClass.STARTING: pytest.approx(12 + 1800 - 17),
        TimeClass.DOWN: pytest.approx(30000 - (12 + 1800 - 17)),
    }


def test_a_rewind_belongs_to_the_guard_that_wanted_it(tmp_path: Path) -> None:
    rewind = {"event": "rewind", "time": T0 + 3.5, "step": 2, "incarnation": 1, "to_step": 1, "skip": [4, 8]}
    again = {**start(5, 2, at=1), "reason": "rewind: spike", "spent": {"loading a checkpoint": 2.0}}
    events = [start(1, starting=1.0), step(2, 1, compute=1.0), step(3, 2, compute=1.0)]
    events += [{**rewind, "reason": "the loss rose"}, again, step(6, 2, 2, compute=1.0)]
    ledger = read_ledger(write_run(tmp_path, events, [], {1: None, 2: (1, 1)}), until=T0 + 6)
    assert ledger is not None
    assert ledger.seconds[TimeClass.LOADING] == pytest.approx(2)
    assert ledger.seconds[TimeClass.LOST] == pytest.approx(1)
    ((cause, (number, seconds, steps)),) = ledger.by_cause().items()
    assert (cause, number, steps) == ("rewind", 1, 1) and seconds == pytest.approx(1)


def test_a_journal_without_measured_times_still_sums(tmp_path: Path) -> None:
    old = [{**start(1), "spent": None}]
    old += [
        {**step(1 + number, number), "spent": None, "seconds": 0.75, "data_wait_s": 0.05}
        for number in range(1, 11)
    ]
    ledger = read_ledger(write_run(tmp_path, old, [], {1: None}), until=T0 + 11)
    assert ledger is not None
    assert ledger.seconds[TimeClass.TRAINING] == pytest.approx(7.5)
    assert ledger.seconds[TimeClass.BETWEEN] == pytest.approx(2.0)
    assert ledger.total_s == pytest.approx(10)


TIMES = st.one_of(
    st.floats(-50, 150).map(lambda seconds: T0 + seconds),
    st.sampled_from([None, "soon", float("nan"), float("inf"), 0, -1e300, True]),
)
SPENT = st.one_of(
    st.dictionaries(
        st.sampled_from([*(str(activity) for activity in RankActivity), STARTING, "dancing"]),
        st.one_of(st.floats(0, 60), st.sampled_from([-1.0, float("nan"), float("inf"), "many", None])),
        max_size=4,
    ),
    st.sampled_from([None, [], "much"]),
)
EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(["start", "step", "end", "checkpoint", "phase", "rewind"])},
    optional={
        "time": TIMES,
        "spent": SPENT,
        "step": st.one_of(st.integers(0, 9), st.none()),
        "incarnation": st.one_of(st.integers(0, 4), st.none(), st.just("two")),
        "reason": st.sampled_from(["start", "rewind: spike", 7]),
        "seconds": st.floats(0, 9),
        "data_wait_s": st.floats(0, 9),
        "finished": st.booleans(),
        "failed": st.booleans(),
    },
)
OPERATIONS = st.fixed_dictionaries(
    {"event": st.sampled_from(["attempt", "attempt_end", "diagnosis", "job"]), "time": TIMES},
    optional={
        "attempt": st.sampled_from(["a", "b"]),
        "status": st.sampled_from([0, 137, 143, None]),
        "cause": st.sampled_from(["hang", "killed"]),
        "state": st.sampled_from(["PENDING", "RUNNING", 7]),
    },
)


@given(
    events=st.lists(EVENTS, max_size=25),
    operations=st.lists(OPERATIONS, max_size=8),
    living=st.one_of(
        st.none(),
        st.builds(
            LivingRank,
            st.sampled_from(["ended", "x", ""]),
            st.floats(T0, T0 + 99),
            st.one_of(st.none(), st.floats(T0 - 9, T0 + 150)),
        ),
    ),
    finished=st.booleans(),
)
def test_the_spans_of_any_journal_fill_the_window_without_gap_or_overlap(
    events: list[dict], operations: list[dict], living: LivingRank | None, finished: bool
) -> None:
    spans = list(
        rank_spans(
            events,
            marks=read_marks(operations, was_finished=finished),
            is_visible=lambda base: (base[0] + base[1]) % 3 > 0,
            begin=T0,
            end=T0 + 100,
            living=living,
        )
    )
    spans.sort(key=lambda span: (span.begin, span.end))
    edges = [T0, *(span.end for span in spans)]
    assert all(span.begin == edge for span, edge in zip(spans, edges, strict=False))
    assert edges[-1] == T0 + 100 and all(span.end > span.begin for span in spans)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20))
def test_printed_shares_sum_to_a_hundred(seconds: list[float]) -> None:
    assert round(sum(percentages(seconds)), 6) == (100.0 if sum(seconds) > 0 else 0.0)


def test_marks_at_the_very_end_say_what_came_before_them() -> None:
    marks = OperationMarks([Mark(time=5.0, before=TimeClass.ENDING, after=TimeClass.FINISHED)])
    spans = marks.carve(0.0, 5.0, wrote=0.0, otherwise=TimeClass.DOWN)
    assert [span.kind for span in spans if span.end > span.begin] == [TimeClass.ENDING]


def test_a_heartbeat_counts_each_second_of_its_process_once(tmp_path: Path) -> None:
    before = process_age_s()
    heart = Heartbeat(tmp_path / "beat")
    for _ in range(1000):
        heart.enter(RankActivity.COMPUTING)
        heart.enter(RankActivity.SAVING)
    first = heart.take_spent()
    assert set(first) <= {STARTING, RankActivity.COMPUTING, RankActivity.SAVING}
    parts = [heart.take_spent() for _ in range(1000)]
    last = heart.take_spent()
    sums = sum(sum(part.values()) for part in (first, *parts, last))
    after = process_age_s()
    assert before - 0.03 <= sums <= after + 0.03  # the kernel counts in hundredths of a second


def test_report_prints_a_table_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", *killed_once())
    plan = tmp_path / "plan.json"
    figures = {"speed": {"tokens_per_s": 200.0}, "run": {"tokens": 1000, "days": 2.0, "training_days": 1.5}}
    plan.write_text(json.dumps(figures))
    assert main(["report", str(run.path), "--plan", str(plan), "--png", str(tmp_path / "r.png")]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "100.0%" in text and "75.0%" in text and "killed" in text
    assert (tmp_path / "r.png").stat().st_size > 1000
    assert main(["report", str(run.path), "--json", "--plan", str(plan)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert sum(printed["shares"].values()) == pytest.approx(1.0)
    assert printed["plan"]["token_goodput_of_plan"] == pytest.approx(500 / (30 * 200))
    assert printed["causes"]["killed"]["steps_lost"] == 2


def test_report_refuses_what_is_no_run_and_what_is_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    run = RunDirectory(tmp_path / "run").create()
    with Journal(run.journal()):
        pass
    assert main(["report", str(run.path)]) == 1
    assert "nothing was ever started" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{}")
    assert main(["report", str(run.path), "--plan", str(tmp_path / "plan.json")]) == 2
    assert "bloomery plan" in capsys.readouterr().err


def test_a_note_or_a_request_after_the_end_does_not_make_a_run_go_on(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.steps(5)
    run.event("end", reason="the samples are done", finished=True, failed=False)
    run.operation("note", text="well done", by="ann")
    run.operation("request", action="save", what="", why="", by="dashboard")
    now = time.time() + 3600.0
    ledger = read_ledger(run.rundir, now=now)
    assert ledger is not None and ledger.history.is_over and ledger.end < now - 3000.0


def test_a_note_on_a_run_that_was_over_long_before_does_not_make_it_longer(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    before = read_ledger(write_run(tmp_path / "a", events, operations, bases), now=T0 + 9e6)
    later = [operation(8e6, "note", text="well done", by="ann"), operation(8e6, "alert", word="over")]
    after = read_ledger(write_run(tmp_path / "b", events, [*operations, *later], bases), now=T0 + 9e6)
    assert before is not None and after is not None
    assert (after.end, after.effective_time) == (before.end, before.effective_time) and after.end == T0 + 30


def test_a_run_whose_waiting_jobs_somebody_cancelled_is_over(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    for state, end in (("cancelled", 60), ("pending", 9e6)):
        run = write_run(tmp_path / state, events, [*operations, operation(60, "job", state=state)], bases)
        ledger = read_ledger(run, now=T0 + 9e6)
        assert ledger is not None and ledger.end == T0 + end
