"""What a saver beside the training orders of its writer, and what becomes of each answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.test_background import wait_for

from bloomery.checkpoint.format.deadlines import Deadlines
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save import background as background_module
from bloomery.checkpoint.save.background import BUFFERS, BackgroundSaver
from bloomery.checkpoint.save.staging import PendingSave
from bloomery.checkpoint.save.write_plan import WritePlanner
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import StorageError

WAITS = Deadlines(part_bytes=10**9, largest_part_bytes=3 * 10**9)


class Writer:
    """A stand-in for the writer process: it notes its orders, and answers or raises what it is told."""

    pid, port = 7, None

    def __init__(self, buffers: object, *, replica_server: object) -> None:
        self.orders: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()

    def start(self) -> None:
        """Nothing is to be started."""

    def close(self) -> None:
        self.go_on.set()

    def write(self, order: dict[str, Any], **how: Any) -> dict[str, Any]:
        self.orders.append({**order, **how})
        assert self.go_on.wait(60)
        if self.failure is not None:
            raise self.failure
        return {"bytes": 5, "copy_failure": "no room there", "problem": ""}


class Saves:
    """A saver and its stand-in for a writer; the saves that it told of as committed."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.committed = directory, list[str]()
        self.refusal: Exception | None = None
        self.saver = BackgroundSaver(
            bytes=1 << 16, throttled=True, device=torch.device("cpu"), committed=self._committed
        )
        assert self.saver.unavailable_reason() is None
        self.writer: Any = self.saver._writer

    def _committed(self, saving: PendingSave) -> None:
        self.committed.append(saving.name)
        if self.refusal is not None:
            raise self.refusal

    def begin(self, step: int, *, incarnation: int = 1) -> PendingSave:
        entries = (whole("model.a", torch.ones(5)), whole("optim.a", torch.ones(7)))
        planner = WritePlanner(Ranks(), file_bytes=1 << 30)
        plan = planner.agree(entries, [planner.digest(entries)])
        partial = self.directory / f"step-{step:06d}.i{incarnation:03d}.partial"
        partial.mkdir()
        about = {"step": step, "incarnation": incarnation, "about": {}}
        order = {"partial": str(partial), "store": "", "rank": 0, "checkpoint": about}
        return self.saver.begin(
            entries,
            plan,
            step=step,
            name=partial.stem,
            run_length_steps=77,
            order=order,
            texts={},
            deadlines=WAITS,
        )


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saves]:
    monkeypatch.setattr(background_module, "WriterProcess", Writer)
    made = Saves(tmp_path)
    yield made
    made.saver.close()


def test_an_order_names_the_files_and_gives_as_much_more_time_as_a_step_takes(
    saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    saves.saver._step_times_s.extend([9.0, 3.0, 5.0])
    saving = saves.begin(4)
    saves.saver.wait_staged()
    assert saves.saver.wait(deadline_s=60) == [] and saving.over.is_set() and saving.failure is None
    wait_for(lambda: len(saves.writer.orders) == 2)
    order = saves.writer.orders[0]
    assert order["parts_s"] == WAITS.parts_s and order["stall_s"] == WAITS.stall_s + 3
    assert order["deadline_s"] == WAITS.answer_s and order["silence_s"] == WAITS.silence_s + 3
    assert [file["name"].partition("-")[0] for file in order["files"]] == ["model", "optim"]
    assert all(set(file) == {"name", "offset", "bytes"} for file in order["files"]) and "memory" not in order
    assert (saving.bytes, saving.run_length_steps) == (5, 77) and saves.committed == [saving.name]
    assert f"{saving.name} is not in a partner's memory: no room there" in caplog.text
    wait_for(lambda: saves.saver.check._outcomes)
    assert saves.saver.check.take() == {saving.name: ""}, "it was read back"
    assert not saves.saver.is_busy and saves.saver.under_way == []


def test_a_save_that_was_not_written_is_taken_back_and_one_that_was_is_not(saves: Saves) -> None:
    saves.writer.failure = StorageError("no space", remedy="")
    failed = saves.begin(4)
    assert saves.saver.wait(deadline_s=60) == [] and failed.failure is saves.writer.failure
    assert not Path(failed.order["partial"]).exists() and saves.committed == []
    saves.writer.failure = None
    saves.refusal = StorageError("an old one cannot be removed", remedy="")
    written = saves.begin(5)
    assert saves.saver.wait(deadline_s=60) == [] and written.failure is saves.refusal
    assert Path(written.order["partial"]).exists() and saves.committed == [written.name]
    saves.refusal = ValueError("unexpected")
    other = saves.begin(6)
    assert saves.saver.wait(deadline_s=60) == []
    assert other.failure is not None and "saving step-000006.i001 failed: unexpected" in other.failure.message
    assert len(saves.writer.orders) == 3, "what failed is not read back"


def test_a_save_ends_that_cannot_be_taken_back(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(order: object) -> None:
        raise StorageError("the mount is gone")

    monkeypatch.setattr(background_module, "part_writer_for", refuse)
    saves.writer.failure = StorageError("it broke")
    saving = saves.begin(4)
    assert saving.over.wait(30) and saving.failure is saves.writer.failure
    assert not saves.saver.under_way and not saves.saver.is_busy


def test_two_saves_take_both_buffers_and_the_earlier_one_no_longer_pauses(saves: Saves) -> None:
    saves.writer.go_on.clear()
    first = saves.begin(4)
    saves.saver.wait_staged()
    buffers = saves.saver._buffers
    assert not saves.saver.is_busy and not buffers[first.buffer].is_urgent
    buffers[first.buffer].stops_reading = buffers[1 - first.buffer].stops_reading = False
    second = saves.begin(5)
    assert saves.saver.is_busy and second.buffer != first.buffer
    assert second.window_s == 0.0, "no step was measured yet"
    assert buffers[first.buffer].is_urgent and not buffers[second.buffer].is_urgent
    assert all(buffer.stops_reading for buffer in buffers)
    saves.saver.wait_staged()
    assert saves.saver.wait(deadline_s=0) == [first.name, second.name] == saves.saver.under_way
    assert buffers[second.buffer].is_urgent, "who waits wants it soon"
    saves.writer.go_on.set()
    assert saves.saver.wait(deadline_s=60) == [] and not saves.saver.is_busy
    assert sorted(saves.committed) == [first.name, second.name]
    called = threading.Event()
    saves.saver.run_in_save_thread(called.set)
    assert called.wait(60)
    third = saves.begin(6)
    assert third.buffer == first.buffer, "the buffer of the older state is written over"


def test_after_a_rewind_the_buffer_of_the_earlier_incarnation_is_written_over(saves: Saves) -> None:
    left_behind, newest = saves.begin(9), saves.begin(5, incarnation=2)
    assert saves.saver.wait(deadline_s=60) == [] and newest.buffer != left_behind.buffer
    assert saves.begin(6, incarnation=2).buffer == left_behind.buffer


def test_a_copy_that_the_device_does_not_finish_ends_the_training(saves: Saves) -> None:
    saving = saves.begin(4)
    assert saves.saver.wait(deadline_s=60) == []
    saves.saver._unstaged[:] = [saving]
    saving.staged.clear()
    saving.deadlines = Deadlines(part_bytes=0, largest_part_bytes=0)
    waited: list[float] = []
    saving.staged.wait = lambda seconds: bool(waited.append(seconds))  # type: ignore[assignment, func-returns-value]
    with pytest.raises(Exception, match=r"(?s)took longer than 300 s.*nvidia-smi"):
        saves.saver.wait_staged()
    assert waited == [300.0]
    saving.staged = threading.Event()
    saving.staged.set()
    saves.saver.wait_staged()
    assert saves.saver._unstaged == []


def test_a_buffer_counts_as_empty_until_the_new_state_is_copied_into_it(
    saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        background_module, "stage", lambda plan, entries, buffer, pace, *, ready: seen.append(buffer.filled)
    )
    for buffer in saves.saver._buffers:
        buffer.filled = 1 << 15
    assert saves.begin(4).over.wait(60) and saves.begin(5).over.wait(60)
    assert seen == [0, 0], "or the writer would store what the last state left there"


def test_who_waits_for_a_copy_ends_its_pauses(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(
        background_module,
        "stage",
        lambda plan, entries, buffer, pace, *, ready: ended.append(pace._pauses_no_more.wait(5)),
    )
    saving = saves.begin(4)
    saves.saver.wait_staged()
    assert ended == [True] and saving.over.wait(60)


def test_saves_go_on_after_what_followed_earlier_ones_has_failed(
    saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("stale file handle")

    for _ in range(BUFFERS + 1):
        saves.saver.run_in_save_thread(fail)
    wait_for(lambda: caplog.text.count("what follows a save failed") == BUFFERS + 1)
    saving = saves.begin(4)
    assert saves.saver.wait(deadline_s=60) == [] and saving.failure is None and not saves.saver.is_busy
