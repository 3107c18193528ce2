import errno
import json
import math
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bloomery.events.journal as journal_module
from bloomery import durable
from bloomery.errors import StorageError
from bloomery.events.incarnation import begin
from bloomery.events.journal import Journal, last_step, loss_curve, read_journal, read_tail
from bloomery.events.records import as_float, as_json
from bloomery.events.run_directory import RunDirectory


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


def test_who_shares_a_journal_waits_for_the_others_lines_and_for_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "operations.jsonl"

    def note() -> None:
        with Journal(path, is_shared=True) as journal:
            journal.write("note", incarnation=1, step=2)

    with path.open("wb") as held:  # by one that appends on another node
        assert durable.try_lock(held.fileno())
        other = threading.Thread(target=note)
        other.start()
        other.join(0.1)  # it would have written by now
        assert not path.stat().st_size
        durable.unlock(held.fileno())
        other.join()
        assert path.stat().st_size
        note()
        assert durable.try_lock(held.fileno()), "each line lets the lock go"
        monkeypatch.setattr(journal_module, "_LOCK_S", 0.0)
        note()  # beside one that stands still
    assert [event["event"] for event in read_journal(path)] == ["note"] * 3


def test_an_error_that_names_a_path_which_is_no_utf_8_is_written(tmp_path: Path):
    name = os.fsdecode(b"caf\xe9")
    with Journal(tmp_path / "a.jsonl") as journal:
        journal.write("checkpoint_failed", incarnation=1, step=5, why=f"/data/{name}: No space left")
        journal.write("step", incarnation=1, step=6)
    failed, step = read_journal(tmp_path / "a.jsonl")
    assert failed["why"] == "/data/caf?: No space left" and step["step"] == 6


def test_lists_in_lists_without_end_are_a_damaged_line(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.write("a", incarnation=1, step=1)
    path.write_bytes(b"[" * 100_000 + b"\n" + path.read_bytes())
    assert [event["event"] for event in read_journal(path)] == ["a"]
    assert [event["event"] for event in read_tail(path)] == ["a"]


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


def test_a_full_disk_is_told_with_the_space_left_and_what_is_lost(caplog: pytest.LogCaptureFixture):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with Journal(Path("/dev/full")) as journal:
        journal.write("one", incarnation=1, step=1)
        journal.write("two", incarnation=1, step=2)
    (refusal, loss) = [record.message for record in caplog.records]
    assert "MB free" in refusal and "Training goes on" in refusal and "the last 2 lines" in loss


@pytest.mark.parametrize("taken", [0, 7])
def test_what_a_full_disk_refused_is_written_in_order_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
):
    real, room = os.write, [taken]

    def write(file: int, content: bytes) -> int:
        part = content[: room[0]]
        room[0] -= len(part)
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, part)

    with Journal(tmp_path / "a.jsonl") as journal:
        journal.write("step", incarnation=1, step=0)
        with monkeypatch.context() as patch:
            patch.setattr("bloomery.events.journal._MOST_WAITING", 4)
            patch.setattr("bloomery.events.journal.os.write", write)
            for step in range(1, 7):
                journal.write("step", incarnation=1, step=step)
        journal.write("step", incarnation=1, step=7)
    assert [event["step"] for event in read_journal(tmp_path / "a.jsonl")] == [0, 1, 4, 5, 6, 7]


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 2000))
def test_the_last_step_is_found_from_the_end(lengths: list[int], cut: int):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.jsonl"
        with Journal(path) as journal:
            for step, length in enumerate(lengths, 1):
                journal.write("step", incarnation=1, step=step, loss=1.0)
                journal.write("note", incarnation=1, step=step + 100, text="x" * length)
        path.write_bytes(path.read_bytes()[:cut])
        steps = [event["step"] for event in read_journal(path) if event["event"] == "step"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bloomery.events.journal._TAIL_BYTES", 16)
            assert last_step(path) == max(steps, default=0)
    assert last_step(path) == 0


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
    rundir = RunDirectory(tmp_path).create()
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


def test_of_a_tail_only_the_events_that_are_wanted_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for step in range(50):
            journal.write("step", incarnation=1, step=step)
        journal.write("end", incarnation=1, step=50, reason="start")
        journal.write("note", incarnation=1, step=50, text='it will "end" soon')
        journal.write("note", incarnation=1, step=50, of="end")
    parsed: list[bytes] = []
    whole = journal_module._parsed
    monkeypatch.setattr(journal_module, "_parsed", lambda line: parsed.append(line) or whole(line))
    (end,) = read_tail(tmp_path / "journal.jsonl", named=("start", "end"))
    assert end["reason"] == "start" and len(parsed) == 2
    assert len(list(read_tail(tmp_path / "journal.jsonl"))) == 53


def test_a_journal_makes_its_directory_and_writes_at_its_end_what_the_disk_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "not" / "yet" / "a.jsonl"

    def refuse(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal(path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr("bloomery.events.journal.os.write", refuse)
            journal.write("step", incarnation=1, step=1)
        assert not path.stat().st_size
    assert [event["step"] for event in read_journal(path)] == [1]


def test_a_journal_that_is_needed_tells_of_a_refusal_at_its_end_and_only_where_it_lasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal(tmp_path / "a.jsonl", is_needed=True) as journal:
        with monkeypatch.context() as patch:
            patch.setattr("bloomery.events.journal.os.write", refuse)
            journal.write("step", incarnation=1, step=1)
        assert journal.is_refused and not caplog.records
    assert last_step(tmp_path / "a.jsonl") == 1
    lasting = Journal(tmp_path / "b.jsonl", is_needed=True)
    monkeypatch.setattr("bloomery.events.journal.os.write", refuse)
    lasting.write("step", incarnation=1, step=1)
    with pytest.raises(StorageError, match="Writing the journal"):
        lasting.close()
    lasting.close()


def test_the_loss_curve_is_of_the_rank_and_the_peer_that_are_asked_for(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    begin(rundir, base=None, reason="start")
    for peer, rank, loss in (("0", 0, 1.0), ("0", 2, 2.0), ("north", 0, 3.0), ("north", 2, 4.0)):
        with Journal(rundir.journal(peer=peer, rank=rank)) as journal:
            journal.write("step", incarnation=1, step=1, loss=loss)
    assert loss_curve(rundir) == [(1, 1.0)] and loss_curve(rundir, rank=2) == [(1, 2.0)]
    assert loss_curve(rundir, peer="north", rank=2) == [(1, 4.0)]


def test_a_journal_that_is_shared_is_free_between_two_lines(tmp_path: Path):
    path = tmp_path / "operations.jsonl"
    with Journal(path, is_shared=True) as journal, path.open("rb") as other:
        journal.write("note", incarnation=1, step=2)
        assert durable.try_lock(other.fileno())


def test_a_journal_that_is_removed_or_replaced_while_it_is_written_goes_on_at_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(journal_module, "_LOOK_S", 0.0)
    run, path = tmp_path / "run", tmp_path / "run" / "journal" / "0-0.jsonl"
    with Journal(path) as journal:
        journal.write("one", incarnation=1, step=1)
        path.rename(run / "rotated")
        journal.write("two", incarnation=1, step=2)
        path.unlink()
        path.parent.rmdir()
        journal.write("three", incarnation=1, step=3)
        assert caplog.text.count("was removed or replaced while it was written") == 2
        run.rename(tmp_path / "moved")
        journal.write("four", incarnation=1, step=4)
        assert not run.exists(), "the file goes with its run"
    moved = tmp_path / "moved"
    assert [event["event"] for event in read_journal(moved / "rotated")] == ["one"]
    assert [event["event"] for event in read_journal(moved / "journal" / path.name)] == ["three", "four"]
    assert caplog.text.count("was removed or replaced") == 2
