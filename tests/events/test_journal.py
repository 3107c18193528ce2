import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.errors import StorageError
from bloomery.events.incarnation import begin
from bloomery.events.journal import Journal, loss_curve, read_journal
from bloomery.events.numbers import as_float, as_json
from bloomery.events.rundir import RunDir


def test_what_is_written_is_read_back_in_order(tmp_path: Path):
    with Journal(tmp_path / "a.jsonl") as journal:
        journal.write("start", incarnation=1, step=0, recipe="demo")
        journal.write("step", incarnation=1, step=1, loss=2.5, facts={"skips": ((1, 2),)})
    events = list(read_journal(tmp_path / "a.jsonl"))
    assert [event["event"] for event in events] == ["start", "step"]
    assert events[1]["facts"] == {"skips": [[1, 2]]}


def test_a_line_is_in_the_file_as_soon_as_it_was_written(tmp_path: Path):
    journal = Journal(tmp_path / "a.jsonl")
    journal.write("start", incarnation=1, step=0)
    assert len(list(read_journal(tmp_path / "a.jsonl"))) == 1
    journal.close()


def test_a_torn_line_costs_only_itself_at_every_place_it_may_be_torn(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        journal.write("one", incarnation=1, step=1)
    first = path.read_bytes()
    for length in range(1, len(first)):
        path.write_bytes(first + first[:length])
        assert [event["event"] for event in read_journal(path)][:1] == ["one"]
        with Journal(path) as journal:
            journal.write("two", incarnation=2, step=1)
        events = [event["event"] for event in read_journal(path)]
        assert events[0] == "one" and events[-1] == "two"


def test_a_missing_journal_is_an_empty_one(tmp_path: Path):
    assert list(read_journal(tmp_path / "none.jsonl")) == []


@given(st.floats(allow_nan=True, allow_infinity=True, width=64))
def test_every_float_survives_json_to_the_bit(value: float):
    text = json.dumps(as_json(value), allow_nan=False)
    back = as_float(json.loads(text))
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert math.copysign(1, back) == math.copysign(1, value) or math.isnan(value)


def test_what_json_cannot_hold_is_refused_by_name():
    with pytest.raises(TypeError, match="set"):
        as_json({"a": {1}})


def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(StorageError, match="/proc/nothing"):
        Journal(Path("/proc/nothing/a.jsonl"))


def test_a_full_disk_is_told_with_the_space_left():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(StorageError, match="free"), Journal(Path("/dev/full")) as journal:
        journal.write("one", incarnation=1, step=1)


def test_two_writers_do_not_mix_their_lines(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    pid = os.fork()
    with Journal(path) as journal:
        for step in range(200):
            journal.write("x", incarnation=pid > 0, step=step, text="y" * 300)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(read_journal(path))) == 400


def test_the_loss_curve_is_the_last_incarnations_and_forgets_abandoned_steps(tmp_path: Path):
    rundir = RunDir(tmp_path).create()
    with Journal(rundir.journal()) as journal:
        first = begin(rundir, base=None, reason="start")
        for step in range(1, 8):  # killed at 7; the last checkpoint was at 4
            journal.write("step", incarnation=first, step=step, loss=0.1 * step)
        second = begin(rundir, base=(4, first), reason="start")
        for step in range(5, 7):
            journal.write("step", incarnation=second, step=step, loss=float("nan") if step == 5 else 9.0)
    curve = loss_curve(rundir)
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6]
    assert curve[2][1] == 0.1 * 3
    assert math.isnan(curve[4][1]) and curve[5][1] == 9.0
