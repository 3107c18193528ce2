"""The history of a run from its first rank's journal: the steps that count, on which ranks, in what time."""

from __future__ import annotations

import json
import logging
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.events.test_records import REPORT

from bloomery.events.history import (
    EvenSteps,
    PastSteps,
    RecentSteps,
    even_steps,
    past_steps,
    recent_steps,
    step_reaching,
)
from bloomery.events.incarnation import begin
from bloomery.events.journal import Journal, kept_steps, last_step, loss_curve, read_journal
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


def test_the_newest_steps_are_those_that_the_last_incarnations_made_on_as_many_ranks(
    rundir: RunDirectory,
) -> None:
    write(rundir, begin(rundir, base=None, reason="start"), range(1, 6), batch=8, ranks=4)
    write(rundir, begin(rundir, base=(3, 1), reason="start"), range(4, 9), batch=8, ranks=2)
    recent = recent_steps(rundir, most=100)
    assert [report.step for report in recent.alike] == [4, 5, 6, 7, 8] and recent.ranks == 2
    assert recent.alike[0] == replace(REPORT, step=4, global_batch=8)
    assert [report.step for report in recent_steps(rundir, most=2).alike] == [7, 8]


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
    recent = recent_steps(rundir, most=9)
    left = [1, 2, 3] if "time" in damage else [1, 3]
    assert [report.step for report in recent.alike] == left and recent.ranks == 4
    assert past_steps(rundir, back_to=0).undone == len(left)


def test_steps_with_another_batch_are_not_like_the_last(rundir: RunDirectory) -> None:
    number = begin(rundir, base=None, reason="start")
    write(rundir, number, range(1, 4), batch=8, ranks=None)
    write(rundir, number, range(4, 6), batch=16, ranks=None)
    recent = recent_steps(rundir, most=100)
    assert [report.step for report in recent.alike] == [4, 5]
    assert recent.ranks == 1, "an earlier version did not record it"


def test_the_span_of_a_history_is_from_its_first_event_to_its_last(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (100.0, 130.5, 125.0):
        clock = SimpleNamespace(time=lambda now=now: now, monotonic=time.monotonic)
        monkeypatch.setattr("bloomery.events.journal.time", clock)
        with Journal(rundir.journal()) as journal:
            journal.write("note", incarnation=1, step=0)
    assert recent_steps(rundir, most=9).span_s == 30.5


def test_a_history_knows_the_vocabulary_that_the_newest_start_recorded(rundir: RunDirectory) -> None:
    assert recent_steps(rundir, most=9).vocabulary is None
    with Journal(rundir.journal()) as journal:
        for vocabulary in (300, 511):
            journal.write("data", incarnation=1, step=0, vocabulary=vocabulary)
    assert recent_steps(rundir, most=9).vocabulary == 511


def test_events_that_lack_fields_are_no_part_of_the_history(rundir: RunDirectory) -> None:
    write(rundir, begin(rundir, base=None, reason="start"), range(1, 4), batch=8, ranks=4)
    before = recent_steps(rundir, most=9)
    with rundir.journal().open("a") as journal:
        journal.write(
            '{"event": "step"}\n{"event": "step", "incarnation": 1}\n{"event": "start"}\n{"event": "data"}\n'
            '{"event": "step", "step": "x"}\n{"event": "step", "step": 1e999}\n'
        )
    assert recent_steps(rundir, most=9) == before and last_step(rundir.journal()) == 3
    assert [step for step, _ in loss_curve(rundir)] == [1, 2, 3]


def test_a_run_without_a_journal_has_no_steps(rundir: RunDirectory) -> None:
    assert recent_steps(rundir, most=9) == RecentSteps(alike=(), ranks=1, span_s=0.0)
    assert past_steps(rundir, back_to=3, reaching=(1,)) == PastSteps()
    assert even_steps(rundir, until=9) == () and step_reaching(1, ()) is None


def step(number: int, incarnation: int, **fields: object) -> dict[str, object]:
    return {"event": "step", "step": number, "incarnation": incarnation, **fields}


def test_a_step_that_was_written_again_counts_once_as_it_was_written_last() -> None:
    written = [step(1, 1), step(2, 1, loss=1), step(2, 1, loss=2), step(3, 1), step(2, 1), {"event": "step"}]
    kept = kept_steps([*written, step(9, 2), step(4, 3)], lambda base: base[1] != 2, needed=set())
    assert list(kept) == [step(1, 1), step(2, 1, loss=2), step(3, 1), step(4, 3)]
    assert list(kept_steps(written, lambda base: True, needed={"loss"})) == [step(2, 1, loss=2)]


def test_of_the_past_there_is_what_is_kept_what_is_undone_and_the_steps_asked_for(
    rundir: RunDirectory,
) -> None:
    write(rundir, begin(rundir, base=None, reason="start"), range(3, 7), batch=8, ranks=4)
    write(rundir, begin(rundir, base=(5, 1), reason="start"), range(6, 10), batch=8, ranks=2)
    past = past_steps(rundir, back_to=7, reaching=(1, 2, 4, 4, 9, 10))
    assert past.newest is not None and past.newest.step == 9
    assert past.kept is not None and past.kept.step == 7
    assert (past.undone, past.undone_s) == (2, 2 * REPORT.seconds)
    assert {asked: report.step for asked, report in past.reached.items()} == {1: 3, 2: 3, 4: 4, 9: 9}
    assert past_steps(rundir).kept == past.newest and past_steps(rundir).undone == 0
    assert past_steps(rundir, back_to=2).kept is None and past_steps(rundir, back_to=2).undone == 7


def test_a_cursor_that_moves_evenly_is_one_record_and_gives_the_step_of_each_index(
    rundir: RunDirectory,
) -> None:
    """A ramp-up, a range that was skipped, rounds in which nothing is taken, and a line that is missing."""
    cursors = {1: 4, 2: 8, 3: 12, 4: 20, 5: 28, 6: 99, 7: 107, 8: 107, 9: 107, 10: 115, 12: 131, 13: 139}
    with Journal(rundir.journal()) as journal:
        for number, cursor in cursors.items():
            fields = replace(REPORT, step=number, cursor=cursor).to_json()
            journal.write("step", incarnation=1, **{**fields, "step": number})
    rows = even_steps(rundir, until=12)
    for index in range(1, 132):
        slow = next(number for number, cursor in cursors.items() if cursor >= index)
        assert step_reaching(index, rows) == slow, index
    assert step_reaching(132, rows) is None
    assert len(rows) == 5 and rows[0] == EvenSteps(first=1, cursor=4, each=4, count=3)
    assert not EvenSteps(first=1, cursor=4).takes(2, 4), "a step that took nothing"


@pytest.mark.parametrize(
    "read",
    [
        lambda rundir: recent_steps(rundir, most=3),
        lambda rundir: past_steps(rundir, back_to=9, reaching=range(5)),
        lambda rundir: even_steps(rundir, until=10**9),
    ],
)
def test_the_memory_of_a_reader_does_not_grow_with_the_steps_of_the_run(
    rundir: RunDirectory, read: Callable[[RunDirectory], object]
) -> None:
    begin(rundir, base=None, reason="start")
    line = json.dumps({"event": "step", "incarnation": 1, **REPORT.to_json(), "step": "STEP", "cursor": "AT"})
    peaks = []
    for steps in (100, 1000):
        lines = (
            line.replace('"STEP"', str(number)).replace('"AT"', str(8 * number)) for number in range(1, steps)
        )
        rundir.journal().write_text("\n".join(lines))
        read(rundir)  # what is loaded and cached by a first call
        tracemalloc.start()
        read(rundir)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000, "as a list they took 2 MB"


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
