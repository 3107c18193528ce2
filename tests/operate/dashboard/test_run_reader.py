"""What is read of a run: only what was added, right after rewinds, and told where files are bad."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operate.dashboard.written_run import WrittenRun, healed_run

from bloomery.events.heartbeat import Heartbeat, RankActivity
from bloomery.events.incarnation import visible
from bloomery.events.journal import loss_curve
from bloomery.operate.dashboard.curves import curves, downsampled, moving_mean
from bloomery.operate.dashboard.growing_file import GrowingFile
from bloomery.operate.dashboard.panels import events_with_places
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.run_summary import RunSummarizer
from bloomery.operate.dashboard.step_columns import StepColumns, StepLine
from bloomery.operate.ledger.run_history import rewind_words


def test_a_tail_returns_each_line_once_and_waits_for_the_end_of_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    tail = GrowingFile(path)
    assert tail.lines() == [] and tail.is_missing
    path.write_bytes(b"a\nb\nto")
    assert tail.lines() == [b"a", b"b"] and tail.torn == 2 and not tail.is_behind
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b"rn\nc\n")
    assert tail.lines() == [b"torn", b"c"] and tail.generation == 0


def test_a_tail_reads_no_more_than_it_may_and_goes_on_from_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = [str(number).encode() * 50 for number in range(1000)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    tail, found = GrowingFile(path), []
    while True:
        part = tail.lines(most_bytes=1000)
        assert sum(len(line) + 1 for line in part) <= 1000
        found += part
        if not tail.is_behind:
            break
    assert found == lines


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"one\ntwo\n")
    tail = GrowingFile(path)
    tail.lines()
    path.write_bytes(b"x\n")
    assert tail.lines() == [b"x"] and tail.generation == 1


def test_a_file_that_cannot_be_read_is_told_and_read_once_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    tail = GrowingFile(path)
    assert tail.lines() == [] and tail.error and not tail.is_missing
    path.rmdir()
    path.write_bytes(b"a\n")
    assert tail.lines() == [b"a"] and not tail.error


def test_a_file_that_goes_away_before_it_is_read_to_its_end_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"first\nsecond\n")
    tail = GrowingFile(path)
    assert tail.lines(most_bytes=8) == [b"first"] and tail.is_behind
    behind = GrowingFile(path)
    assert behind.lines(most_bytes=8) == [b"first"] and behind.is_behind
    path.rename(tmp_path / "moved")
    assert tail.lines() == [] and tail.is_missing and not tail.is_behind
    path.mkdir()
    assert tail.lines() == [] and tail.error and not tail.is_behind
    assert behind.lines() == [] and behind.error and not behind.is_behind
    path.rmdir()
    (tmp_path / "moved").rename(path)
    assert tail.lines() == [b"second"] and not tail.is_behind


def test_a_line_without_end_does_not_hold_the_reader_up(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"x" * 5000 + b"\nlast\n")
    tail, found = GrowingFile(path), []
    for _ in range(8):
        found += tail.lines(most_bytes=1000)
    assert found == [b"x" * 1000] * 5 + [b"", b"last"] and not tail.is_behind


@given(
    lives=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6),
    split=st.integers(1, 40),
)
def test_kept_rows_are_those_that_the_incarnations_make_visible(
    lives: list[tuple[int, int]], split: int
) -> None:
    """Each life begins from a step that is part of the run so far; `visible` is the slow second opinion."""
    bases: dict[int, tuple[int, int] | None] = {}
    lines: list[StepLine] = []
    newest: dict[int, int] = {}
    for incarnation, (back_to, count) in enumerate(lives, 1):
        known = [step for step in newest if step <= back_to]
        base = max(known, default=None)
        bases[incarnation] = None if base is None else (base, newest[base])
        newest = {step: life for step, life in newest.items() if base is not None and step <= base}
        for step in range((base or 0) + 1, (base or 0) + count + 1):
            newest[step] = incarnation
            lines.append(StepLine(event="step", step=step, incarnation=incarnation, loss=float(step)))
    columns = StepColumns()
    for begin in range(0, len(lines), split):
        columns.set_incarnations(bases)
        columns.extend(lines[begin : begin + split])
    written = [(line.step, line.incarnation) for line in lines]
    expected = sorted(visible(written, bases))
    rows = [row for part in columns.kept for row in range(part.begin, part.end)]
    assert [written[row] for row in rows] == expected == sorted(newest.items())
    hidden = [row for part in columns.discarded for row in range(part.begin, part.end)]
    assert sorted(rows + hidden) == list(range(len(lines)))


def test_a_rewind_takes_rows_and_their_held_out_losses_back_before_a_new_row_comes() -> None:
    columns = StepColumns()
    columns.set_incarnations({1: None})
    columns.extend(
        [
            StepLine(event="step", step=step, incarnation=1, loss=1.0, held_out_loss=10.0 + step)
            for step in range(1, 6)
        ]
    )
    assert columns.last("step") == 5
    columns.set_incarnations({1: None, 2: (3, 1)})
    assert columns.last("step") == 3 and [(part.begin, part.end) for part in columns.discarded] == [(3, 5)]
    steps, losses = columns.sparse_numbers("held_out", "step")
    assert steps.tolist() == [1, 2, 3] and losses.tolist() == [11, 12, 13]


@given(st.integers(1, 400), st.integers(10, 60), st.sampled_from([0.0, 0.1, 0.9]), st.integers(0, 2**32 - 1))
def test_decimation_keeps_the_extremes_and_invents_nothing(
    count: int, points: int, missing: float, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    y = chance.normal(size=count).astype(np.float32)
    y[chance.random(count) < missing] = chance.choice([np.nan, np.inf, -np.inf])
    x = np.arange(len(y), dtype=np.float64)
    curve = downsampled(x, y, points=points)
    assert len(curve.x) <= 2 * points + 4 and np.all(np.diff(curve.x) > 0)
    finite = y[np.isfinite(y)]
    if len(finite):
        assert np.nanmin(curve.y) == finite.min() and np.nanmax(curve.y) == finite.max()
    shown = y[curve.x.astype(int)]
    np.testing.assert_array_equal(curve.y, np.where(np.isfinite(shown), shown, np.nan))
    assert curve.x[0] == 0 and curve.x[-1] == len(y) - 1


def test_the_moving_mean_is_the_mean_of_the_finite_values_before() -> None:
    y = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    curve = moving_mean(np.arange(5.0), y, window=3, points=100)
    assert curve.y.tolist() == [1.0, 1.5, 1.5, 3.0, 4.5]


def test_the_moving_mean_of_a_long_curve_is_that_of_a_slow_sum() -> None:
    chance = np.random.default_rng(3)
    y = chance.random(5000).astype(np.float32)
    y[chance.integers(0, 5000, 300)] = np.nan
    for points in (20, 4000):  # far apart, and overlapping
        curve = moving_mean(np.arange(5000.0), y, window=40, points=points)
        slow = [
            np.nanmean(y[max(0, int(place) - 39) : int(place) + 1], dtype=np.float64) for place in curve.x
        ]
        np.testing.assert_allclose(curve.y, slow, rtol=1e-6)


def test_the_curve_of_a_run_that_went_back_is_the_one_of_loss_curve(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    reader = RunReader(run.rundir.path).read_all()
    (loss,) = curves(reader, ["loss"])
    assert list(zip(loss.x, loss.y, strict=True)) == [
        (step, pytest.approx(value, rel=1e-5)) for step, value in loss_curve(run.rundir)
    ]
    (branch,) = curves(reader, ["loss!"])
    assert branch.x == [float(step) for step in range(51, 61)] and branch.y[-1] == 9.5
    assert branch.incarnation == 1
    held_out = {
        curve.name: curve for curve in curves(reader, ["held_out", "held_out/code", "held_out/prose"])
    }
    assert (held_out["held_out/prose"].x, held_out["held_out/prose"].y) == ([91.0], [3.0])


def test_curves_against_tokens_and_of_a_range(tmp_path: Path) -> None:
    reader = RunReader(healed_run(tmp_path / "run").rundir.path).read_all()
    (loss,) = curves(reader, ["loss"], axis="tokens", begin=70 * 256, end=75 * 256)
    assert loss.x == [256.0 * step for step in range(69, 77)]


def test_a_reader_follows_a_growing_journal_and_reads_only_what_is_new(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    reader = RunReader(run.rundir.path).read_all()
    read = reader._steps.read_bytes
    assert not reader.poll()
    version = reader.version
    run.steps(1)
    assert reader.poll() and reader.version > version
    assert reader._steps.read_bytes - read == len(run.journal.path.read_bytes()) - read
    assert reader.columns.last("step") == 92.0


def test_a_run_that_ended_since_its_journal_was_read_is_not_gone_but_stopped_and_then_finished(
    tmp_path: Path,
) -> None:
    run = healed_run(tmp_path / "run")
    summarizer = RunSummarizer(RunReader(run.rundir.path).read_all())
    heart = Heartbeat(run.rundir.heartbeat())
    heart.enter(RankActivity.ENDED)
    heart.write()
    assert summarizer.summary().state == "stopped", "what its heartbeat says"
    run.event("end", reason="the samples are done", finished=True, failed=False)
    assert summarizer.summary().state == "finished"


def test_refused_updates_are_an_advice_until_one_is_made(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.steps(2)
    reader = RunReader(run.rundir.path)
    summarizer = RunSummarizer(reader)
    for applied in (True, False, False, True):
        run.steps(1, update_applied=applied)
        reader.read_all()
        told = any("updates were refused" in line for line in summarizer.summary().advice)
        assert told == (not applied)
    assert [event.kind for event in reader.news.events].count("update refused") == 1


def test_events_stand_at_their_steps_and_say_what_happened(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    run.operation("note", text="changed a cable", by="ann")
    events = events_with_places(RunReader(run.rundir.path).read_all())
    by_kind = {event["kind"]: event for event in events}
    assert by_kind["rewind"]["at"]["step"] == 60 and by_kind["rewind"]["level"] == "bad"
    back = "went back to step 50 or the checkpoint before it"
    assert by_kind["rewind"]["text"] == f"{back} without samples 400–480: spike"
    assert rewind_words({"to_step": 50, "skip": [400, 400]}) == back
    assert by_kind["note"]["text"] == "ann: changed a cable"
    assert by_kind["note"]["at"]["tokens"] == 91 * 256


def test_a_loss_that_is_no_number_is_an_event_and_a_gap(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.steps(3)
    run.steps(2, loss=float("nan"), update_applied=False)
    run.steps(1)
    reader = RunReader(run.rundir.path).read_all()
    assert [event.kind for event in reader.news.events] == ["start", "loss not finite"]
    assert np.isnan(curves(reader, ["loss"])[0].y[3:5]).all()


def test_a_directory_that_is_no_run_and_one_that_vanishes_are_told(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no run directory" in RunReader(empty).read_all().problems()[0]
    assert "does not exist" in RunReader(tmp_path / "nowhere").read_all().problems()[0]
    run = healed_run(tmp_path / "run")
    reader = RunReader(run.rundir.path).read_all()
    assert reader.problems() == []
    shutil.rmtree(run.rundir.path)
    assert reader.poll() and "has vanished" in reader.problems()[0]
    assert len(curves(reader, ["loss"])[0].x) == 91


def test_damaged_lines_a_torn_end_and_a_newer_version_are_told(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(versions={"bloomery": "99.0.0"})
    run.steps(2)
    with run.journal.path.open("ab") as file:
        file.write(b'{"event": "step", "step": "not a number"}\n\xff\xfe\n')
        file.write(b'{"event": "x", "y": ' + b"[" * 5000 + b"]" * 5000 + b"}\n")
        file.write(
            json.dumps({"event": "teleport", "time": 1.0, "step": 2, "incarnation": 1, "to": "mars"}).encode()
        )
        file.write(b'\n{"event": "step", "st')
    reader = RunReader(run.rundir.path).read_all()
    for _ in range(4):
        reader.poll()
    told = " ".join(reader.problems())
    assert "3 lines of the journals are damaged" in told and "is unfinished" in told and "99.0.0" in told
    assert [(event.kind, event.text) for event in reader.news.events][-1] == ("teleport", "to mars")
    assert len(reader.columns) == 2


def test_a_step_without_its_number_is_no_step(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    assert RunReader(run.rundir.path).read_all().columns.last("step") is None
    with run.journal.path.open("ab") as file:
        file.write(b'{"event": "step", "incarnation": 1, "loss": 7.5}\n')
    run.steps(2)
    reader = RunReader(run.rundir.path).read_all()
    assert len(reader.columns) == 2 and reader.columns.last("step") == 2.0
    assert reader.columns.last("no such column") is None


def test_a_damaged_incarnation_is_told_and_the_journal_still_read(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.steps(2)
    run.rundir.incarnation(1).write_text("{broken")
    reader = RunReader(run.rundir.path).read_all()
    assert "damaged" in reader.problems()[0] and len(reader.columns) == 2


def test_columns_take_a_few_bytes_a_step_and_lists_are_bounded(tmp_path: Path) -> None:
    columns = StepColumns()
    line = StepLine(event="step", step=1, incarnation=1, loss=1.0, gradient_norm=1.0, learning_rate=1.0)
    for begin in range(0, 20_000, 5_000):
        columns.extend(
            [
                StepLine(
                    **{name: getattr(line, name) for name in line.__struct_fields__} | {"step": begin + n}
                )
                for n in range(5_000)
            ]
        )
    assert columns.nbytes <= 20_000 * 50
    reader = RunReader(tmp_path)
    for number in range(4000):
        reader._take_other(
            json.dumps({"event": "checkpoint", "path": f"step-{number}", "step": number}).encode()
        )
        reader._take_other(json.dumps({"event": "note", "text": "x" * 2000, "step": number}).encode())
    assert len(reader.news.saves) == 2000 and len(reader.news.events) == 3000
    assert max(len(event.text) for event in reader.news.events) <= 400
