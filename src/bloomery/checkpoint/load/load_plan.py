"""Plans a load: which rank reads which bytes of the saved files, and which ranks receive them.

Every rank computes the same plan from the index and from the boxes that each rank wants. Each saved byte that
any rank wants is read by one of those ranks, in units small enough to hold in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from bloomery.checkpoint.format.manifest import IndexedBox, without_garbage_collection
from bloomery.checkpoint.format.state import ITEM_BYTES, Box, BoxOverlaps, all_overlaps
from bloomery.checkpoint.load.planned_spans import DistinctBox, PlannedSpans, SpanCollector

UNIT_BYTES = 64 << 20
"""The most bytes that a rank reads at a time, unless one row is larger."""
_DEEP_BYTES = 4 << 20
"""Rows above this size of which only a part is wanted are split along their next dimension."""


@dataclass(frozen=True)
class WantedBox:
    """A box of a tensor that a rank wants to load."""

    name: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where bytes of an item go: to `region` of the tensor, for wanted box number `wanted` of `rank`."""

    rank: int
    wanted: int
    region: Box


@dataclass(frozen=True, kw_only=True)
class ReadItem:
    """A box that is contiguous in its file, and its destinations. saved: the stored box it is part of."""

    saved: IndexedBox
    box: Box
    destinations: tuple[Destination, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The bytes [begin, end) of the file that hold the box."""
        return _span(self.saved, self.box)


@dataclass(frozen=True, kw_only=True)
class ReadUnit:
    """Neighbouring items of one file, in the file's order, which one rank reads at a time.

    round: how many units its reader reads before it.
    """

    reader: int
    file: str
    round: int
    items: tuple[ReadItem, ...]


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Units in the order of files and of their bytes; rounds: the most units that any rank reads."""

    units: tuple[ReadUnit, ...]
    rounds: int


def plan_load(
    saved: Mapping[str, Sequence[IndexedBox]],
    wanted: Sequence[Sequence[WantedBox]],
    *,
    readers: Mapping[str, Sequence[int]] | None = None,
    rank: int | None = None,
) -> LoadPlan:
    """Return which rank reads which bytes of the files, and to which ranks it sends what it read.

    The reader of a unit is, of the ranks that want something of it, the one with the fewest bytes to read so
    far.

    saved: the stored boxes of each tensor, by name. wanted: the boxes that each rank wants.
    readers: for each file, the ranks that can read it, of which one is taken even if it wants nothing of the
        unit; None where every rank can read every file.
    rank: only the units that this rank reads, or receives something of, are in the plan; None for all.
    """
    with without_garbage_collection():
        return _plan_load(saved, wanted, readers, rank)


def _plan_load(
    saved: Mapping[str, Sequence[IndexedBox]],
    wanted: Sequence[Sequence[WantedBox]],
    readers: Mapping[str, Sequence[int]] | None,
    rank: int | None,
) -> LoadPlan:
    import numpy as np  # here, because looking at checkpoints must not take the time to load it

    spans = _spans_of_all(saved, _wanted_by_name(wanted))
    units: list[ReadUnit] = []
    bytes_to_read, units_to_read = np.zeros(len(wanted), np.int64), [0] * len(wanted)
    for first, stop in spans.units(UNIT_BYTES):
        receivers = spans.receivers(first, stop)
        file = spans.saved[spans.source[first]].file
        candidates = receivers
        if readers is not None:
            able = np.unique(np.asarray(readers[file], np.int64))
            common = np.intersect1d(receivers, able, assume_unique=True)
            candidates = common if len(common) else able
        reader = int(candidates[bytes_to_read[candidates].argmin()])
        if rank is None or rank == reader or rank in receivers:
            items = tuple(_item(spans, span) for span in range(first, stop))
            units.append(ReadUnit(reader=reader, file=file, round=units_to_read[reader], items=items))
        bytes_to_read[reader] += int((spans.end[first:stop] - spans.begin[first:stop]).sum())
        units_to_read[reader] += 1
    return LoadPlan(units=tuple(units), rounds=max(units_to_read, default=0))


def _wanted_by_name(wanted: Sequence[Sequence[WantedBox]]) -> dict[str, list[DistinctBox]]:
    """Return the different boxes that are wanted of each tensor."""
    by_name: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for rank, boxes in enumerate(wanted):
        for number, want in enumerate(boxes):
            of_tensor = by_name.get(want.name)
            if of_tensor is None:
                of_tensor = by_name[want.name] = {}
            wanted_by = of_tensor.get(want.box)
            if wanted_by is None:
                of_tensor[want.box] = [(rank, number)]
            else:
                wanted_by.append((rank, number))
    return {name: list(map(DistinctBox._make, of_tensor.items())) for name, of_tensor in by_name.items()}


def _spans_of_all(
    saved: Mapping[str, Sequence[IndexedBox]], wanted_by_name: Mapping[str, list[DistinctBox]]
) -> PlannedSpans:
    """Return what is to be read of the saved boxes of all tensors."""
    found = SpanCollector(unit_bytes=UNIT_BYTES, deep_bytes=_DEEP_BYTES)
    for name, wanted_boxes in wanted_by_name.items():
        stored = saved.get(name, ())
        if not stored:
            continue
        overlaps = all_overlaps([item.box for item in stored], [distinct.box for distinct in wanted_boxes])
        for item, source, wanted in found.add_tensor(stored, wanted_boxes, overlaps):
            numbers_of_boxes = {found.wanted_boxes[number].box: number for number in wanted}
            for box, numbers in _parts_of_box(item, numbers_of_boxes):
                found.add_box(source, box, span=_span(item, box), wanted=numbers)
    return found.spans()


def _parts_of_box(saved: IndexedBox, wanted: Mapping[Box, int]) -> Iterator[tuple[Box, list[int]]]:
    """Yield the boxes to be read of a saved box of which what is wanted is not one run of whole rows.

    wanted: the number of each wanted box; those are yielded that overlap the box to be read.
    """
    whole = saved.box
    parts = [part for box in wanted if (part := box.intersection(whole)) is not None]
    overlaps = BoxOverlaps(list(wanted))
    for box in _contiguous_boxes(whole, parts, (), ITEM_BYTES[saved.dtype]):
        yield box, [wanted[other] for other, _ in overlaps.with_box(box)]


def _item(spans: PlannedSpans, span: int) -> ReadItem:
    box = spans.box_of(span)
    destinations: list[Destination] = []
    for wanted_box in spans.wanted_of(span):
        region = wanted_box.box.intersection(box)
        assert region is not None, "a wanted_box of a span overlaps it"
        destinations += [
            Destination(rank=rank, wanted=number, region=region) for rank, number in wanted_box.wanted_by
        ]
    saved = spans.saved[spans.source[span]]
    return ReadItem(saved=saved, box=box, destinations=tuple(destinations))


def _span(saved: IndexedBox, box: Box) -> tuple[int, int]:
    """Return the bytes [begin, end) of the file that hold a box which is contiguous in the saved one."""
    item_bytes = ITEM_BYTES[saved.dtype]
    offset, stride = 0, 1
    whole = saved.box
    for first, start, size in reversed(list(zip(whole.offset, box.offset, whole.shape, strict=True))):
        offset += (start - first) * stride
        stride *= size
    begin = saved.begin + offset * item_bytes
    return begin, begin + box.size * item_bytes


def _contiguous_boxes(
    saved: Box, parts: Sequence[Box], lead: tuple[int, ...], item_bytes: int
) -> Iterator[Box]:
    """Yield boxes within `saved`, each contiguous in row-major order, that together cover the parts.

    lead: the fixed indices along the first dimensions.
    """
    dim = len(lead)
    if dim == len(saved.shape):
        yield Box(lead, (1,) * dim)
        return
    trailing = saved.shape[dim + 1 :]
    row_bytes = prod(trailing) * item_bytes
    take_apart = row_bytes > _DEEP_BYTES and any(part.shape[dim + 1 :] != trailing for part in parts)
    rows = max(1, UNIT_BYTES // max(1, row_bytes))
    for start, stop in _merged((part.offset[dim], part.offset[dim] + part.shape[dim]) for part in parts):
        if take_apart:
            for index, inside in _parts_by_row(parts, dim, range(start, stop)):
                yield from _contiguous_boxes(saved, inside, (*lead, index), item_bytes)
            continue
        for first in range(start, stop, rows):
            shape = (*(1 for _ in lead), min(rows, stop - first), *trailing)
            yield Box((*lead, first, *saved.offset[dim + 1 :]), shape)


def _parts_by_row(parts: Sequence[Box], dim: int, rows: range) -> Iterator[tuple[int, list[Box]]]:
    """Yield each index of `rows` along `dim`, and the parts that hold it."""
    waiting = deque(sorted(parts, key=lambda part: part.offset[dim]))
    inside: list[Box] = []
    for index in rows:
        while waiting and waiting[0].offset[dim] <= index:
            inside.append(waiting.popleft())
        inside = [part for part in inside if index < part.offset[dim] + part.shape[dim]]
        yield index, inside


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
