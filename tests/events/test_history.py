"""The history of a run from its first rank's journal: the steps that count, on which ranks, in what time."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.events.test_records import REPORT

from bloomery.events.incarnation import begin
from bloomery.events.journal import Journal, last_step, loss_curve, read_history, read_journal
from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def write(rundir: RunDirectory, incarnation: int, steps: range, *, batch: int, ranks: int | None) -> None:
    with Journal(rundir.journal()) as journal:
        recorded = {} if ranks is None else {"ranks": ranks}
        journal.write("start", incarnation=incarnation, step=steps.start - 1, **recorded)
        for step in steps:
            fields = replace(REPORT, step=step, global_batch=batch).to_json()
            journal.write("step", incarnation=incarnation, **{**fields, "step": step})


def test_a_history_has_each_step_once_as_the_last_incarnation_made_it(rundir: RunDirectory) -> None:
    write(rundir, begin(rundir, base=None, reason="start"), range(1, 6), batch=8, ranks=4)
    write(rundir, begin(rundir, base=(3, 1), reason="start"), range(4, 9), batch=8, ranks=2)
    history = read_history(rundir)
    assert [(step.report.step, step.incarnation) for step in history.steps] == [
        *((1, 1), (2, 1), (3, 1)),
        *((4, 2), (5, 2), (6, 2), (7, 2), (8, 2)),
    ]
    assert history.ranks == {1: 4, 2: 2} and history.newest_ranks == 2
    assert [report.step for report in history.alike] == [4, 5, 6, 7, 8], "on as many ranks as the last"


@pytest.mark.parametrize(
    "damage",
    (
        {"time": None},
        {"inner_sizes": 7},
        {"loss_scale": {}},
        {"step": []},
        {"incarnation": "x"},
    ),
)
def test_a_damaged_step_leaves_the_others(rundir: RunDirectory, damage: dict[str, object]) -> None:
    write(rundir, begin(rundir, base=None, reason="start"), range(1, 4), batch=8, ranks=4)
    lines = rundir.journal().read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), **damage})
    rundir.journal().write_text("\n".join(lines) + "\n")
    history = read_history(rundir)
    left = [1, 2, 3] if "time" in damage else [1, 3]
    assert [step.report.step for step in history.steps] == left and history.ranks == {1: 4}


def test_steps_with_another_batch_are_not_like_the_last(rundir: RunDirectory) -> None:
    number = begin(rundir, base=None, reason="start")
    write(rundir, number, range(1, 4), batch=8, ranks=None)
    write(rundir, number, range(4, 6), batch=16, ranks=None)
    history = read_history(rundir)
    assert [report.step for report in history.alike] == [4, 5]
    assert history.newest_ranks == 1, "an earlier version did not record it"


def test_the_span_of_a_history_is_from_its_first_event_to_its_last(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (100.0, 130.5, 125.0):
        clock = SimpleNamespace(time=lambda now=now: now)
        monkeypatch.setattr("bloomery.events.journal.time", clock)
        with Journal(rundir.journal()) as journal:
            journal.write("note", incarnation=1, step=0)
    assert read_history(rundir).span_s == 30.5


def test_a_history_knows_the_vocabulary_that_the_newest_start_recorded(rundir: RunDirectory) -> None:
    assert read_history(rundir).vocabulary is None
    with Journal(rundir.journal()) as journal:
        for vocabulary in (300, 511):
            journal.write("data", incarnation=1, step=0, vocabulary=vocabulary)
    assert read_history(rundir).vocabulary == 511


def test_events_that_lack_fields_are_no_part_of_the_history(rundir: RunDirectory) -> None:
    write(rundir, begin(rundir, base=None, reason="start"), range(1, 4), batch=8, ranks=4)
    before = read_history(rundir)
    with rundir.journal().open("a") as journal:
        journal.write(
            '{"event": "step"}\n{"event": "step", "incarnation": 1}\n{"event": "start"}\n{"event": "data"}\n'
        )
    assert read_history(rundir) == before and last_step(rundir.journal()) == 3
    assert [step for step, _ in loss_curve(rundir)] == [1, 2, 3]


def test_a_run_without_a_journal_has_an_empty_history(rundir: RunDirectory) -> None:
    history = read_history(rundir)
    assert (history.steps, history.alike, dict(history.ranks), history.span_s) == ((), (), {}, 0.0)
    assert history.newest_ranks == 1


def test_torn_lines_are_counted_and_a_whole_journal_is_not_mentioned(
    rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = rundir.journal()
    path.write_text('{"event": "one"}\n\n{"event": "two"}\n')
    assert len(list(read_journal(path))) == 2 and not caplog.records
    path.write_text('{"event": "one"}\n{"eve\n[1]\n{"event": "two"}\n{"ev')
    assert len(list(read_journal(path))) == 2
    assert [record.getMessage() for record in caplog.records] == [f"{path}: 3 torn lines were left out"]
