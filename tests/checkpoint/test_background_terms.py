"""What a saver beside the training says of itself, tells its writer, measures, and gives back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.checkpoint.test_background import wait_for
from tests.checkpoint.test_background_steps import WAITS, Saves, Writer, saves  # noqa: F401
from tests.checkpoint.test_partner import LIMITS, TOKEN

from bloomery import durable
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save import background as background_module
from bloomery.checkpoint.save.background import BackgroundSaver
from bloomery.checkpoint.save.staging import CopyPace
from bloomery.checkpoint.save.write_plan import WritePlanner
from bloomery.checkpoint.writer.client import WriterLost
from bloomery.checkpoint.writer.memory_replica import label_of
from bloomery.checkpoint.writer.partner import ReplicaSettings
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.checkpoint.writer.shared_buffer import ABANDONED
from bloomery.errors import CheckpointError, StorageError


def saver_of(**more: Any) -> BackgroundSaver:
    usual = {"bytes": 1 << 16, "throttled": True, "device": torch.device("cpu"), "committed": lambda _: None}
    return BackgroundSaver(**{**usual, **more})


class Keeping(Writer):
    """A writer that accepts replicas; it keeps the settings that it was given."""

    port = 4711  # type: ignore[assignment]
    given: ClassVar[list[object]] = []

    def __init__(self, buffers: object, *, replica_server: object) -> None:
        super().__init__(buffers, replica_server=replica_server)
        self.given.append(replica_server)


@pytest.fixture
def settings(tmp_path: Path) -> ReplicaSettings:
    return ReplicaSettings(
        root=tmp_path / "memory",
        run=tmp_path / "other" / ".." / "run",
        identity="it",
        rank=1,
        token=TOKEN,
        host="127.0.0.1",
        limits=LIMITS,
    )


@pytest.fixture
def keeping(settings: ReplicaSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundSaver]:
    monkeypatch.setattr(background_module, "WriterProcess", Keeping)
    Keeping.given.clear()
    made = saver_of(memory=settings)
    assert made.unavailable_reason() is None
    yield made
    made.close()


def begun(saver: BackgroundSaver, step: int, **more: Any) -> Any:
    entries = (whole("model.a", torch.ones(5)),)
    planner = WritePlanner(Ranks(), file_bytes=1 << 30)
    plan = planner.agree(entries, [planner.digest(entries)])
    about = {"step": step, "incarnation": 1, "about": {}}
    order = {"partial": f"/there/step-{step:06d}.i001.partial", "store": "", "rank": 0, "checkpoint": about}
    usual = {"run_length_steps": None, "texts": {"boxes": "[]"}, "deadlines": WAITS, "order": order}
    return saver.begin(entries, plan, step=step, name=f"step-{step:06d}.i001", **{**usual, **more})


def test_a_writer_gets_the_settings_of_its_replica_server_and_each_order_its_slot(
    keeping: BackgroundSaver, settings: ReplicaSettings
) -> None:
    assert Keeping.given == [
        {
            "root": str(settings.root),
            "run": str(settings.run.resolve()),
            "identity": "it",
            "rank": 1,
            "token": TOKEN,
            "host": "127.0.0.1",
            "limits": {"owners": [1, 2], "world": 3, "bytes": 100_000, "boxes": 10},
        }
    ]
    assert keeping.endpoint() == ("127.0.0.1", 4711)
    writer: Any = keeping._writer
    for step, partner, number in ((4, ("there", 5), 0), (5, None, 1), (6, ("there", 5), 0)):
        for slot in range(2):
            label_of(settings.slot(slot)).touch()
        saving = begun(keeping, step, partner=partner)
        assert saving.buffer == number
        assert [label_of(settings.slot(slot)).exists() for slot in range(2)] == [number == 1, number == 0]
        keeping.wait_staged()
        assert keeping.wait(deadline_s=60) == []
        orders = [order for order in writer.orders if "verify" not in order]
        order = orders[-1]
        assert order["memory"] == {"slot": str(settings.slot(number)), "token": TOKEN, "partner": partner}
        assert order["buffer"] == number and order["texts"] == {"boxes": "[]"}
        assert order["checkpoint"]["step"] == step


def test_the_memory_of_a_run_is_locked_until_its_saver_is_closed(
    keeping: BackgroundSaver, settings: ReplicaSettings
) -> None:
    with (settings.replicas.directory / "run.json").open("rb") as owner:
        assert not durable.try_lock(owner.fileno())
        keeping.close()
        assert durable.try_lock(owner.fileno()), "or no later run could remove what this one leaves"


def test_who_keeps_no_replicas_has_no_address(saves: Saves) -> None:  # noqa: F811
    assert saves.saver.endpoint() is None
    saves.saver._memory = SimpleNamespace(host="here", replicas=SimpleNamespace(release=lambda: None))  # type: ignore[assignment]
    assert saves.saver.endpoint() is None, "its writer has no port"
    saves.writer.port = 5
    assert saves.saver.endpoint() == ("here", 5)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StorageError("no memory", remedy=""), "no memory"),
        (WriterLost("it is gone"), "the process that writes checkpoints has ended: it is gone"),
        (ValueError("odd"), "saving in the background could not be started: odd"),
    ],
)
def test_a_saver_that_could_not_be_started_says_why_and_gives_everything_back(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Refusing(Writer):
        def start(self) -> None:
            raise error

        def close(self) -> None:
            closed.append("writer")

    monkeypatch.setattr(background_module, "WriterProcess", Refusing)
    saver = saver_of()
    assert saver.unavailable_reason() == said
    buffers = list(saver._buffers)
    assert len(buffers) == 2
    for buffer in buffers:
        monkeypatch.setattr(buffer, "close", lambda: closed.append("buffer"))
    saver.close()
    assert "writer" in closed and closed.count("buffer") == 2 and saver._buffers == []


def test_memory_that_is_not_taken_in_time_is_told_with_its_size(saves: Saves) -> None:  # noqa: F811
    waits: list[float] = []
    creating = saves.saver._creating
    saves.saver._creating = SimpleNamespace(join=waits.append, is_alive=lambda: True)  # type: ignore[assignment]
    saves.saver.bytes = 1_600_000_000
    assert saves.saver.unavailable_reason() == "taking 3.2 GB of memory takes longer than 300 s"
    assert waits == [300.0]
    saves.saver._creating = creating


def test_the_shortest_of_the_last_three_steps_is_the_time_that_a_copy_has(
    saves: Saves,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, paces = [100.0], list[tuple[int, float, bool]]()

    class Watched(CopyPace):
        def __init__(self, bytes: int, *, window_s: float, throttled: bool) -> None:
            paces.append((bytes, window_s, throttled))
            super().__init__(bytes, window_s=0.0, throttled=False)

    monkeypatch.setattr(background_module, "CopyPace", Watched)
    monkeypatch.setattr(background_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for second in (100.0, 101.0, 103.0, 107.0, 115.0):
        now[0] = second
        saves.saver.wait_staged()
    assert list(saves.saver._step_times_s) == [2.0, 4.0, 8.0]
    saving = saves.begin(4)
    assert (saving.window_s, paces) == (2.0, [(saving.plan.bytes, 2.0, True)])
    now[0] = 131.0
    saves.saver.wait_staged()
    assert list(saves.saver._step_times_s) == [4.0, 8.0, 16.0]
    assert saves.saver.wait(deadline_s=60) == []


def test_how_long_a_save_took_is_from_the_order_to_the_answer(
    saves: Saves,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(background_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    saves.writer.go_on.clear()
    saving = saves.begin(4)
    wait_for(lambda: saves.writer.orders)
    now[0] = 107.5
    saves.writer.go_on.set()
    assert saving.over.wait(60) and (saving.seconds, saving.bytes) == (7.5, 5)


@pytest.mark.parametrize("throttled", [True, False])
def test_the_writer_pauses_only_while_the_saver_is_throttled(
    saves: Saves,  # noqa: F811
    throttled: bool,
) -> None:
    saves.writer.go_on.clear()
    saves.saver.throttled = throttled
    for buffer in saves.saver._buffers:
        buffer.is_urgent, buffer.filled = throttled, 77
    saving = saves.begin(4)
    buffer = saves.saver._buffers[saving.buffer]
    assert buffer.is_urgent is not throttled
    saves.saver.wait_staged()
    assert buffer.filled == saving.plan.bytes


def test_a_copy_that_fails_is_given_up_before_anybody_is_told_that_it_is_staged(
    saves: Saves,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    saves.writer.go_on.clear()
    monkeypatch.setattr(background_module, "stage", refused)
    saving = saves.begin(4)
    saves.saver.wait_staged()
    assert saves.saver._buffers[saving.buffer].filled == ABANDONED
    assert "copying the state for step-000004.i001 failed" in caplog.text
    assert "the device is gone" in caplog.text


def test_a_label_that_cannot_be_removed_is_told_and_its_replica_is_no_longer_the_newest(
    keeping: BackgroundSaver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(slot: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(background_module, "remove_label", refused)
    keeping._newest_in = {0: (1, 9), 1: (2, 3)}
    assert begun(keeping, 12).buffer == 0, "that of the earlier life goes first"
    assert "cannot be used for a copy in memory: [Errno 1] Operation not permitted" in caplog.text
    assert keeping._newest_in.get(0) != (1, 9)


def test_a_replica_that_an_earlier_process_left_has_the_age_that_its_label_tells(
    keeping: BackgroundSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = SimpleNamespace(incarnation=3, step=70)
    monkeypatch.setattr(background_module, "read_replica", lambda label: held)
    assert keeping._memory is not None
    assert keeping._slot_for(keeping._memory, 1) == keeping._memory.slot(1)
    assert keeping._age(1) == (3, 70) and keeping._age(0) == (-1, -1)


def test_who_closes_waits_for_the_copies_and_for_the_saves_so_long_and_no_longer(
    saves: Saves,  # noqa: F811
) -> None:
    waited: list[tuple[str, float]] = []
    order: list[str] = []

    def event(name: str) -> Any:
        return SimpleNamespace(wait=lambda seconds: waited.append((name, seconds)))

    pace = SimpleNamespace(stop_pausing=lambda: order.append("pace"))
    saving: Any = SimpleNamespace(pace=pace, staged=event("staged"), over=event("over"))
    saves.saver._open.append(saving)
    close = saves.writer.close
    saves.writer.close = lambda: (order.append("writer"), close())
    saves.saver.close()
    assert waited == [("staged", 8.0), ("over", 3.0)] and order[:2] == ["pace", "writer"]
    assert saves.saver._buffers == [] and saves.saver._closed
    saves.saver._reading_back.release()


def test_one_that_still_takes_its_memory_is_not_waited_for_by_who_closes(
    saves: Saves,  # noqa: F811
) -> None:
    waits: list[float] = []
    creating, buffers = saves.saver._creating, list(saves.saver._buffers)
    saves.saver._creating = SimpleNamespace(join=waits.append, is_alive=lambda: True)  # type: ignore[assignment]
    saves.saver.close()
    assert waits == [3.0] and saves.saver._buffers == buffers, "its own thread gives them back"
    saves.saver._creating = creating


def test_a_wait_stops_the_reading_back_only_where_a_save_is_under_way(
    saves: Saves,  # noqa: F811
) -> None:
    buffers = saves.saver._buffers
    for buffer in buffers:
        buffer.stops_reading = False
    assert saves.saver.wait(deadline_s=60) == []
    assert not any(buffer.stops_reading for buffer in buffers)
    saves.writer.go_on.clear()
    saves.begin(4)
    saves.saver.wait_staged()
    for buffer in buffers:
        buffer.stops_reading = False
    assert saves.saver.wait(deadline_s=0) == ["step-000004.i001"]
    assert all(buffer.stops_reading for buffer in buffers)


def test_all_saves_together_are_waited_for_as_long_as_one_would_be(
    saves: Saves,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = [100.0], list[float]()
    monkeypatch.setattr(background_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds: float) -> None:
        waited.append(seconds)
        now[0] += 40.0

    def saving(number: int) -> Any:
        pace, over = SimpleNamespace(stop_pausing=lambda: None), SimpleNamespace(wait=wait)
        return SimpleNamespace(name=f"save {number}", buffer=number % 2, pace=pace, over=over)

    with monkeypatch.context() as patch:
        patch.setattr(saves.saver, "_open", [saving(3), saving(1), saving(2)])
        assert saves.saver.wait(deadline_s=60.0) == ["save 1", "save 2", "save 3"]
    assert waited == [60.0, 20.0, 0.0]


def test_a_save_that_was_not_written_tells_the_other_ranks_why_and_which_files_go(
    saves: Saves,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    abandoned: list[object] = []

    def abandon(rank: int, *, files: list[str], why: dict[str, str]) -> None:
        abandoned.append((rank, files, why))

    monkeypatch.setattr(background_module, "part_writer_for", lambda order: SimpleNamespace(abandon=abandon))
    saves.writer.failure = CheckpointError("it broke", remedy="Mend it.")
    saving = saves.begin(4)
    assert saves.saver.wait(deadline_s=60) == []
    names = [file.name for file in saving.plan.files]
    why = {"kind": "checkpoint", "message": "it broke", "remedy": "Mend it."}
    assert abandoned == [(0, names, why)] and not saves.saver.is_busy and not caplog.text
    assert saves.saver._newest_in == {}, "it is no newer replica"


def test_all_tasks_are_done_until_there_are_no_more() -> None:
    done: list[int] = []
    tasks: Any = background_module.queue.SimpleQueue()
    for number in (1, 2):
        tasks.put(lambda number=number: done.append(number))
    tasks.put(None)
    thread = threading.Thread(target=background_module._run_tasks, args=(tasks,))
    thread.start()
    thread.join(60)
    assert done == [1, 2] and not thread.is_alive()


def test_the_end_of_a_save_does_not_free_a_buffer_that_the_next_has_taken_by_then(
    saves: Saves,  # noqa: F811
) -> None:
    later: list[Any] = []
    saves.saver._newest_in = {1: (9, 9)}

    def begin_another(saving: Any) -> None:
        if not later:
            saves.writer.go_on.clear()
            later.append(saves.begin(5))

    saves.saver._committed = begin_another
    first = saves.begin(4)
    assert first.over.wait(60) and first.failure is None
    (second,) = later
    assert second.buffer == first.buffer == 0 and saves.saver._busy == {0: second}
    assert saves.saver.under_way == [second.name]
    saves.writer.go_on.set()
    assert second.over.wait(60) and saves.saver._busy == {}
