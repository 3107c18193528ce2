"""Reduces long curves to as many points as a screen shows, and keeps each extreme at its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points to draw: `x` ascends, and `y` is NaN where the run has no finite number."""

    x: NDArray[Any]
    y: NDArray[Any]


def decimated(x: NDArray[Any], y: NDArray[Any], *, points: int) -> Curve:
    """Return at most about `points` of the points: the lowest and the highest of each bucket of neighbours.

    Every returned point is one of the given ones, so that a spike of one step keeps its step and its height.
    Infinities are no points, for no scale shows them.
    """
    count = len(y)
    if count <= points:
        return Curve(x=np.array(x), y=np.where(np.isfinite(y), y, np.nan))
    width = -(-count // max(1, points // 2))
    whole = count // width * width
    rows = _extremes(y[:whole].reshape(-1, width))
    if whole < count:
        rows = np.concatenate([rows, whole + _extremes(y[whole:].reshape(1, -1))])
    rows = np.unique(np.concatenate([rows, [0, count - 1]]))
    chosen = y[rows]
    return Curve(x=x[rows], y=np.where(np.isfinite(chosen), chosen, np.nan))


def moving_mean(x: NDArray[Any], y: NDArray[Any], *, window: int, points: int) -> Curve:
    """Return the mean of the last `window` finite values up to each of at most `points` places.

    Before there are as many values, the mean is of those that there are. NaN where there is none.
    """
    count = len(y)
    if not count:
        return Curve(x=np.array(x), y=np.array(y))
    places = np.unique(np.linspace(0, count - 1, min(count, points)).astype(np.int64))
    if len(places) * window < count:  # windows are far apart: most of a long curve need not be touched
        rows = places[:, None] - np.arange(window)
        chosen = y[np.maximum(rows, 0)]
        is_counted = np.isfinite(chosen) & (rows >= 0)
        total = np.where(is_counted, chosen, 0.0).sum(axis=1, dtype=np.float64)
        number = is_counted.sum(axis=1)
    else:
        finite = np.isfinite(y)
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0), dtype=np.float64)])
        numbers = np.concatenate([[0], np.cumsum(finite)])
        before = np.maximum(places + 1 - window, 0)
        total, number = sums[places + 1] - sums[before], numbers[places + 1] - numbers[before]
    means = np.where(number > 0, total / np.maximum(number, 1), np.nan)
    return Curve(x=x[places], y=means)


def rows_between(x: NDArray[Any], begin: float | None, end: float | None) -> slice:
    """Return the rows whose `x` lies in [begin, end], and one more on either side, so that lines go on."""
    first = 0 if begin is None else max(0, int(np.searchsorted(x, begin, "left")) - 1)
    last = len(x) if end is None else min(len(x), int(np.searchsorted(x, end, "right")) + 1)
    return slice(first, max(first, last))


def _extremes(buckets: NDArray[Any]) -> NDArray[Any]:
    """Return the indices into the flattened buckets of the lowest and highest finite value of each."""
    finite = np.isfinite(buckets)
    if finite.all():
        low, high = buckets.argmin(axis=1), buckets.argmax(axis=1)
    else:
        low = np.where(finite, buckets, np.inf).argmin(axis=1)
        high = np.where(finite, buckets, -np.inf).argmax(axis=1)
    begins = np.arange(len(buckets)) * buckets.shape[1]
    return np.unique(np.concatenate([begins + low, begins + high]))
