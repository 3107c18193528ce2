from __future__ import annotations

from types import SimpleNamespace

import pytest

from bloomery.checkpoint.writer import part_place
from bloomery.checkpoint.writer.part_place import CpuThrottle


class Clock:
    """The time that passes, and the part of it that was computed."""

    def __init__(self) -> None:
        self.now_s = self.computed_s = 0.0

    def compute(self, seconds: float) -> None:
        self.now_s += seconds
        self.computed_s += seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    times = SimpleNamespace(
        monotonic=lambda: clock.now_s, process_time=lambda: clock.computed_s, sleep=clock.sleep
    )
    monkeypatch.setattr(part_place, "time", times)
    monkeypatch.setattr(part_place, "processors_of_a_rank", lambda: 2.0)
    return clock


def test_a_writer_keeps_to_its_share(clock: Clock) -> None:
    writer = CpuThrottle(lambda: False)
    for _ in range(50):
        clock.compute(0.001)
        writer.rest()
    assert clock.now_s == pytest.approx(64 * clock.computed_s, rel=0.01)


def test_whoever_waited_anyway_does_not_pause_again(clock: Clock) -> None:
    writer = CpuThrottle(lambda: False)
    clock.compute(0.001)
    clock.sleep(1.0)
    writer.rest()
    assert clock.now_s == pytest.approx(1.001)


def test_no_pause_is_so_long_that_the_disk_seems_stuck(clock: Clock) -> None:
    writer = CpuThrottle(lambda: False)
    clock.compute(3.0)
    writer.rest()
    assert clock.now_s == pytest.approx(3.15)


def test_a_hurried_writer_pauses_no_more(clock: Clock) -> None:
    writer = CpuThrottle(lambda: clock.now_s > 0.03)
    clock.compute(0.002)
    writer.rest()
    assert clock.now_s < 0.06
    clock.compute(0.002)
    before = clock.now_s
    writer.rest()
    assert clock.now_s == before
