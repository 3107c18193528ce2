"""What the guards that only warn remember, and the bounds of a plateau, worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.guard.reports import report

from bloomery.guard.creep import HeldOutRise, InnerGrowth, MemoryCreep, _grows_faster, _scatter
from bloomery.guard.logs import read_columns
from bloomery.guard.robust_window import RobustWindow
from bloomery.guard.trend import GradientNormRise, Plateau, ThroughputDrop, _LevelHistory
from bloomery.guard.verdict import CarryOn, Watch

FRESH: dict[Any, Any] = {
    HeldOutRise(): {"losses": [], "points": [], "told": False},
    MemoryCreep(): {"means": [], "sum": 0.0, "count": 0, "started": False, "told": False},
    InnerGrowth(): {
        "about": "", "step": 0, "rate": 0.0, "newest": {}, "count": 0, "medians": {}, "noise": {}, "told": {},
    },
    Plateau(): {
        "step": 0, "sum": 0.0, "squares": 0.0, "count": 0, "means": [], "peak_rate": 0.0, "told": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("guard", FRESH)
def test_a_guard_without_a_history_begins_as_before_the_first_step(guard: Any) -> None:
    assert guard.fresh() == FRESH[guard]
    one = report(1, held_out_loss=2.0, memory_bytes=5.0, inner_sizes={"weight": [1.0]})
    assert guard.judge(None, one) == guard.judge(guard.fresh(), one)


def test_no_more_is_remembered_than_is_compared() -> None:
    memory, history = MemoryCreep(), MemoryCreep().fresh()
    for step in range(1, 1201):
        history, _ = memory.judge(history, report(step, memory_bytes=float(step)))
    assert isinstance(history, dict)
    assert history["means"] == [550.5 + 100.0 * block for block in range(7)], "of 12 blocks the newest seven"
    assert (history["sum"], history["count"]) == (0.0, 0)
    growth, history = InnerGrowth(), InnerGrowth().fresh()
    for step in range(1, 40):
        history, _ = growth.judge(history, report(step, inner_sizes={"hidden": [float(step)]}))
    assert isinstance(history, dict)
    assert history["medians"] == {"hidden": [[float(step)] for step in range(17, 39, 3)]}
    assert history["newest"] == {"hidden": [[37.0], [38.0], [39.0]]} and history["count"] == 39
    assert growth.judge(history, report(40)) == (history, CarryOn(judged_step=40)), "nothing was measured"


def test_scatter_and_growth_are_of_logarithms() -> None:
    assert _scatter((0.1, 0.1 * math.e, 0.1 / math.e)) == pytest.approx(2.0 / 3.0)
    flat = (1.0, 2.0, 2.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    assert not _grows_faster(flat, InnerGrowth()), "two medians that did not rise"


def test_a_level_that_hardly_spreads_is_measured_by_the_least_spread() -> None:
    level = RobustWindow(window=(1.0,) * 96, centre=1.0, spread=0.01)
    past = _LevelHistory(level=level, step=9, about="10  1")
    for spread, height in ((0.01, 4.0), (0.1, 2.0)):
        wide = replace(past, level=replace(level, spread=spread))
        after = wide.with_value(1.2, report(10), floor=0.0, least_spread=0.05)
        assert after.level.heights == pytest.approx((height,)) and after.step == 10
    assert past.with_value(1.2, report(10), floor=0.0, least_spread=0.0).level.heights == pytest.approx(
        (20.0,)
    )
    assert not past.with_value(1.2, report(9), floor=0.0, least_spread=0.05).level.is_known
    stored = replace(past, warned_step=5).to_json()
    assert (stored["step"], stored["told"], stored["about"]) == (9, 5, "10  1")
    assert past.may_warn(9) and replace(past, warned_step=9).may_warn(209)
    assert not replace(past, warned_step=9).may_warn(208)
    assert not replace(past, level=replace(level, window=(1.0,) * 15)).may_warn(9)
    assert replace(past, level=replace(level, window=(1.0,) * 16)).may_warn(9)


def test_seconds_and_norms_that_are_none_change_nothing() -> None:
    norms, seconds = GradientNormRise(), ThroughputDrop()
    for guard, one in (
        (norms, report(5, gradient_norm=0.0)),
        (norms, report(5, gradient_norm=math.inf)),
        (norms, report(5, update_applied=False)),
        (seconds, report(5, shared_seconds=None)),
        (seconds, report(5, shared_seconds=0.0)),
    ):
        assert guard.judge(guard.fresh(), one) == (guard.fresh(), CarryOn(judged_step=5))  # type: ignore[attr-defined]


def before(**changed: Any) -> Any:
    """A history at the end of a doubling: 200 losses of 2.0, half of them 0.1 above and half below."""
    usual = {
        "step": 16_383, "sum": 400.0, "squares": 100 * (2.1**2 + 1.9**2), "count": 200,
        "means": [[2.5, 0.0], [2.0078125, 0.0]], "peak_rate": 1e-3, "told": False,
    }  # fmt: skip
    return {**usual, **changed}


def test_a_doubling_ends_with_its_mean_and_the_next_begins() -> None:
    history, verdict = Plateau().judge(before(), report(16_384, 3.0))
    assert history == {
        "step": 16_384, "sum": 3.0, "squares": 9.0, "count": 1, "peak_rate": 1e-3, "told": True,
        "means": [[2.5, 0.0], [2.0078125, 0.0], [2.0, pytest.approx(0.1 / math.sqrt(200))]],
    }  # fmt: skip
    assert isinstance(verdict, Watch) and verdict.numbers == {
        "fall": 0.0078125, "fall_before": 2.5 - 2.0078125, "loss": 2.0,
    }  # fmt: skip
    assert verdict.reason == (
        "the loss no longer falls: by 0.0078 to 2.0000 in the steps since half of the way, by 0.4922 in as "
        "large a part of the run before"
    )


@pytest.mark.parametrize(
    ("changed", "is_told"),
    [
        ({}, True),
        ({"told": True}, False),
        ({"count": 99, "sum": 198.0, "squares": 396.0}, False),
        ({"count": 100, "sum": 200.0, "squares": 400.0}, True),
        ({"means": [[2.0078125, 0.0]]}, False),  # two doublings
        ({"means": [[9.0, 0.0], [2.5, 0.0], [2.0078125, 0.0]]}, True),
        ({"means": [[2.5, 0.0], [2.015, 0.0]]}, False),  # by more than half a percent of the loss
        ({"means": [[2.0625, 0.0], [2.0078125, 0.0]]}, False),  # by more than a tenth of the fall before
        ({"means": [[2.5, 0.03], [2.0, 0.04]]}, False),  # a fall of 10 errors of 0.05
        ({"means": [[2.52, 0.03], [2.0, 0.04]]}, True),
        ({"means": [[2.019, 0.0], [2.0, 0.0]]}, False),  # hardly a fall before: 1% of the loss
        ({"means": [[2.021, 0.0], [2.0, 0.0]]}, True),
        ({"peak_rate": 2e-3}, True),
        ({"peak_rate": 2.1e-3}, False),
    ],
)
def test_a_plateau_at_each_of_its_bounds(changed: dict[str, Any], is_told: bool) -> None:
    _, verdict = Plateau().judge(before(**changed), report(16_384, 3.0))
    assert isinstance(verdict, Watch) is is_told


def test_a_doubling_is_judged_from_step_8192_on_and_only_where_it_ends() -> None:
    guard = Plateau()
    assert isinstance(guard.judge(before(step=8191), report(8192, 2.0))[1], Watch)
    assert isinstance(guard.judge(before(step=4095), report(4096, 2.0))[1], CarryOn)
    same, _ = guard.judge(before(step=16_390), report(16_391, 2.0, learning_rate=2e-3))
    assert same == before(
        step=16_391, sum=402.0, squares=before()["squares"] + 4.0, count=201, peak_rate=2e-3
    )
    for step in (16_390, 16_385):  # made again
        again, _ = guard.judge(before(step=16_390), report(step, 2.0))
        assert again == before(step=step, sum=2.0, squares=4.0, count=1)
    for odd in (report(16_391, math.nan), report(16_391, 2.0, update_applied=False)):
        assert guard.judge(before(), odd) == (before(), CarryOn(judged_step=16_391))


def test_a_journal_of_losses_that_are_no_numbers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"event": "step", "step": 1, "loss": "NaN"}) + "\n")
    columns = read_columns(path)
    assert len(columns) == 1 and math.isnan(columns.loss[0])
