"""Pictures of curves over the time of day, and of several runs whose columns differ."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_demo_steps import Recorder

from bloomery.cli import plot
from bloomery.events.run_directory import RunDirectory


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


def test_a_column_that_one_of_several_runs_has_is_drawn_and_the_problems_of_each_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(path: Path) -> Any:
        columns = SimpleNamespace(names=["loss", path.name])
        reader = SimpleNamespace(name=path.name, columns=columns, problems=lambda: [f"{path.name} is torn"])
        return SimpleNamespace(read_all=lambda: reader)

    drawn: list[list[str]] = []
    monkeypatch.setattr("bloomery.operate.dashboard.run_reader.RunReader", opened)
    monkeypatch.setattr(plot, "draw", lambda readers, options: drawn.append([one.name for one in readers]))
    runs = [str(RunDirectory(tmp_path / name).create().path) for name in ("one", "two")]
    assert plot.run([*runs, "--columns", "two", "one", "loss"]) == 0
    assert drawn == [["one", "two"]]
    assert capsys.readouterr().err == "one: one is torn\ntwo: two is torn\n"
