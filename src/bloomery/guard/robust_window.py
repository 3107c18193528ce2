"""A running window of a quantity's past values, and whether a new one is unusually high (robust z-score)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.events.records import Json

WINDOW = 96
"""The number of values from which centre and spread are computed."""
BLOCK = 32
"""The number of new values after which the statistics of a full window are computed again."""
RECENT = 9
"""The number of newest values that are held back from the window, so that those of a spike never enter it."""
LEAST = 3
"""The fewest values with which anything is judged."""
OUTSTANDING = 3.75
"""The robust z-score that most of the newest values must exceed to count as high."""
_FEW = 16  # with fewer values there is no slope, and the window begins with the newest values
_TREND_SHARE = 0.8  # of the slope, with which a trend is expected to go on
_UNCERTAIN = 0.06  # the share of the expected change that widens the spread
_AUTOCORRELATION = 0.25  # how much the spread widens by, per correlation of neighbours above 0.3
_REMEMBERED = 8  # spreads of past blocks, and half of the medians
_NEWEST = 15  # values, whose median a steep fall is not expected to pass
_OF_A_BLOCK = 0.25  # spreads by which the median of a block scatters anyway
_BEYOND_BLOCKS = 2.0  # the weight of the variance between blocks
_TO_SPREAD = 1.4826  # a normal distribution's standard deviation by its median absolute deviation


@dataclass(frozen=True, kw_only=True)
class RobustWindow:
    """The past values of one quantity, and their robust statistics. Never changed in place.

    window: the calm values, oldest first.
    recent: the newest values, which have not entered the window yet.
    heights: the robust z-score of each recent value: (value - expected) / spread.
    centre: the median of the window's newer half.
    spread: a robust spread of the window; 0: there are too few values.
    slope: the change from a value to the next where values fall or clearly rise, else 0.
    fresh: the values that entered the window since centre, spread and slope were computed.
    entered: the values of the present block that have entered the window.
    spreads: the spread of the window at the end of each of the last blocks, oldest first.
    blocks: the median of each of the last blocks, oldest first.
    """

    window: tuple[float, ...] = ()
    recent: tuple[float, ...] = ()
    heights: tuple[float, ...] = ()
    centre: float = 0.0
    spread: float = 0.0
    slope: float = 0.0
    fresh: int = 0
    entered: int = 0
    spreads: tuple[float, ...] = ()
    blocks: tuple[float, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether there is a past to judge by."""
        return self.spread > 0.0

    def expected(self, *, ahead: int = 0) -> tuple[float, float]:
        """Return the expected centre and spread of the next value, or of the value `ahead` values after it.

        A fall or a rise is expected to go on a little less steeply, and widens the spread by a share of
        itself: what climbs steadily is no jump. A steep fall may end at any value, so that nothing below the
        newest values is expected of it.
        """
        if not self.slope:
            return self.centre, self.spread
        falls = self.slope * (len(self.window) / 4 + self.fresh + len(self.recent) + 1 + ahead)
        centre, spread = self.centre + _TREND_SHARE * falls, math.hypot(self.spread, _UNCERTAIN * falls)
        if self.is_falling:
            centre = max(centre, median(self.window[-_NEWEST:]))
        return centre, spread

    @property
    def is_falling(self) -> bool:
        """Whether values fall so fast that the centre must be computed again for each."""
        return -self.slope * WINDOW > self.spread

    @property
    def is_full(self) -> bool:
        """Whether the window is full, so that centre and spread stay for `BLOCK` values."""
        return len(self.window) == WINDOW and len(self.recent) == RECENT

    def to_json(self) -> dict[str, Json]:
        """Return what `window_from_json` reads."""
        return {
            "window": list(self.window),
            "recent": list(self.recent),
            "heights": list(self.heights),
            "centre": self.centre,
            "spread": self.spread,
            "slope": self.slope,
            "fresh": self.fresh,
            "entered": self.entered,
            "spreads": list(self.spreads),
            "blocks": list(self.blocks),
        }


def window_from_json(values: Any) -> RobustWindow:  # Any: written by `to_json`
    """Return the window that a history holds; an empty one where it holds none."""
    if not isinstance(values, dict):
        return RobustWindow()
    # A history of before `spreads` and `blocks` were kept has none.
    names = ("window", "recent", "heights", "spreads", "blocks")
    lists = {name: tuple(values.get(name, ())) for name in names}
    return RobustWindow(**{**values, **lists})


def push(level: RobustWindow, value: float, *, floor: float, widen: float = 1.0) -> tuple[RobustWindow, bool]:
    """Return the window after `value`, and whether a block of a full window was completed.

    The z-score of `value` is the newest of `heights`.

    floor: the least spread, as a share of the centre.
    widen: the factor of the spread after a known change.
    """
    centre, spread = level.expected()
    height = (value - centre) / (spread * widen) if level.is_known else 0.0
    recent, heights = (*level.recent, value), (*level.heights, height)
    if len(recent) <= RECENT:
        level = replace(level, recent=recent, heights=heights)
        return (recomputed(level, floor=floor) if len(level.window) < _FEW else level), False
    window = (*level.window, recent[0])[-WINDOW:]
    block_is_full = level.entered + 1 == BLOCK
    level = replace(
        level,
        window=window,
        recent=recent[1:],
        heights=heights[1:],
        fresh=level.fresh + 1,
        entered=0 if block_is_full else level.entered + 1,
    )
    is_block = block_is_full and len(window) == WINDOW
    if is_block:
        level = replace(level, fresh=0, **_after_block(level, window, floor=floor))
    elif len(window) < WINDOW or level.is_falling:
        level = recomputed(level, floor=floor)
    return level, is_block


def calm_blocks(
    level: RobustWindow, values: NDArray[np.float64], *, floor: float, least: float = 0.0
) -> Iterator[RobustWindow]:
    """Yield the window after each block of values, until one in which a value may be high.

    The values of that block must be pushed one by one. Each window equals the one that `push` comes to; the
    statistics of all blocks' windows are computed at once, which is quicker.

    level: a full one.
    values: the `BLOCK - entered` values that complete its block, and those of whole blocks after it.
    floor: the least spread, as a share of the centre.
    least: the least spread by which z-scores are measured.
    """
    first = BLOCK - level.entered
    if first <= RECENT:
        return
    known = np.array([*level.window, *level.recent, *values.tolist()])
    ends = np.arange(first, len(values) + 1, BLOCK)
    windows = np.lib.stride_tricks.sliding_window_view(known, WINDOW)[ends]  # [blocks, WINDOW]
    medians = _medians(windows[:, -BLOCK:]).tolist()
    owns = _statistics_at_once(windows, floor=floor)
    begin = 0
    for end, window, own, block in zip(ends.tolist(), windows, owns, medians, strict=True):
        heights = _calm_heights(level, values[begin:end], least=least)
        if heights is None:
            return
        spreads, blocks = (*level.spreads, own[1])[-_REMEMBERED:], (*level.blocks, block)[-2 * _REMEMBERED :]
        level = RobustWindow(
            window=tuple(window.tolist()),
            recent=tuple(values[end - RECENT : end].tolist()),
            heights=tuple(heights[-RECENT:].tolist()),
            entered=0,
            fresh=0,
            spreads=spreads,
            blocks=blocks,
            **_with_spread_memory(own, spreads, blocks),
        )
        yield level
        begin = end


def _calm_heights(
    level: RobustWindow, values: NDArray[np.float64], *, least: float
) -> NDArray[np.float64] | None:
    """Return the z-scores of the values of a block; None where one of them may be high."""
    if level.is_falling:
        return None
    falls = level.slope * (len(level.window) / 4 + level.fresh + RECENT + 1 + np.arange(len(values)))
    centre, spread = level.centre + _TREND_SHARE * falls, np.hypot(level.spread, _UNCERTAIN * falls)
    heights: NDArray[np.float64] = (values - centre) / np.maximum(spread, least)
    largest = heights[heights > OUTSTANDING].tolist()
    largest += [height for height in level.heights if height > OUTSTANDING]
    if len(largest) >= 3 or sum(height > 8.0 for height in largest) >= 2 or max(largest, default=0.0) > 60.0:
        return None
    return heights


def _after_block(level: RobustWindow, window: Sequence[float], *, floor: float) -> dict[str, Any]:
    """Return the fields to replace after a block: the statistics of its window, and the remembered ones.

    Any: as `RobustWindow` has them.
    """
    own = window_statistics(window, floor=floor)
    spreads = (*level.spreads, own[1])[-_REMEMBERED:]
    blocks = (*level.blocks, median(window[-BLOCK:]))[-2 * _REMEMBERED :]
    return {"spreads": spreads, "blocks": blocks, **_with_spread_memory(own, spreads, blocks)}


def _with_spread_memory(
    own: tuple[float, float, float], spreads: Sequence[float], blocks: Sequence[float]
) -> dict[str, Any]:
    """Return centre, spread and slope, where a calm stretch does not narrow the spread.

    Correlated noise and data that come in runs look calm for a window, and are not.

    own: centre, spread and slope of the window.
    spreads, blocks: those that the window remembers.
    """
    centre, spread, slope = own
    spread = max(spread, median(spreads)) if spreads else spread
    if len(blocks) >= _REMEMBERED:
        spread = math.sqrt(spread * spread + _BEYOND_BLOCKS * _excess(blocks, spread))
    return {"centre": centre, "spread": spread, "slope": slope}


def _excess(blocks: Sequence[float], spread: float) -> float:
    """Return the variance of the medians of blocks beyond what independent noise gives them.

    It is taken from second differences, which a drift leaves small.
    """
    bends = [
        abs(2.0 * here - before - after)
        for before, here, after in zip(blocks, blocks[1:], blocks[2:], strict=False)
    ]
    own = _TO_SPREAD * median(bends)
    return max(own * own / 6.0 - (_OF_A_BLOCK * spread) ** 2, 0.0)


def recomputed(level: RobustWindow, *, floor: float) -> RobustWindow:
    """Return the window with centre, spread and slope computed again."""
    values = level.window if len(level.window) >= _FEW else (*level.window, *level.recent)
    if len(values) < LEAST:
        return level
    own = window_statistics(values, floor=floor)
    return replace(level, fresh=0, **_with_spread_memory(own, level.spreads, level.blocks))


def window_statistics(values: Sequence[float], *, floor: float) -> tuple[float, float, float]:
    """Return the median of the newer half, a robust spread, and the slope; 0 for a rise that may be noise.

    The spread is about the line through the medians of both halves, so that a steady fall does not count. A
    rise is one when the newer half is more than a spread above the older one. The fewer the values, the
    wider: a spread of few is uncertain, and below `_FEW` values at least one percent.
    """
    count, half = len(values), len(values) // 2
    numbers = np.array(values)
    if count < _FEW:
        centre, slope = median(values), 0.0
        least = max(floor, 0.01) * abs(centre)
        deviations = numbers - centre
    else:
        before, centre = median(values[:half]), median(values[half:])
        slope = (centre - before) / (count - half)
        least = floor * abs(centre)
        middle = count - 1 - 0.5 * (count - half - 1)
        deviations = numbers - (centre + slope * (np.arange(count) - middle))
    spread = max(_TO_SPREAD * median(np.abs(deviations).tolist()), least, 1e-12)
    is_rise = slope * (count - half) > spread
    return (
        centre,
        spread * (1.0 + 4.0 / count) * _autocorrelation_widening(deviations),
        slope if is_rise else min(slope, 0.0),
    )


def _statistics_at_once(windows: NDArray[np.float64], *, floor: float) -> list[tuple[float, float, float]]:
    """Return `window_statistics` of each of some full windows [n, WINDOW], bit for bit."""
    half = WINDOW // 2
    before, centre = _medians(windows[:, :half]), _medians(windows[:, half:])
    slope = (centre - before) / (WINDOW - half)
    middle = WINDOW - 1 - 0.5 * (WINDOW - half - 1)
    deviations = windows - (centre[:, None] + slope[:, None] * (np.arange(WINDOW) - middle))
    spread = _TO_SPREAD * _medians(np.abs(deviations))
    spread = np.maximum(np.maximum(spread, floor * np.abs(centre)), 1e-12)
    agree = np.count_nonzero(deviations[:, 1:] * deviations[:, :-1] > 0.0, axis=1)
    widened = spread * (1.0 + 4.0 / WINDOW) * np.array([_widening(int(count), WINDOW) for count in agree])
    slopes = np.where(slope * (WINDOW - half) > spread, slope, np.minimum(slope, 0.0))
    return list(zip(centre.tolist(), widened.tolist(), slopes.tolist(), strict=True))


def _medians(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `median` of each row of an even number of values."""
    ordered, half = np.sort(rows, axis=1), rows.shape[1] // 2
    middle: NDArray[np.float64] = 0.5 * (ordered[:, half - 1] + ordered[:, half])
    return middle


def _autocorrelation_widening(deviations: NDArray[np.float64]) -> float:
    """Return the factor by which the spread is widened where neighbouring values are correlated.

    Correlated noise stays high for several values by itself. The correlation of neighbours is estimated from
    how often their signs agree, which outliers do not change.
    """
    if len(deviations) < WINDOW // 2:
        return 1.0
    return _widening(int(np.count_nonzero(deviations[1:] * deviations[:-1] > 0.0)), len(deviations))


def _widening(agreements: int, count: int) -> float:
    """Return the factor for `agreements` pairs of neighbours of the same sign among `count` values."""
    correlation = math.sin(math.pi * (agreements / (count - 1) - 0.5))
    return 1.0 + _AUTOCORRELATION * max(correlation - 0.3, 0.0)


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value; for an even number the mean of the middle two."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def is_high(heights: Sequence[float], *, line_steps: int, share: float) -> bool:
    """Return whether the newest values are unusually high, and not only one value of a heavy tail.

    line_steps: the number of steps whose mean each value is; an outstanding mean of several suffices alone.
    share: how far the newest value is above the centre, as a share of the centre.
    """
    if line_steps >= 5 and heights[-1] > 20.0 and share > 0.05:
        return True
    if line_steps >= 5 and len(heights) >= 2 and min(heights[-2:]) > 7.0:
        return True
    if len(heights) >= 3 and min(heights[-3:]) > 8.0:
        return True
    return sum(height > OUTSTANDING for height in heights) >= 6


def is_extreme(height: float, *, share: float) -> bool:
    """Return whether one mean of several steps suffices to say that something has to be undone."""
    return height > 60.0 and share > 0.25
