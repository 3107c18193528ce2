"""The dashboard's curves: which points of a long run are shown, and how a question about them is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.operate.dashboard.access import AccessRules
from bloomery.operate.dashboard.curves import _line, curves, downsampled, moving_mean, rows_between
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.server import DashboardServer


def test_a_range_of_a_curve_has_one_point_more_on_either_side() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert rows_between(x, 2.5, 3.5) == slice(1, 4) and rows_between(x, 3.0, 3.0) == slice(1, 4)
    assert rows_between(x, None, 1.0) == slice(0, 2) and rows_between(x, 9.0, None) == slice(4, 5)
    assert rows_between(x, 4.0, 2.0) == slice(2, 3), "an empty range leaves its edges"


def test_a_curve_that_fits_is_whole_and_one_of_a_spike_keeps_it() -> None:
    y = np.array([1.0, np.inf, 3.0])
    whole = downsampled(np.arange(3.0), y, points=3)
    assert whole.x.tolist() == [0.0, 1.0, 2.0] and np.isnan(whole.y[1])
    long = np.ones(1000)
    long[777], long[333] = 9.0, -9.0
    few = downsampled(np.arange(1000.0), long, points=10)
    assert {(777.0, 9.0), (333.0, -9.0)} <= set(zip(few.x.tolist(), few.y.tolist(), strict=True))
    assert moving_mean(np.array([]), np.array([]), window=3, points=5).x.tolist() == []
    nothing = moving_mean(np.arange(2.0), np.array([np.nan, 4.0]), window=1, points=5)
    assert np.isnan(nothing.y[0]) and nothing.y[1] == 4.0


def test_a_clock_that_goes_back_moves_no_curve_to_the_left(run: WrittenRun) -> None:
    reader = RunReader(run.rundir.path).read_all()
    times = reader.columns.axes["time"].values
    times[5] = times[4] - 1000.0
    (loss,) = curves(reader, ["loss"], axis="time")
    assert all(later >= earlier for earlier, later in zip(loss.x, loss.x[1:], strict=False))
    (smooth,) = curves(reader, ["loss~"], points=20)
    assert smooth.name == "loss~" and len(smooth.x) == 20
    assert (
        curves(reader, ["loss!"], end=40.0) == [] == curves(reader, ["loss!"], begin=70.0)
        and len(curves(reader, ["loss!"], end=70.0)) == 1
    )


def test_a_question_about_curves_is_bounded(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    server, asked_for = DashboardServer([run.rundir.path], AccessRules()), list[Any]()

    def noted(names: list[str], *, axis: str, begin: float | None, end: float | None, points: int) -> bytes:
        asked_for.append((len(names), axis, begin, end, points))
        return b"[]"

    monkeypatch.setattr(server.runs[0], "curves", noted)

    async def ask(query: str) -> int:
        scope = {"type": "http", "path": "/api/curves", "query_string": query.encode(), "headers": []}
        return (await server._curves(Request(scope))).status_code

    async def all_of(*queries: str) -> list[int]:
        return [await ask(query) for query in queries]

    names = "&".join(f"name=n{number}" for number in range(70))
    assert (
        asyncio.run(all_of(f"run=0&{names}&points=1", "run=0&points=99999&axis=time&begin=-2.5&end=7"))
        == [200] * 2
    )
    assert asked_for == [(64, "step", None, None, 10), (0, "time", -2.5, 7.0, 4000)]
    assert asyncio.run(all_of("run=0&name=loss", "name=loss")) == [200, 404]
    assert asked_for[2:] == [(1, "step", None, None, 1000)]
    assert asyncio.run(all_of("run=0&begin=inf", "run=0&points=1.5", "run=1", "run=0&axis=x")) == [
        400,
        400,
        404,
        404,
    ]


def test_a_smoothed_curve_is_the_mean_of_a_fiftieth_of_its_points() -> None:
    for count, mean in ((100, 1 / 5), (1000, 1 / 20), (200_000, 1 / 2000)):
        y = np.zeros(count)
        y[-1] = 1.0
        assert _line("loss~", np.arange(float(count)), y, 10).y[-1] == pytest.approx(mean)
    assert _line("loss", np.arange(3.0), np.arange(3.0), 10).y.tolist() == [0.0, 1.0, 2.0]
