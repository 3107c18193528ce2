"""The byte spans that a load reads and the boxes that they fill, as arrays: there may be a million."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bloomery.checkpoint.format.manifest import BLOCK_BYTES, IndexedBox
from bloomery.checkpoint.format.state import Box, Overlaps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]


class DistinctBox(NamedTuple):
    """A wanted box, once for all who want it: (rank, number of the box among those of the rank)."""

    box: Box
    wanted_by: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class PlannedSpans:
    """Spans of bytes in the order of files and of their bytes. Each lies within one saved box.

    file, begin, end: a number for the file, and bytes [begin, end) of it. source: the number of the saved box
    in `saved`. first_row, stop_row: the rows of the tensor that the span holds, where `box` is negative; else
    the span holds box number `box` of `boxes`. wanted: numbers, in `wanted_boxes`, of those that overlap the
    first span, then the second, and so on; those of span i end before wanted_stops[i].
    """

    saved: Sequence[IndexedBox]
    wanted_boxes: Sequence[DistinctBox]
    boxes: Sequence[Box]
    file: Numbers
    begin: Numbers
    end: Numbers
    source: Numbers
    first_row: Numbers
    stop_row: Numbers
    box: Numbers
    wanted: Numbers
    wanted_stops: Numbers

    def units(self, unit_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the spans [first, stop) of each unit: neighbours of one file.

        Units end at gaps, so that few checksum blocks are read twice. unit_bytes: the largest size of a unit
        of more than one span.
        """
        import numpy as np

        far = (self.file[1:] != self.file[:-1]) | (self.begin[1:] > self.end[:-1] + BLOCK_BYTES)
        runs = [*(np.flatnonzero(far) + 1).tolist(), len(self.file)]
        total = np.cumsum(self.end - self.begin)
        first = 0
        for run_stop in runs:
            while first < run_stop:
                before = total[first - 1] if first else 0
                fitting = int(np.searchsorted(total, before + unit_bytes, side="right"))
                stop = min(run_stop, max(fitting, first + 1))
                yield first, stop
                first = stop

    def receivers(self, first: int, stop: int) -> Numbers:
        """Return the ranks that want something of the spans [first, stop), ascending."""
        import numpy as np

        ranks = {
            rank
            for wanted_box in np.unique(
                self.wanted[self._wanted_from(first) : self.wanted_stops[stop - 1]]
            ).tolist()
            for rank, _ in self.wanted_boxes[wanted_box].wanted_by
        }
        return np.array(sorted(ranks), np.int64)

    def wanted_of(self, span: int) -> list[DistinctBox]:
        """Return the wanted boxes that overlap a span."""
        numbers = self.wanted[self._wanted_from(span) : self.wanted_stops[span]]
        return [self.wanted_boxes[number] for number in numbers.tolist()]

    def box_of(self, span: int) -> Box:
        """Return the box that a span holds."""
        if self.box[span] >= 0:
            return self.boxes[self.box[span]]
        whole, first = self.saved[self.source[span]], int(self.first_row[span])
        rows = int(self.stop_row[span]) - first
        return Box((first, *whole.offset[1:]), (rows, *whole.shape[1:]))

    def _wanted_from(self, span: int) -> int:
        return int(self.wanted_stops[span - 1]) if span else 0


class SpanCollector:
    """Collects the spans of one tensor after the other.

    unit_bytes: the largest span, unless one row is larger. deep_bytes: boxes with rows above this many bytes
    are left to the caller (`add_box`), since perhaps only part of each row is wanted.
    """

    def __init__(self, *, unit_bytes: int, deep_bytes: int) -> None:
        self._unit_bytes, self._deep_bytes = unit_bytes, deep_bytes
        self.saved: list[IndexedBox] = []
        self.wanted_boxes: list[DistinctBox] = []
        self._boxes: list[Box] = []
        self._rows: list[tuple[Numbers, ...]] = []
        self._wanted: list[Numbers] = []

    def add_tensor(
        self, saved: Sequence[IndexedBox], wanted_boxes: Sequence[DistinctBox], overlaps: Overlaps
    ) -> Iterator[tuple[IndexedBox, int, list[int]]]:
        """Add the saved boxes of which one run of whole rows is wanted; yield the others, for `add_box`.

        Yields the box, its number, and the numbers of the wanted boxes that overlap it.
        """
        import numpy as np

        first_saved, first_wanted_box = len(self.saved), len(self.wanted_boxes)
        self.saved += saved
        self.wanted_boxes += wanted_boxes
        if not len(overlaps.saved):
            return
        counts = np.diff(overlaps.stops, prepend=0)
        firsts = overlaps.stops - counts
        first_row = np.minimum.reduceat(overlaps.start, firsts)
        stop_row = np.maximum.reduceat(overlaps.stop, firsts)
        group = np.repeat(np.arange(len(counts)), counts)
        wanted = overlaps.wanted + first_wanted_box
        chosen = [saved[number] for number in overlaps.saved.tolist()]
        begin = np.fromiter((item.begin for item in chosen), np.int64, len(chosen))
        end = np.fromiter((item.end for item in chosen), np.int64, len(chosen))
        if chosen[0].shape:
            offset = np.fromiter((item.offset[0] for item in chosen), np.int64, len(chosen))
            row_bytes = (end - begin) // np.fromiter(
                (item.shape[0] for item in chosen), np.int64, len(chosen)
            )
            begin = begin + (first_row - offset) * row_bytes
            end = begin + (stop_row - first_row) * row_bytes
            is_run = (row_bytes <= self._deep_bytes) & (end - begin <= self._unit_bytes)
            is_run &= ~_has_gap(overlaps.start, overlaps.stop, group, len(counts))
        else:
            is_run = np.zeros(len(chosen), bool)
        source = overlaps.saved[is_run] + first_saved
        none = np.full(len(source), -1)
        self._rows.append(
            (source, begin[is_run], end[is_run], first_row[is_run], stop_row[is_run], none, counts[is_run])
        )
        self._wanted.append(wanted[is_run[group]])
        for other in np.flatnonzero(~is_run).tolist():
            numbers = wanted[firsts[other] : overlaps.stops[other]].tolist()
            yield chosen[other], first_saved + int(overlaps.saved[other]), numbers

    def add_box(self, source: int, box: Box, *, span: tuple[int, int], wanted: Sequence[int]) -> None:
        """Add a span that `add_tensor` left to the caller: a box within a saved box.

        source: the number of the saved box. box: what of its tensor is read.
        span: the first byte in the file, and that behind the last.
        wanted: the numbers of the wanted boxes that want something of it.
        """
        import numpy as np

        row = (source, *span, 0, 0, len(self._boxes), len(wanted))
        self._rows.append(tuple(np.array([value]) for value in row))
        self._wanted.append(np.array(wanted, np.int64))
        self._boxes.append(box)

    def spans(self) -> PlannedSpans:
        """Return all spans, in order."""
        import numpy as np

        columns = zip(*self._rows, strict=True) if self._rows else [[np.zeros(0, np.int64)]] * 7
        source, begin, end, first_row, stop_row, box, counts = map(np.concatenate, columns)
        names = [self.saved[number].file for number in source.tolist()]
        places = {name: place for place, name in enumerate(sorted(set(names)))}
        file = np.fromiter(map(places.__getitem__, names), np.int64, len(names))
        order = np.lexsort((end, begin, file))
        stops = np.cumsum(counts)
        sorted_counts = counts[order]
        sorted_stops = np.cumsum(sorted_counts)
        moved = np.repeat((stops - counts)[order] - (sorted_stops - sorted_counts), sorted_counts)
        wanted = np.concatenate(self._wanted) if self._wanted else np.zeros(0, np.int64)
        return PlannedSpans(
            saved=self.saved,
            wanted_boxes=self.wanted_boxes,
            boxes=self._boxes,
            file=file[order],
            begin=begin[order],
            end=end[order],
            source=source[order],
            first_row=first_row[order],
            stop_row=stop_row[order],
            box=box[order],
            wanted=wanted[moved + np.arange(len(moved))],
            wanted_stops=sorted_stops,
        )


def _has_gap(start: Numbers, stop: Numbers, group: Numbers, groups: int) -> NDArray[np.bool_]:
    """Say of each group of intervals [start, stop) whether together they leave a gap. group: ascending."""
    import numpy as np

    gaps = np.zeros(groups, bool)
    if len(start) > groups:
        order = np.lexsort((start, group))
        line = group * (int(stop.max()) + 1)
        reach = np.maximum.accumulate(stop[order] + line)
        is_gap = (start[order] + line)[1:] > reach[:-1]
        gaps[group[1:][is_gap & (group[1:] == group[:-1])]] = True
    return gaps
