"""How the state is copied from a device: which calls are made, in which order; the device is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save import background, staging
from bloomery.checkpoint.save.staging import (
    CopyPace,
    StateReadyEvent,
    pin,
    record_state_ready,
    stage,
    unpin,
)
from bloomery.checkpoint.save.write_plan import WritePlanner
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer

DEVICE = torch.device("cuda", 3)


class Device:
    """A stand-in for torch.cuda that notes what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.refusal = 0
        stream = SimpleNamespace(
            wait_event=lambda event: self.log.append(("wait", event)),
            synchronize=lambda: self.log.append("synchronize"),
        )
        driver = SimpleNamespace(
            cudaHostRegister=lambda *what: self.log.append(("register", *what)) or self.refusal,
            cudaHostUnregister=lambda place: self.log.append(("unregister", place)),
        )
        event = SimpleNamespace(record=lambda stream: self.log.append(("record", stream)))
        cuda = SimpleNamespace(
            device=lambda device: self._within("device", device),
            Stream=lambda device: self.log.append(("new stream", device)) or stream,
            stream=lambda given: self._within("stream", given is stream),
            Event=lambda: event,
            current_stream=lambda device: ("current", device),
            cudart=lambda: driver,
        )
        self.event = event
        monkeypatch.setattr(torch, "cuda", cuda)

    @contextmanager
    def _within(self, *what: object) -> Iterator[None]:
        self.log.append(("enter", *what))
        yield
        self.log.append(("leave", what[0]))


def test_the_event_comes_after_all_that_the_devices_own_stream_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    assert record_state_ready(torch.device("cpu")) is None and device.log == []
    ready = record_state_ready(DEVICE)
    assert ready == StateReadyEvent(device=DEVICE, event=device.event)  # type: ignore[arg-type]
    assert device.log == [("record", ("current", DEVICE))]


def test_copies_run_on_a_stream_of_their_own_after_the_event_and_each_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    entries = [whole("model.a", torch.arange(40.0)), whole("optim.a", torch.arange(10.0))]
    planner = WritePlanner(Ranks(), file_bytes=1 << 20)
    plan = planner.agree(entries, [planner.digest(entries)])
    buffer = SharedBuffer.create(1 << 16, name="device")
    seen: list[tuple[int, int]] = []

    class Watched(CopyPace):
        def copied(self, bytes: int) -> None:
            seen.append((bytes, buffer.filled))
            assert device.log[-1] == "synchronize", "what counts as filled was copied"

    copies: list[tuple[int, bool]] = []
    copy = torch.Tensor.copy_

    def watched(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        copies.append((len(source), non_blocking))
        return copy(target, source)

    monkeypatch.setattr(staging, "_DEVICE_COPY_BYTES", 100)
    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    try:
        ready: Any = StateReadyEvent(device=DEVICE, event=device.event)  # type: ignore[arg-type]
        stage(plan, entries, buffer, Watched(plan.bytes, window_s=0.0, throttled=False), ready=ready)
        for file, entry in zip(plan.files, entries, strict=True):
            start = file.offset + len(file.header)
            assert bytes(buffer.view[file.offset : start]) == file.header
            assert bytes(buffer.view[start : start + entry.nbytes]) == entry.tensor.numpy().tobytes()
        assert buffer.filled == plan.bytes
    finally:
        buffer.close()
    assert copies == [(100, True), (60, True), (40, True)]
    ends = [4096 + 100, 4096 + 160, 8192 + 4096 + 40]
    assert seen == [(end, end) for end in ends]
    assert device.log == [
        ("enter", "device", DEVICE),
        ("new stream", DEVICE),
        ("wait", device.event),
        ("enter", "stream", True),
        *["synchronize"] * 3,
        ("leave", "stream"),
        ("leave", "device"),
    ]


def test_pages_are_pinned_for_their_device_and_a_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(monkeypatch)
    memory = bytearray(8192)
    buffer: Any = SimpleNamespace(view=memoryview(memory))
    place = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert not pin(buffer, torch.device("cpu")) and device.log == []
    assert pin(buffer, DEVICE) and not caplog.text
    assert device.log == [("enter", "device", DEVICE), ("register", place, 8192, 0), ("leave", "device")]
    device.refusal = 712
    assert not pin(buffer, DEVICE)
    assert caplog.messages == ["0.0 GB cannot be pinned (error 712): copies take longer"]
    device.log.clear()
    unpin(buffer)
    assert device.log == [("unregister", place)]


def test_a_paced_copy_waits_for_its_schedule_at_twice_the_speed_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waits = [100.0], list[float]()
    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pace = CopyPace(1000, window_s=20.0, throttled=True)
    monkeypatch.setattr(pace._pauses_no_more, "wait", waits.append)
    for second, done in ((101.0, 100), (101.0, 300), (103.0, 301), (110.0, 1000), (109.0, 1000)):
        now[0] = second
        pace.copied(done)
    assert waits == pytest.approx([2.0, 0.01, 1.0])
    pace.stop_pausing()
    now[0] = 100.0
    pace.copied(1000)
    assert len(waits) == 3
    for never in (
        CopyPace(1000, window_s=0.0, throttled=True),
        CopyPace(1000, window_s=20.0, throttled=False),
        CopyPace(0, window_s=20.0, throttled=True),
    ):
        monkeypatch.setattr(never._pauses_no_more, "wait", waits.append)
        never.copied(1000)
    assert len(waits) == 3


def test_a_saver_pins_its_buffers_and_unpins_before_it_closes_what_was_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, int]] = []
    numbers: list[Any] = []

    def pinned(buffer: Any, device: torch.device) -> bool:
        assert device == DEVICE
        numbers.append(buffer)
        number, close = len(numbers) - 1, buffer.close
        monkeypatch.setattr(buffer, "close", lambda: log.append(("close", number)) or close())
        log.append(("pin", number))
        return len(numbers) == 2

    writer = SimpleNamespace(start=lambda: None, close=lambda: None, pid=7, port=None)
    monkeypatch.setattr(background, "pin", pinned)
    monkeypatch.setattr(background, "unpin", lambda buffer: log.append(("unpin", numbers.index(buffer))))
    monkeypatch.setattr(background, "WriterProcess", lambda buffers, *, replica_server: writer)
    saver = background.BackgroundSaver(
        bytes=4096, throttled=True, device=DEVICE, committed=lambda saving: None
    )
    assert saver.unavailable_reason() is None
    saver.close()
    assert log == [("pin", 0), ("pin", 1), ("close", 0), ("unpin", 1), ("close", 1)]
