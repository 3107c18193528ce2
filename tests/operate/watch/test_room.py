"""Forecasts of a file system at their edges, where it is mounted, and what a sender says of alerts."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bloomery.errors import BloomeryError
from bloomery.operate.watch import notify
from bloomery.operate.watch.disk import DiskSample, forecast_full
from bloomery.operate.watch.quota import mounted_at


def falling(*, by: int, left: int, count: int = 100) -> list[DiskSample]:
    return [DiskSample(60.0 * minute, left + by * (count - 1 - minute), -1) for minute in range(count)]


def test_a_disk_that_has_just_become_full_is_full_now() -> None:
    forecast = forecast_full(falling(by=1 << 20, left=0))
    assert forecast is not None and (forecast.what, forecast.full_in_s) == ("space", 0.0)


def test_a_file_that_was_there_for_a_moment_does_not_count_as_space_that_is_gone() -> None:
    samples = falling(by=1 << 20, left=101 << 20)
    samples[90] = samples[90]._replace(free_bytes=samples[90].free_bytes - (40 << 20))
    forecast = forecast_full(samples)
    assert forecast is not None and forecast.full_in_s == pytest.approx(101 * 60.0, rel=0.05)


def test_two_looks_at_one_moment_are_no_rate() -> None:
    samples = falling(by=1 << 20, left=50 << 20)
    forecast = forecast_full([sample for sample in samples for _ in range(2)])
    assert forecast is not None and forecast.full_in_s == pytest.approx(50 * 60.0, rel=0.05)
    assert forecast_full([samples[0]] * 9) is None


def test_a_link_is_on_the_file_system_that_it_leads_to(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as elsewhere:
        (tmp_path / "runs").symlink_to(elsewhere)
        found = mounted_at(tmp_path / "runs")
        assert found is not None and found == mounted_at(Path(elsewhere))


def test_who_has_no_apprise_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BloomeryError) as refused:
        notify.refuse_bad_addresses(["json://host"])
    assert "pip install 'bloomery[watch]'" in refused.value.remedy


def test_who_took_an_alert_is_said_before_the_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.seen = list[str]()

        def flush(self) -> None:
            self.seen.append(self.getvalue())

    class Apprise:
        def add(self, address: str) -> bool:
            return True

        def notify(self, **message: str) -> bool:
            return True

    fake = ModuleType("apprise")
    fake.Apprise, fake.NotifyFormat = Apprise, SimpleNamespace(TEXT="text")  # type: ignore[attr-defined]
    pipe, request = Pipe(), {"addresses": ["a", "b", "c"], "title": "t", "body": "b"}
    monkeypatch.setitem(sys.modules, "apprise", fake)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(sys, "stdout", pipe)
    assert notify._main() == 0
    assert [len(text.split()) for text in pipe.seen] == [1, 2, 3]


@pytest.mark.parametrize(("output", "taken"), [(None, []), (b"0\n", [0]), (b"0\n\xff\n1\n", [0, 1])])
def test_what_was_said_until_the_time_was_over_counts(
    monkeypatch: pytest.MonkeyPatch, output: bytes | None, taken: list[int]
) -> None:
    def late(command: list[str], **more: Any) -> None:
        raise subprocess.TimeoutExpired(command, more["timeout"], output=output)

    monkeypatch.setattr(subprocess, "run", late)
    assert notify.send(["x", "y"], title="t", body="b") == taken
