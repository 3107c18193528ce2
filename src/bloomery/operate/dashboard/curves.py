"""The curves of a run for a range of its steps, tokens or time, reduced to what a screen shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from bloomery.operate.dashboard.decimation import Curve, decimated, moving_mean, rows_between
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
                drawn.append(
                    _drawn(name, _clipped(*columns.sparse_numbers(column, axis), begin, end, points))
                )
            elif column in columns.figures and name.endswith(DISCARDED):
                drawn += _branches(reader, name, column, axis, begin, end, points)
            elif column in columns.figures:
                y = columns.numbers(column, columns.kept)[rows]
                drawn.append(_drawn(name, _line(name, x[rows], y, points)))
    return drawn


def _line(name: str, x: NDArray[Any], y: NDArray[Any], points: int) -> Curve:
    if not name.endswith(SMOOTH):
        return decimated(x, y, points=points)
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
    return decimated(x[rows], y[rows], points=points)


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
