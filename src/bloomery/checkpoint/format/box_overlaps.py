"""Finds which saved boxes of a tensor overlap which wanted ones, in time linear in the overlaps.

With 1,024 ranks a tensor may have thousands of boxes on both sides: comparing each with each takes hours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from bloomery.checkpoint.format.state import Box

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class BoxOverlaps:
    """Finds which of many boxes of a tensor overlap a given one, without a look at every box.

    The boxes are sorted along the dimension in which they begin at the most different places. `_reach[i]` is
    the farthest end of the boxes 0 to i, so that both ends of the range of candidates are found by bisection.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._dim = _dim_of_most_starts(boxes)
        dim = self._dim
        self._boxes = list(boxes) if dim is None else sorted(boxes, key=lambda box: box.offset[dim])
        if dim is not None:
            self._starts = [box.offset[dim] for box in self._boxes]
            self._reach = list(accumulate((box.offset[dim] + box.shape[dim] for box in self._boxes), max))

    def with_box(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the many, what it has in common with `box`), where that is not empty."""
        candidates = self._boxes
        if self._dim is not None:
            start = box.offset[self._dim]
            first = bisect_right(self._reach, start)
            candidates = candidates[first : bisect_left(self._starts, start + box.shape[self._dim])]
        for candidate in candidates:
            common = candidate.intersection(box)
            if common is not None and common.size:
                yield candidate, common


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """Which wanted boxes have elements in common with each saved box.

    saved: the numbers of the saved boxes that overlap any. wanted: the numbers of the wanted boxes of the
    first of them, then of the second, and so on; those of saved[i] end before stops[i]. rows: for each of
    `wanted`, what it has in common with the saved box along the first dimension, as [start, stop).
    """

    saved: list[int]
    wanted: list[int]
    stops: list[int]
    rows: list[tuple[int, int]]


def all_overlaps(saved: Sequence[Box], wanted: Sequence[Box]) -> Overlaps:
    """Return which boxes of one tensor overlap. There is at least one of either."""
    import numpy as np  # here, because looking at checkpoints must not take the time to load it

    dim = _dim_of_most_starts(wanted)
    if dim is None:  # a tensor without dimensions: each box is its one element
        every = list(range(len(wanted)))
        stops = [len(wanted) * (number + 1) for number in range(len(saved))]
        rows = [(0, 1)] * (len(saved) * len(wanted))
        return Overlaps(saved=list(range(len(saved))), wanted=every * len(saved), stops=stops, rows=rows)
    saved_start, saved_stop = _starts_and_stops(saved)
    wanted_start, wanted_stop = (saved_start, saved_stop) if wanted is saved else _starts_and_stops(wanted)
    order = np.argsort(wanted_start[:, dim], kind="stable")
    reach = np.maximum.accumulate(wanted_stop[order, dim])
    first = np.searchsorted(reach, saved_start[:, dim], side="right")
    last = np.searchsorted(wanted_start[order, dim], saved_stop[:, dim], side="left")
    candidates = np.maximum(last - first, 0)
    pair_saved = np.repeat(np.arange(len(saved)), candidates)
    within = np.arange(len(pair_saved)) - np.repeat(np.cumsum(candidates) - candidates, candidates)
    pair_wanted = order[np.repeat(first, candidates) + within]
    start = np.maximum(saved_start[pair_saved], wanted_start[pair_wanted])
    stop = np.minimum(saved_stop[pair_saved], wanted_stop[pair_wanted])
    overlap = (start < stop).all(axis=1)
    numbers, counts = np.unique(pair_saved[overlap], return_counts=True)
    return Overlaps(
        saved=numbers.tolist(),
        wanted=pair_wanted[overlap].tolist(),
        stops=np.cumsum(counts).tolist(),
        rows=list(zip(start[overlap, 0].tolist(), stop[overlap, 0].tolist(), strict=True)),
    )


def _starts_and_stops(boxes: Sequence[Box]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays of shape [boxes, dimensions]."""
    import numpy as np

    starts = np.array([box.offset for box in boxes], dtype=np.int64)
    return starts, starts + np.array([box.shape for box in boxes], dtype=np.int64)


def _dim_of_most_starts(boxes: Sequence[Box]) -> int | None:
    """Return the dimension in which the boxes begin at the most places; None for boxes without dimensions."""
    dims = len(boxes[0].offset) if boxes else 0
    return max(range(dims), key=lambda dim: len({box.offset[dim] for box in boxes}), default=None)
