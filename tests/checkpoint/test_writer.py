"""The writer, and the trainer's end of it: what one that died has made is kept, one that is stuck is left."""

import json
import os
import signal
import subprocess
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.checkpoint.thread_ranks import Threads
from tests.disk_calls import recorded

from bloomery import durable
from bloomery.checkpoint.format import commit as commit_module
from bloomery.checkpoint.format import deadlines
from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.commit import abandon_part, begin_partial, part_record_path
from bloomery.checkpoint.format.deadlines import Deadlines
from bloomery.checkpoint.format.manifest import INDEX, MANIFEST
from bloomery.checkpoint.format.state import Box, StateEntry
from bloomery.checkpoint.save.staging import CopyPace, stage
from bloomery.checkpoint.save.verification import OwnFilesCheck
from bloomery.checkpoint.save.write_plan import WritePlanner
from bloomery.checkpoint.writer import client as client_module
from bloomery.checkpoint.writer import process as writer
from bloomery.checkpoint.writer.client import WriterProcess
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.checkpoint.writer.shared_buffer import ABANDONED, SharedBuffer
from bloomery.errors import CheckpointError

WORLD, ROWS = 2, 64


class Died(BaseException):
    """In place of a kill: nothing of ours catches it."""


class Orders:
    """The orders of one save of two ranks, each with half of a tensor, staged."""

    def __init__(self, directory: Path) -> None:
        self.partial = directory / "step-000001.i001.partial"
        begin_partial(self.partial)
        self.buffers = [SharedBuffer.create(1 << 16, name=f"test-{rank}") for rank in range(WORLD)]
        self.orders: list[dict[str, Any]] = Threads(WORLD).run(self._order)

    def _order(self, ranks: Ranks) -> dict[str, Any]:
        half = torch.full((ROWS // WORLD, 8), float(ranks.rank + 1))
        box = Box((ranks.rank * ROWS // WORLD, 0), tuple(half.shape))
        entries = [StateEntry(name="model.w", global_shape=(ROWS, 8), dtype="float32", box=box, tensor=half)]
        shares = WritePlanner(ranks, file_bytes=1 << 20)
        share = shares.agree(entries, ranks.gather(shares.digest(entries)))
        stage(share, entries, self.buffers[ranks.rank], CopyPace(share.bytes, window_s=0, throttled=False))
        return {
            "partial": str(self.partial),
            "rank": ranks.rank,
            "world": WORLD,
            "time": 0.0,
            "parts_s": 0.2,
            "stall_s": 60.0,
            "checkpoint": {"step": 1, "incarnation": 1, "about": {}},
            "values": {},
            "boxes": json.loads(share.boxes),
            "files": [
                {"name": file.name, "offset": file.offset, "bytes": file.bytes} for file in share.files
            ],
        }

    def give(self, rank: int, *, attempt: int) -> dict[str, Any]:
        """Have a rank's writer carry its order out."""
        return writer._answer({**self.orders[rank], "attempt": attempt}, self.buffers[rank])

    @property
    def final(self) -> Path:
        return self.partial.with_name("step-000001.i001")

    def data_files(self, where: Path) -> dict[str, int]:
        """Inode numbers by name."""
        return {path.name: path.stat().st_ino for path in where.glob("*.safetensors")}


@pytest.fixture
def orders(tmp_path: Path):
    made = Orders(tmp_path)
    yield made
    for buffer in made.buffers:
        buffer.close()


def test_both_parts_make_a_checkpoint_with_nothing_beside(orders: Orders):
    assert orders.give(1, attempt=1).get("failure") is None
    assert orders.give(0, attempt=1).get("failure") is None
    assert verify(orders.final) == []
    names = {path.name for path in orders.final.iterdir()}
    assert names == {INDEX, MANIFEST, *orders.data_files(orders.final)} and len(names) == 4


def test_each_data_file_is_synced_before_its_part_is_left_and_before_the_manifest(orders: Orders):
    with recorded() as calls:
        orders.give(1, attempt=1)
        left = calls.index("rename", part_record_path(orders.partial, 1).name)
        orders.give(0, attempt=1)
    ours, theirs = (orders.orders[rank]["files"][0]["name"] for rank in range(WORLD))
    manifest, published = calls.index("sync", MANIFEST), calls.index("rename", orders.final.name)
    assert calls.synced_before(theirs, at=left) and calls.synced_before(ours, at=manifest)
    assert calls.synced_before(INDEX, at=manifest) and manifest < published
    assert calls.names[published - 1 :] == [
        ("sync", orders.partial.name),
        ("rename", orders.final.name),
        ("sync", orders.final.parent.name),
    ]


def test_a_part_that_was_left_is_not_touched_by_the_next_writer(orders: Orders):
    orders.give(1, attempt=1)
    made, note = orders.data_files(orders.partial), part_record_path(orders.partial, 1).read_text()
    answer = orders.give(1, attempt=2)
    assert "failure" not in answer and answer["bytes"] == orders.orders[1]["files"][0]["bytes"]
    assert (
        orders.data_files(orders.partial) == made and part_record_path(orders.partial, 1).read_text() == note
    )


def test_a_part_that_was_committed_meanwhile_is_not_made_again(orders: Orders):
    orders.give(1, attempt=1)
    orders.give(0, attempt=1)
    made = orders.data_files(orders.final)
    assert "failure" not in orders.give(1, attempt=2) and "failure" not in orders.give(0, attempt=2)
    assert orders.data_files(orders.final) == made and verify(orders.final) == []
    assert not orders.partial.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_files_that_a_writer_left_half_written_are_made_again(orders: Orders, rank: int):
    name = orders.orders[rank]["files"][0]["name"]
    (orders.partial / name).write_bytes(b"half of it")
    before = (orders.partial / name).stat().st_ino
    with (orders.partial / name).open("r+b") as late:  # what is still on its way to the disk
        orders.give(1, attempt=1 + rank)
        assert "failure" not in orders.give(0, attempt=2 - rank)
        late.write(b"of another writer")
    assert verify(orders.final) == [] and orders.data_files(orders.final)[name] != before


@pytest.mark.parametrize("call", range(1, 7))
def test_a_commit_that_died_anywhere_is_brought_to_its_end(orders: Orders, call: int, monkeypatch):
    """Each call that a commit makes to the file system is where it dies once."""
    orders.give(1, attempt=1)
    calls: list[str] = []

    def dying(name: str, act: Any) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            calls.append(name)
            if len(calls) == call:
                raise Died
            return act(*arguments, **more)

        return called

    with monkeypatch.context() as patch:
        for name in ("write_new", "sync_directory"):
            patch.setattr(durable, name, dying(name, getattr(durable, name)))
        patch.setattr(Path, "unlink", dying("unlink", Path.unlink))
        patch.setattr(Path, "rename", dying("rename", Path.rename))
        with pytest.raises(Died):
            orders.give(0, attempt=1)
    if call == 1:
        (orders.partial / INDEX).write_text("{")  # it died in the middle of writing it
    assert "failure" not in orders.give(1, attempt=2)  # who knows which rank comes first
    assert "failure" not in orders.give(0, attempt=2)
    assert verify(orders.final) == [] and not orders.partial.exists()
    assert len(list(orders.final.iterdir())) == 2 + WORLD


def test_a_part_that_may_be_committed_any_moment_is_not_taken_back(orders: Orders):
    files = [file["name"] for file in orders.orders[1]["files"]]
    orders.give(1, attempt=1)
    abandon_part(orders.partial, 1, files=files, why={"message": "late", "remedy": ""})
    assert "failure" not in orders.give(0, attempt=1) and verify(orders.final) == []


def test_a_part_that_was_given_up_is_told_and_its_files_are_gone(orders: Orders):
    files = [file["name"] for file in orders.orders[1]["files"]]
    (orders.partial / files[0]).touch()
    abandon_part(orders.partial, 1, files=files, why={"message": "the disk hangs", "remedy": ""})
    assert orders.data_files(orders.partial) == {}
    assert "rank 1: the disk hangs" in orders.give(0, attempt=1)["failure"]["message"]
    assert not orders.partial.exists()


def test_a_part_whose_state_could_not_be_copied_leaves_no_file_and_is_told_to_the_first_rank(orders: Orders):
    orders.buffers[1].filled = ABANDONED
    assert orders.give(1, attempt=1)["failure"]["message"] == "the state could not be copied"
    assert orders.data_files(orders.partial) == {} and orders.partial.exists()
    failure = orders.give(0, attempt=1)["failure"]
    assert failure["message"] == "rank 1: the state could not be copied"
    assert not orders.partial.exists()


def test_a_file_that_was_lost_before_the_commit_is_missed(orders: Orders):
    orders.give(1, attempt=1)
    (orders.partial / orders.orders[1]["files"][0]["name"]).write_bytes(b"short")
    assert "has 5 bytes" in orders.give(0, attempt=1)["failure"]["message"]
    assert list(orders.partial.parent.iterdir()) == []


def test_a_rank_that_never_comes_is_named_after_the_deadline(orders: Orders):
    assert "rank 1 did not write its part" in orders.give(0, attempt=1)["failure"]["message"]


def test_a_rank_that_writes_nothing_is_named_long_before_the_deadline_of_all_parts(orders: Orders):
    deadlines.progress_path(orders.partial, 1).write_text("4096")
    orders.orders[0].update(parts_s=1e6, stall_s=0.0)
    message = orders.give(0, attempt=1)["failure"]["message"]
    assert "rank 1 has written nothing" in message and "after 4,096 bytes" in message


def test_a_slow_rank_is_waited_for_as_long_as_its_bytes_grow(orders: Orders, monkeypatch):
    """Rank 1 notes more bytes at each look; its part comes after a time of many stalls."""
    now, looks, told = [0.0], [0], []

    def look(partial: Path, rank: int) -> int:
        now[0] += 59.0
        looks[0] += 1
        if looks[0] == 100:
            orders.give(1, attempt=1)
        return looks[0] * 1000

    monkeypatch.setattr(commit_module, "noted_progress", look)
    monkeypatch.setattr(commit_module, "_PROGRESS_POLL_S", 0.0)
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])
    orders.orders[0].update(parts_s=1e6)
    answer = writer._answer({**orders.orders[0], "attempt": 1}, orders.buffers[0], tell=told.append)
    assert "failure" not in answer and verify(orders.final) == [] and looks[0] >= 100
    assert told == sorted(told) and told[-1] >= 99_000  # the trainer hears of the others' progress


def test_a_writer_notes_its_bytes_for_the_first_rank_and_leaves_no_note_behind(orders: Orders, monkeypatch):
    monkeypatch.setattr(deadlines, "NOTE_EVERY_S", 0.0)
    noted: list[tuple[str, str]] = []
    write = durable.write_whole_unsynced

    def watched(path: Path, content: str) -> None:
        noted.append((path.name, content))
        write(path, content)

    monkeypatch.setattr(durable, "write_whole_unsynced", watched)
    orders.give(1, attempt=1)
    orders.give(0, attempt=1)
    pages = -(-orders.orders[1]["files"][0]["bytes"] // 4096) * 4096
    assert ("progress-r00001", str(pages)) in noted
    assert not any("progress-r00000" in name for name, _ in noted)
    assert len(list(orders.final.iterdir())) == 2 + WORLD


def test_a_writer_that_goes_on_is_waited_for_and_one_without_progress_is_not(tmp_path: Path):
    """A process in place of the writer: it tells of progress ten times as long as it may be silent."""

    def stand_in(script: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-uc", script], stdout=subprocess.PIPE)

    told = "import time\nfor n in range(10):\n    print('{\"progress\": %d}' % n)\n    time.sleep(0.3)\n"
    for script, ends in ((told + "print('{\"bytes\": 7}')", True), (told + "time.sleep(600)", False)):
        process = stand_in(script)
        try:
            if ends:
                answer = client_module._receive_answer(process, deadline=inf, silence_s=2.0)
                assert answer == {"bytes": 7}
            else:
                with pytest.raises(TimeoutError, match="no progress for 2 s"):
                    client_module._receive_answer(process, deadline=inf, silence_s=2.0)
        finally:
            process.kill()
            process.communicate()


def read_back_by(orders: Orders, rank: int, parts: dict[str, Any], *, to_its_end: bool = True) -> str | None:
    """What a rank's writer says about its files on the disk."""
    order = {"verify": str(orders.partial), "rank": rank, "to_its_end": to_its_end}
    return writer._read_back(parts.get(str(orders.partial)), order, orders.buffers[rank])


def written_by_both(orders: Orders) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{}, {}]
    for rank in (1, 0):
        order = {**orders.orders[rank], "attempt": 1}
        assert "failure" not in writer._answer(order, orders.buffers[rank], written=parts[rank])
    return parts


def test_each_writer_finds_what_became_of_its_own_files_and_looks_at_no_other(orders: Orders):
    parts = written_by_both(orders)
    assert [read_back_by(orders, rank, parts[rank]) for rank in range(WORLD)] == ["", ""]
    name = orders.orders[1]["files"][0]["name"]
    content = bytearray((orders.final / name).read_bytes())
    content[-1] ^= 1
    (orders.final / name).write_bytes(content)
    assert read_back_by(orders, 0, parts[0]) == ""
    assert read_back_by(orders, 1, parts[1]) == f"{name} is not what was written, from byte 0 on"
    (orders.final / name).write_bytes(content[:-1])
    assert "bytes of the" in (read_back_by(orders, 1, parts[1]) or "")
    (orders.final / name).unlink()
    assert "cannot be read back" in (read_back_by(orders, 1, parts[1]) or "")


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_the_first_writer_reads_back_index_and_manifest_too(orders: Orders, name: str):
    parts = written_by_both(orders)
    content = bytearray((orders.final / name).read_bytes())
    content[len(content) // 2] ^= 1
    (orders.final / name).write_bytes(content)
    assert name in (read_back_by(orders, 0, parts[0]) or "") and read_back_by(orders, 1, parts[1]) == ""


def test_reading_back_is_given_up_for_a_save_and_by_a_writer_that_did_not_write(orders: Orders):
    parts = written_by_both(orders)
    orders.buffers[1].stops_reading = True
    assert read_back_by(orders, 1, parts[1], to_its_end=False) is None
    assert read_back_by(orders, 1, parts[1]) == "" and read_back_by(orders, 1, {}) is None


def test_after_a_reading_back_that_was_given_up_the_next_one_goes_to_its_end(orders: Orders):
    """Else of saves that follow each other without a pause none would ever be known to be intact."""
    (_, parts), buffer, check = written_by_both(orders), orders.buffers[1], OwnFilesCheck()

    def write(order: dict[str, Any], **waits: Any) -> dict[str, Any]:
        buffer.stops_reading = True  # another save begins meanwhile
        return {"problem": writer._read_back(parts[order["verify"]], order, buffer)}

    saving = SimpleNamespace(
        name="step-000001.i001",
        order={"partial": str(orders.partial), "store": "", "rank": 1},
        buffer=1,
        deadlines=Deadlines(part_bytes=0, largest_part_bytes=0),
    )

    def look() -> dict[str, str]:
        check.run(saving, writer=SimpleNamespace(write=write), buffer=buffer, is_free=lambda: True)
        return check.take()

    assert [look() for _ in range(3)] == [{}, {"step-000001.i001": ""}, {}]


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(client_module, "WRITER_END_S", 60.0)  # the machine may be busy
    one = WriterProcess(())
    yield one
    one.close()


def test_a_writer_that_reads_no_order_is_given_up_after_the_deadline(process: WriterProcess):
    process.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CheckpointError, match="in time"):
        process.write({"files": "x" * (1 << 20)}, deadline_s=0.5)  # more than a pipe takes
    assert process.pid is None and not Path(f"/proc/{pid}").exists()


def test_a_second_order_does_not_wait_for_ever_behind_one_that_is_stuck(process: WriterProcess):
    with process._turn, pytest.raises(CheckpointError, match="busy with an earlier"):
        process.write({}, deadline_s=0.2)


def test_a_writer_that_is_stopped_is_ended_by_closing(process: WriterProcess):
    process.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    process.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_writer_that_even_a_kill_does_not_end_is_left_behind(process: WriterProcess, monkeypatch, caplog):
    from subprocess import Popen

    monkeypatch.setattr(client_module, "WRITER_END_S", 0.1)
    process.start()
    stuck = process._process
    assert stuck is not None
    with monkeypatch.context() as patch:
        patch.setattr(Popen, "kill", lambda self: None)  # as where it waits for a disk that does not answer
        os.kill(stuck.pid, signal.SIGSTOP)
        with pytest.raises(CheckpointError, match="in time"):
            process.write({}, deadline_s=0.2)
        assert process.pid is None and "was killed and has not ended" in caplog.text
    stuck.kill()
    stuck.wait(60)
