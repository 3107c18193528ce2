"""The statistics of a window of values, each worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bloomery.guard.robust_window import (
    BLOCK,
    WINDOW,
    RobustWindow,
    _autocorrelation_widening,
    _widening,
    _with_spread_memory,
    calm_blocks,
    is_extreme,
    is_high,
    median,
    push,
    recomputed,
    window_from_json,
    window_statistics,
)


@pytest.mark.parametrize(
    ("heights", "line_steps", "share", "high"),
    [
        ([20.5], 5, 0.06, True),  # one mean of several steps, far out
        ([20.0], 5, 0.06, False),
        ([20.5], 4, 0.06, False),
        ([20.5], 5, 0.05, False),
        ([7.5, 7.5], 5, 0.0, True),  # two such means
        ([7.0, 7.5], 5, 0.0, False),
        ([7.5, 7.0], 5, 0.0, False),
        ([7.5, 7.5], 4, 0.0, False),
        ([7.5], 5, 0.0, False),
        ([0.0, 7.5, 7.5], 5, 0.0, True),
        ([7.5, 7.5, 0.0], 5, 0.0, False),
        ([8.5] * 3, 1, 0.0, True),  # three values of single steps
        ([8.5] * 2, 1, 0.0, False),
        ([8.0, 8.5, 8.5], 1, 0.0, False),
        ([0.0, 8.5, 8.5, 8.5], 1, 0.0, True),
        ([8.5, 8.5, 8.5, 0.0], 1, 0.0, False),
        ([3.8] * 6 + [0.0] * 3, 1, 0.0, True),  # most of the newest
        ([3.8] * 5 + [3.75], 1, 0.0, False),
    ],
)
def test_several_high_values_count_and_one_of_a_heavy_tail_does_not(
    heights: list[float], line_steps: int, share: float, high: bool
) -> None:
    assert is_high(heights, line_steps=line_steps, share=share) is high


def test_one_mean_is_extreme_beyond_sixty_spreads_and_a_quarter_of_the_centre() -> None:
    found = [is_extreme(height, share=share) for height, share in ((60.5, 0.26), (60.0, 0.26), (60.5, 0.25))]
    assert found == [True, False, False]


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([9.0, 1.0, 4.0, 2.0]) == 3.0 and median([5.0]) == 5.0


@pytest.mark.parametrize(
    ("agreements", "factor"),
    [
        (96, 1.0 + 0.25 * 0.7),  # all neighbours agree: a correlation of 1
        (64, 1.0 + 0.25 * 0.2),  # two thirds: sin(30°) is 0.5
        (57, 1.0),  # 0.29
        (0, 1.0),
    ],
)
def test_signs_that_agree_widen_the_spread(agreements: int, factor: float) -> None:
    assert _widening(agreements, 97) == pytest.approx(factor)


def test_only_half_a_window_and_more_of_values_is_looked_at_for_correlation() -> None:
    assert _autocorrelation_widening(np.ones(48)) == pytest.approx(1.175)
    assert _autocorrelation_widening(np.ones(47)) == 1.0
    assert _autocorrelation_widening(np.array([1.0, -1.0] * 30)) == 1.0
    assert _autocorrelation_widening(np.array([1.0, 0.0] * 30)) == 1.0, "0 has no sign"


def test_few_values_have_their_median_and_a_wide_spread_of_at_least_a_percent() -> None:
    spread = 1.4826 * 0.1 * (1.0 + 4.0 / 3.0)
    assert window_statistics([1.0, 1.1, 0.9], floor=0.0) == pytest.approx((1.0, spread, 0.0))
    assert window_statistics([-2.0] * 4, floor=0.0) == pytest.approx((-2.0, 0.02 * 2.0, 0.0))
    assert window_statistics([2.0] * 4, floor=0.03) == pytest.approx((2.0, 0.06 * 2.0, 0.0))
    rising = [float(step) for step in range(15)]
    assert window_statistics(rising, floor=0.0)[0::2] == (7.0, 0.0), "15 values have no slope"


def test_many_values_have_the_centre_of_the_newer_half_and_a_spread_about_the_line() -> None:
    steady = [10.25, 9.75] * 8
    spread = 1.4826 * 0.25 * 1.25
    assert window_statistics(steady, floor=0.0) == pytest.approx((10.0, spread, 0.0))
    assert window_statistics(steady, floor=0.1) == pytest.approx((10.0, 1.0 * 1.25, 0.0))
    below = [-10.25, -9.75] * 8
    assert window_statistics(below, floor=0.1) == pytest.approx((-10.0, 1.0 * 1.25, 0.0))
    assert window_statistics([0.0] * 16, floor=0.1) == pytest.approx((0.0, 1.25e-12, 0.0))


@pytest.mark.parametrize(
    ("slope", "floor", "found"),
    [(0.02, 0.015, 0.02), (0.02, 0.016, 0.0), (-0.02, 0.016, -0.02), (-0.02, 0.5, -0.02)],
)
def test_a_rise_within_a_spread_is_no_slope_and_any_fall_is_one(
    slope: float, floor: float, found: float
) -> None:
    """Its halves differ by 0.16, and the floor of the spread is 0.015 or 0.016 of about 10.2."""
    values = [10.0 + slope * step for step in range(16)]
    assert window_statistics(values, floor=floor)[2] == pytest.approx(found)


def falling(**changed: object) -> RobustWindow:
    window = (9.0,) * 81 + (2.9,) * 8 + (1.0,) * 7  # 2.9 is the median of the newest 15
    level = RobustWindow(window=window, centre=3.0, spread=0.3, slope=-0.01, fresh=4, recent=(0.0,) * 3)
    return replace(level, **changed)  # type: ignore[arg-type]


def test_a_fall_is_expected_to_go_on_a_little_less_and_not_below_the_newest_values() -> None:
    # From the centre of the newer half it is 24 values to the end of the window, then 4 + 3, and the next.
    assert falling(spread=1.0).expected() == pytest.approx((3.0 - 0.8 * 0.32, math.hypot(1.0, 0.06 * 0.32)))
    further = falling(spread=1.0).expected(ahead=2)
    assert further == pytest.approx((3.0 - 0.8 * 0.34, math.hypot(1.0, 0.06 * 0.34)))
    steep = falling(slope=-0.02, spread=0.3)
    assert steep.expected() == pytest.approx((2.9, math.hypot(0.3, 0.06 * 0.64)))
    rising = falling(slope=0.01)
    assert rising.expected()[0] == pytest.approx(3.0 + 0.8 * 0.32)
    assert falling(slope=0.0).expected(ahead=5) == (3.0, 0.3)


def test_a_fall_of_more_than_a_spread_within_a_window_is_steep() -> None:
    assert falling(slope=-0.5, spread=47.5).is_falling
    assert not falling(slope=-0.5, spread=48.0).is_falling
    assert not falling(slope=0.5, spread=0.0).is_falling


def test_a_window_is_known_with_three_values_and_full_with_the_newest_nine_besides() -> None:
    level = RobustWindow()
    for value in (1.0, 1.1):
        level, is_block = push(level, value, floor=0.0)
        assert not level.is_known and not is_block
    level, _ = push(level, 0.9, floor=0.0)
    assert level.is_known and level.recent == (1.0, 1.1, 0.9) and level.heights == (0.0, 0.0, 0.0)
    spread = 1.4826 * 0.1 * (1.0 + 4.0 / 3.0)
    assert (level.centre, level.spread) == pytest.approx((1.0, spread))
    after, _ = push(level, 2.0, floor=0.0, widen=2.0)
    assert after.heights[-1] == pytest.approx(1.0 / (2.0 * spread))
    full = RobustWindow(window=(1.0,) * WINDOW, recent=(1.0,) * 9)
    assert full.is_full and not replace(full, recent=(1.0,) * 8).is_full
    assert not replace(full, window=(1.0,) * 95).is_full


def test_the_tenth_newest_value_enters_the_window_and_each_32nd_completes_a_block() -> None:
    level = RobustWindow(
        window=tuple(float(at) for at in range(WINDOW)),
        recent=(200.0, 300.0) * 4 + (250.0,),
        heights=(1.0,) * 9,
        centre=70.0,
        spread=5.0,
        fresh=3,
        entered=30,
        spreads=tuple(float(at) for at in range(8)),
        blocks=tuple(float(at) for at in range(16)),
    )
    once, is_block = push(level, 80.0, floor=0.0)
    assert not is_block and once == replace(
        level,
        window=(*level.window[1:], 200.0),
        recent=(*level.recent[1:], 80.0),
        heights=(*(1.0,) * 8, 2.0),
        fresh=4,
        entered=31,
    )
    twice, is_block = push(once, 80.0, floor=0.0)
    assert is_block and (twice.fresh, twice.entered) == (0, 0)
    assert twice.window == (*level.window[2:], 200.0, 300.0) and twice.recent[-2:] == (80.0, 80.0)
    # Of the last 32 values that entered, the middle two are 81 and 82.
    assert twice.blocks == (*level.blocks[1:], 81.5)
    assert twice.spreads[:-1] == level.spreads[1:] and twice.spreads[-1] > 0.0


def test_statistics_are_computed_again_while_the_window_fills_or_falls_and_else_for_each_block() -> None:
    filling = RobustWindow(window=(1.0,) * 40, recent=(3.0,) * 9, heights=(0.0,) * 9, centre=7.0, spread=9.0)
    after, _ = push(filling, 3.0, floor=0.0)
    assert (after.centre, after.fresh, after.entered) == (1.0, 0, 1) and after.spread < 1e-11
    full = replace(filling, window=(1.0,) * WINDOW)
    after, _ = push(full, 3.0, floor=0.0)
    assert (after.centre, after.spread, after.fresh) == (7.0, 9.0, 1), "until the end of the block"
    after, _ = push(replace(full, slope=-1.0), 3.0, floor=0.0)
    assert (after.centre, after.fresh) == (1.0, 0), "96 values of a fall by 1 are beyond 9"
    few = RobustWindow(window=(1.0,) * 15, recent=(3.0,) * 5, heights=(0.0,) * 5, centre=7.0, spread=9.0)
    after, _ = push(few, 3.0, floor=0.0)
    assert after.centre == 3.0 and after.fresh == 0, "six of the newer eleven of 21 values are the newest"
    enough = replace(few, window=(1.0,) * 16)
    assert push(enough, 3.0, floor=0.0)[0].centre == 7.0, "the newest are held back"


def test_a_block_is_calm_by_where_a_trend_will_have_come_to() -> None:
    level = RobustWindow(
        window=(0.0,) * WINDOW,
        recent=(0.0,) * 9,
        heights=(0.0,) * 9,
        spread=1.0,
        slope=0.5,
        entered=9,
        fresh=2,
    )
    # 24 values to the window's end, 2 + 9 since, and the next: 18 on, of which 80% are expected.
    first = 0.8 * 0.5 * (24 + 2 + 9 + 1)
    values = first + 0.8 * 0.5 * np.arange(BLOCK - 9)
    (calm,) = calm_blocks(level, values, floor=0.01)
    assert calm.heights == pytest.approx((0.0,) * 9, abs=1e-9) and (calm.fresh, calm.entered) == (0, 0)
    assert calm.recent == tuple(values[-9:].tolist()) and calm.window[-1] == values[-10]
    assert list(calm_blocks(replace(level, slope=-0.5), -values, floor=0.01)) == [], "a steep fall"


def test_a_calm_window_keeps_the_median_of_the_last_spreads_and_what_blocks_vary_by() -> None:
    ups = [0.0, 1.0] * 4  # second differences of 2
    variance = (2.0 * 1.4826) ** 2 / 6.0
    assert _with_spread_memory((5.0, 1.0, 0.25), [], []) == {"centre": 5.0, "spread": 1.0, "slope": 0.25}
    assert _with_spread_memory((5.0, 1.0, 0.0), [1.0, 3.0, 2.0], ups[:7])["spread"] == 2.0
    assert _with_spread_memory((5.0, 1.0, 0.0), [0.5], ups)["spread"] == pytest.approx(
        math.sqrt(1.0 + 2.0 * (variance - 0.25**2))
    )
    assert _with_spread_memory((5.0, 1.0, 0.0), [2.0], ups)["spread"] == pytest.approx(
        math.sqrt(4.0 + 2.0 * (variance - 0.5**2))
    )
    assert _with_spread_memory((5.0, 9.0, 0.0), [2.0], ups)["spread"] == 9.0, "blocks scatter by less"
    drift = [float(at) for at in range(8)]
    assert _with_spread_memory((5.0, 1.0, 0.0), [1.0], drift)["spread"] == 1.0, "a drift is no scatter"
    remembered = RobustWindow(window=(1.0,) * 40, spreads=(3.0,), blocks=(7.0,))
    assert recomputed(remembered, floor=0.0).spread == 3.0


def test_the_newest_values_are_held_back_once_sixteen_have_entered() -> None:
    held = RobustWindow(window=(1.0,) * 16, recent=(9.0,) * 9, heights=(0.0,) * 9)
    assert recomputed(held, floor=0.0).centre == 1.0
    assert recomputed(replace(held, window=(1.0,) * 15), floor=0.0).centre == 9.0


@pytest.mark.parametrize(
    ("outliers", "is_calm"),
    [
        ([3.8, 3.8], True),
        ([3.8, 3.8, 3.8], False),
        ([8.5, 3.8], True),
        ([8.5, 8.5], False),
        ([59.0], True),
        ([61.0], False),
        ([61.0, 3.8], False),
    ],
)
def test_a_block_with_values_that_may_be_high_is_left_to_be_judged_one_by_one(
    outliers: list[float], is_calm: bool
) -> None:
    level = RobustWindow(
        window=(0.0,) * WINDOW, recent=(0.0,) * 9, heights=(0.0,) * 9, centre=0.0, spread=1.0, entered=9
    )
    values = np.zeros(BLOCK - 9)
    values[3 : 3 + len(outliers)] = outliers
    assert bool(list(calm_blocks(level, values, floor=0.01))) is is_calm
    # The newest heights of before count with those of the block.
    before = replace(level, heights=(0.0,) * 8 + (8.5,))
    assert list(calm_blocks(before, values, floor=0.01)) == []
    assert bool(list(calm_blocks(level, values, floor=0.01, least=100.0))), "by a wider spread all are calm"
    assert list(calm_blocks(replace(level, entered=23), np.zeros(9), floor=0.01)) == []
    assert len(list(calm_blocks(replace(level, entered=22), np.zeros(10 + BLOCK), floor=0.01))) == 2
    assert len(list(calm_blocks(replace(level, entered=22), np.zeros(9 + BLOCK), floor=0.01))) == 1


@pytest.mark.parametrize("outliers", [[3.75, 3.75, 3.75], [8.0, 8.0], [60.0]])
def test_values_at_the_bounds_are_calm(outliers: list[float]) -> None:
    level = RobustWindow(window=(0.0,) * WINDOW, recent=(0.0,) * 9, heights=(0.0,) * 9, spread=1.0, entered=9)
    values = np.zeros(BLOCK - 9)
    values[: len(outliers)] = outliers
    assert len(list(calm_blocks(level, values, floor=0.01))) == 1


def test_a_window_is_read_back_from_a_history_and_those_of_before_blocks_were_kept_too() -> None:
    level = RobustWindow(
        window=(1.0, 2.0), recent=(3.0,), heights=(0.5,), centre=1.5, spread=0.25, slope=-0.125, fresh=1,
        entered=2, spreads=(0.75,), blocks=(1.25, 1.5),
    )  # fmt: skip
    stored = level.to_json()
    assert stored == {
        "window": [1.0, 2.0], "recent": [3.0], "heights": [0.5], "centre": 1.5, "spread": 0.25,
        "slope": -0.125, "fresh": 1, "entered": 2, "spreads": [0.75], "blocks": [1.25, 1.5],
    }  # fmt: skip
    assert window_from_json(stored) == level
    del stored["spreads"], stored["blocks"]
    assert window_from_json(stored) == replace(level, spreads=(), blocks=())
    assert window_from_json(None) == RobustWindow()
