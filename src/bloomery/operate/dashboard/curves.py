"""Computes the curves of a run over a range of steps, tokens or time, downsampled to a screen's width.

Each extreme stays at its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.step_columns import RowRange

Axis = Literal["step", "tokens", "samples", "time"]
SMOOTH, DISCARDED = "~", "!"
"""`loss~` asks for the moving mean of the column `loss`, and `loss!` for its discarded branches."""
MOST_POINTS, MOST_NAMES = 4000, 64
_MOST_BRANCHES = 24
_SMOOTHED_SHARE, _MOST_SMOOTHED = 50, 2000


class DrawnCurve(msgspec.Struct):
    """One curve as it is sent: NaNs become null.

    name: what was asked for. incarnation: that of a discarded branch, else None.
    """

    name: str
    x: list[float]
    y: list[float]
    incarnation: int | None = None


def curves(
    reader: RunReader,
    names: Sequence[str],
    *,
    axis: Axis = "step",
    begin: float | None = None,
    end: float | None = None,
    points: int = 1000,
) -> list[DrawnCurve]:
    """Return the curves of those columns that the run has, over [begin, end] of an axis.

    names: columns, with SMOOTH or DISCARDED behind them. Unknown names are left out.
    points: about how many points a curve has at most; one that has fewer is whole.
    """
    drawn: list[DrawnCurve] = []
    with reader.lock:
        columns = reader.columns
        x = _ascending(columns.numbers(axis, columns.kept), axis)
        rows = rows_between(x, begin, end)
        for name in names:
            column = name.rstrip(SMOOTH + DISCARDED)
            if column in columns.sparse:
                sparse_x, sparse_y = columns.sparse_numbers(column, axis)
                curve = _clipped(_ascending(sparse_x, axis), sparse_y, begin, end, points)
                drawn.append(_drawn(name, curve))
            elif column in columns.figures and name.endswith(DISCARDED):
                drawn += _branches(reader, name, column, axis, begin, end, points)
            elif column in columns.figures:
                y = columns.numbers(column, columns.kept)[rows]
                drawn.append(_drawn(name, _line(name, x[rows], y, points)))
    return drawn


def _line(name: str, x: NDArray[Any], y: NDArray[Any], points: int) -> Curve:
    if not name.endswith(SMOOTH):
        return downsampled(x, y, points=points)
    window = max(5, min(_MOST_SMOOTHED, len(y) // _SMOOTHED_SHARE))
    return moving_mean(x, y, window=window, points=points)


def _branches(
    reader: RunReader,
    name: str,
    column: str,
    axis: Axis,
    begin: float | None,
    end: float | None,
    points: int,
) -> list[DrawnCurve]:
    """Return the newest discarded branches that reach into the range, each as a curve of its own."""
    columns = reader.columns
    branches: list[DrawnCurve] = []
    for part in reversed(columns.discarded):
        x = _ascending(columns.numbers(axis, [part]), axis)
        if (begin is not None and x[-1] < begin) or (end is not None and x[0] > end):
            continue
        curve = _clipped(x, columns.numbers(column, [part]), begin, end, max(50, points // 10))
        branches.append(_drawn(name, curve, part))
        if len(branches) == _MOST_BRANCHES:
            break
    return branches


def _clipped(x: NDArray[Any], y: NDArray[Any], begin: float | None, end: float | None, points: int) -> Curve:
    rows = rows_between(x, begin, end)
    return downsampled(x[rows], y[rows], points=points)


def _ascending(x: NDArray[Any], axis: Axis) -> NDArray[Any]:
    """Return an axis that never goes back: clocks are set, and tokens are counted anew with other peers."""
    return x if axis == "step" or not len(x) else np.maximum.accumulate(x)


def _drawn(name: str, curve: Curve, branch: RowRange | None = None) -> DrawnCurve:
    incarnation = None if branch is None else branch.incarnation
    return DrawnCurve(
        name=name, x=np.round(curve.x, 3).tolist(), y=_six_digits(curve.y).tolist(), incarnation=incarnation
    )


def _six_digits(y: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers as a screen needs them: with their float32 noise they would take twice the bytes."""
    y = y.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (5.0 - np.floor(np.log10(np.abs(y))))
        return np.where(np.isfinite(scale), np.round(y * scale) / scale, y)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points to draw: `x` ascends, and `y` is NaN where the run has no finite number."""

    x: NDArray[Any]
    y: NDArray[Any]


def downsampled(x: NDArray[Any], y: NDArray[Any], *, points: int) -> Curve:
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
