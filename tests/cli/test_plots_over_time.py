"""The axis of a picture whose curves are drawn over the time of day."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_demo_steps import Recorder

from bloomery.cli import plot


@pytest.mark.parametrize("against", ["time", "step"])
def test_dates_are_written_below_curves_over_time_alone(
    against: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    drawing = Recorder([])

    class Axes(Recorder):
        xaxis = Recorder(calls)

    pyplot = SimpleNamespace(
        subplots=lambda *shape, **options: (drawing, SimpleNamespace(flat=[Axes([])])), close=drawing.close
    )
    dates = SimpleNamespace(
        AutoDateLocator=lambda: "a locator", ConciseDateFormatter=lambda locator: f"dates at {locator}"
    )
    module = SimpleNamespace(use=drawing.use, pyplot=pyplot, dates=dates)
    monkeypatch.setitem(sys.modules, "matplotlib", module)  # type: ignore[arg-type]
    monkeypatch.setattr(plot, "_draw_run", lambda *given, is_one: None)
    plot.draw([], Namespace(columns=["loss"], against=against, log=False, output=Path("x.png")))
    expected = [
        ("set_major_locator", "a locator", {}),
        ("set_major_formatter", "dates at a locator", {}),
    ]
    assert calls == (expected if against == "time" else [])
