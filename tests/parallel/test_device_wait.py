"""The host waits for a device until a deadline, and then says that another rank is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bloomery.errors import RankLost
from bloomery.events import timeouts
from bloomery.events.timeouts import COLLECTIVE_TIMEOUT_S, WATCHDOG_MARGIN_S, wait_until
from bloomery.parallel import device_wait, mesh
from bloomery.parallel.device_wait import wait_for_device
from bloomery.parallel.host_numbers import to_device
from bloomery.parallel.mesh import Mesh

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Clock:
    """Seconds that pass in sleeps alone."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeouts, "time", clock)
    return clock


class Event:
    """An event of a device that is there after so many questions."""

    after = 0
    recorded: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.asked = 0

    def record(self, stream: Any) -> None:
        Event.recorded.append(stream)

    def query(self) -> bool:
        self.asked += 1
        return self.asked > Event.after


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    Event.recorded = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream", device))
    return Event


def test_a_wait_ends_when_it_is_done_or_at_its_deadline_with_growing_pauses(clock: Clock) -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), within_s=10.0)
    assert len(clock.pauses) == 2 and clock.pauses[0] == 5e-5 < clock.pauses[1]
    clock.pauses.clear()
    assert not wait_until(lambda: False, within_s=10.0)
    assert max(clock.pauses) == 2e-3 and 10.0 <= sum(clock.pauses) <= 10.01
    assert not wait_until(lambda: False, within_s=1.0, pause_s=0.25, longest_pause_s=0.25)


def test_a_device_that_is_done_is_waited_for_and_one_that_never_is_ends_the_rank(
    clock: Clock, events: type[Event]
) -> None:
    events.after = 100
    wait_for_device(GPU)
    assert events.recorded == [("stream", GPU)]
    events.after = 10**9
    with pytest.raises(RankLost, match=r"^A collective timed out: .* has waited 7 s for another rank\."):
        wait_for_device(GPU, within_s=7.0)
    begun = clock.now
    with pytest.raises(RankLost):
        Mesh(device=GPU, world=2).wait_for_device()
    assert COLLECTIVE_TIMEOUT_S <= clock.now - begun < COLLECTIVE_TIMEOUT_S + WATCHDOG_MARGIN_S


def test_a_rank_alone_and_a_cpu_are_not_waited_for(events: type[Event]) -> None:
    Mesh(device=GPU, world=1).wait_for_device()
    Mesh(device=CPU, world=2).wait_for_device()
    assert events.recorded == []


def test_the_watchdog_of_nccl_waits_longer_than_the_ranks() -> None:
    assert mesh._timeout(GPU).total_seconds() == COLLECTIVE_TIMEOUT_S + WATCHDOG_MARGIN_S
    assert mesh._timeout(CPU).total_seconds() == COLLECTIVE_TIMEOUT_S


@pytest.mark.parametrize("variable", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_what_the_flight_recorder_holds_is_written_where_the_watchdog_would(
    variable: str, clock: Clock, events: type[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.after = 10**9
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(device_wait.torch_private, "flight_record", lambda: b"record")
    monkeypatch.setenv(variable, str(tmp_path / "flight-"))
    with pytest.raises(RankLost):
        wait_for_device(GPU, within_s=1.0)
    assert (tmp_path / "flight-3").read_bytes() == b"record"
    monkeypatch.setenv(variable, str(tmp_path / "nowhere" / "flight-"))
    with pytest.raises(RankLost):  # and no error of the disk
        wait_for_device(GPU, within_s=1.0)


def test_a_barrier_on_gpus_has_the_deadline_too(
    clock: Clock, events: type[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    events.after = 10**9
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(mesh.dist, "all_reduce", reduced.append)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    with pytest.raises(RankLost, match="timed out"):
        Mesh(device=GPU, world=2).barrier()
    assert len(reduced) == 1


def test_numbers_come_to_a_device_in_double_precision() -> None:
    numbers = to_device([0.1, 2.0], dtype=torch.float64, device=CPU)
    assert numbers.dtype == torch.float64 and numbers.tolist() == [0.1, 2.0]
