"""What the level of a history is said to be, on histories whose level is known."""

import statistics

import numpy as np
import pytest

from bloomery.guard.robust_window import (
    BLOCK,
    WINDOW,
    RobustWindow,
    _statistics_at_once,
    calm_blocks,
    push,
    window_statistics,
)


@pytest.mark.parametrize("count", [16, 64, 130])
@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.25])
def test_values_on_a_line_have_its_slope_and_no_spread(count: int, slope: float) -> None:
    values = [10.0 + slope * step for step in range(count)]
    centre, spread, found = window_statistics(values, floor=0.0)
    newer = values[count // 2 :]
    assert centre == pytest.approx(sum(newer) / len(newer))
    assert found == pytest.approx(slope) and 0.0 <= spread < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_blocks_statistics_at_once_are_the_levels_of_values_pushed_one_by_one(seed: int) -> None:
    """The series wanders and falls slowly, and has some outliers; whole blocks begin at any of its places."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=40 * BLOCK)
    noise[1:] += 0.7 * noise[:-1]
    values = 3.0 - 1e-5 * np.arange(len(noise)) + 0.02 * noise
    values[random.integers(0, len(values), 3)] += 0.5
    level, at = RobustWindow(), 0
    compared = 0
    while at < len(values):
        room = BLOCK - level.entered + (len(values) - at - BLOCK + level.entered) // BLOCK * BLOCK
        calm = (
            list(calm_blocks(level, values[at : at + room], floor=0.01)) if level.is_full and room > 0 else []
        )
        for expected in calm:
            for value in values[at : at + BLOCK - level.entered]:
                level, is_block = push(level, float(value), floor=0.01)
                at += 1
            assert is_block and level == expected
            compared += 1
        if not calm:
            level, _ = push(level, float(values[at]), floor=0.01)
            at += 1
    assert compared > 5


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_windows_statistics_at_once_have_the_bits_of_those_described_alone(scale: float) -> None:
    windows = np.random.default_rng(1).normal(size=(50, WINDOW)).cumsum(axis=1) * scale
    windows[0], windows[1] = np.tile([1.0, 1.0, 1.0, 0.0], WINDOW // 4), -5.0  # some and all at the centre
    assert _statistics_at_once(windows, floor=0.01) == [
        window_statistics(window.tolist(), floor=0.01) for window in windows
    ]


def test_a_stretch_that_is_calmer_than_the_run_does_not_narrow_the_spread() -> None:
    random, level = np.random.default_rng(2), RobustWindow()
    for value in 3.0 + 0.1 * random.normal(size=12 * BLOCK):
        level, _ = push(level, float(value), floor=0.0)
    usual = statistics.median(level.spreads)
    for value in 3.0 + 0.001 * random.normal(size=WINDOW + BLOCK):
        level, _ = push(level, float(value), floor=0.0)
    assert level.spreads[-1] < 0.1 * usual, "the window alone looks calm"
    assert level.spread > 0.5 * usual
