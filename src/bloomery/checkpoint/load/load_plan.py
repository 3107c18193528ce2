"""Plans a load: which rank reads which bytes of the saved files, and which ranks receive them.

Every rank computes the same plan from the index and from the boxes that each rank wants. Each saved byte that
any rank wants is read by one of those ranks, in units small enough to hold in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from bloomery.checkpoint.format.manifest import BLOCK_BYTES, IndexedBox, without_garbage_collection
from bloomery.checkpoint.format.state import ITEM_BYTES, Box, BoxOverlaps, all_overlaps

UNIT_BYTES = 64 << 20
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


class _Taker(NamedTuple):
    """A wanted box, and who wants it: (rank, number of the box among those of the rank)."""

    box: Box
    wanted_by: list[tuple[int, int]]


class _Span(NamedTuple):
    """Bytes [begin, end) of a file, which hold an item, and the wanted boxes that overlap the item.

    box: the item; or the rows [start, stop) of the saved box that it is.
    """

    file: str
    begin: int
    end: int
    saved: IndexedBox
    box: Box | tuple[int, int]
    takers: list[_Taker]


def plan_load(
    saved: Mapping[str, Sequence[IndexedBox]],
    wanted: Sequence[Sequence[WantedBox]],
    *,
    readers: Mapping[str, Sequence[int]] | None = None,
    rank: int | None = None,
) -> LoadPlan:
    """Return the plan, or the part of it that concerns one rank.

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
    spans: list[_Span] = []
    for name, takers in _takers_by_name(wanted).items():
        spans += _spans_of_tensor(saved.get(name, ()), takers)
    spans.sort(key=lambda span: span[:3])
    units: list[ReadUnit] = []
    bytes_to_read, units_to_read = [0] * len(wanted), [0] * len(wanted)
    for group in _groups(spans):
        receivers = {rank for span in group for taker in span.takers for rank, _ in taker.wanted_by}
        candidates = receivers
        if readers is not None:
            able = set(readers[group[0].file])
            candidates = receivers & able or able
        reader = min(candidates, key=lambda candidate: (bytes_to_read[candidate], candidate))
        if rank is None or rank == reader or rank in receivers:
            items = tuple(map(_item, group))
            units.append(
                ReadUnit(reader=reader, file=group[0].file, round=units_to_read[reader], items=items)
            )
        bytes_to_read[reader] += sum(span.end - span.begin for span in group)
        units_to_read[reader] += 1
    return LoadPlan(units=tuple(units), rounds=max(units_to_read, default=0))


def _takers_by_name(wanted: Sequence[Sequence[WantedBox]]) -> dict[str, list[_Taker]]:
    """Return the different boxes that are wanted of each tensor."""
    by_name: dict[str, dict[Box, _Taker]] = {}
    for rank, boxes in enumerate(wanted):
        for number, want in enumerate(boxes):
            of_tensor = by_name.setdefault(want.name, {})
            taker = of_tensor.get(want.box)
            if taker is None:
                of_tensor[want.box] = _Taker(want.box, [(rank, number)])
            else:
                taker.wanted_by.append((rank, number))
    return {name: list(of_tensor.values()) for name, of_tensor in by_name.items()}


def _spans_of_tensor(saved: Sequence[IndexedBox], takers: Sequence[_Taker]) -> Iterator[_Span]:
    """Yield what is to be read of the saved boxes of one tensor."""
    if not saved:
        return
    overlaps = all_overlaps([stored.box for stored in saved], [taker.box for taker in takers])
    first = 0
    for number, stop in zip(overlaps.saved, overlaps.stops, strict=True):
        overlapping = [takers[wanted] for wanted in overlaps.wanted[first:stop]]
        rows = _joined(overlaps.rows[first:stop])
        first = stop
        yield from _spans_of_box(saved[number], overlapping, rows)


def _spans_of_box(saved: IndexedBox, takers: list[_Taker], rows: tuple[int, int] | None) -> Iterator[_Span]:
    """Yield what is to be read of a saved box.

    rows: the rows of the tensor that the takers want of it; None where there are others between them.
    """
    whole = saved.box
    if rows is not None and whole.shape:
        row_bytes = (saved.end - saved.begin) // whole.shape[0]
        start, stop = rows
        if row_bytes <= _DEEP_BYTES and (stop - start) * row_bytes <= UNIT_BYTES:
            begin = saved.begin + (start - whole.offset[0]) * row_bytes
            yield _Span(saved.file, begin, begin + (stop - start) * row_bytes, saved, rows, takers)
            return
    parts = [part for taker in takers if (part := taker.box.intersection(whole)) is not None]
    by_box = {taker.box: taker for taker in takers}
    overlaps = BoxOverlaps(list(by_box))
    for box in _contiguous_boxes(whole, parts, (), ITEM_BYTES[saved.dtype]):
        overlapping = [by_box[wanted] for wanted, _ in overlaps.with_box(box)]
        yield _Span(saved.file, *_span(saved, box), saved, box, overlapping)


def _joined(intervals: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the interval that the given ones make together; None where they leave a gap."""
    if len(intervals) == 1:
        return intervals[0]
    merged = _merged(intervals)
    return merged[0] if len(merged) == 1 else None


def _item(span: _Span) -> ReadItem:
    box = span.box if isinstance(span.box, Box) else _rows_of(span.saved.box, *span.box)
    destinations: list[Destination] = []
    for taker in span.takers:
        region = taker.box.intersection(box)
        assert region is not None, "a taker of a span overlaps it"
        destinations += [
            Destination(rank=rank, wanted=number, region=region) for rank, number in taker.wanted_by
        ]
    return ReadItem(saved=span.saved, box=box, destinations=tuple(destinations))


def _rows_of(whole: Box, start: int, stop: int) -> Box:
    return Box((start, *whole.offset[1:]), (stop - start, *whole.shape[1:]))


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


def _groups(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Group neighbours of one file into units, so that few blocks are read for two units."""
    group: list[_Span] = []
    bytes_in_group = 0
    for span in spans:
        if group:
            last = group[-1]
            far = span.file != last.file or span.begin > last.end + BLOCK_BYTES
            if far or bytes_in_group + span.end - span.begin > UNIT_BYTES:
                yield group
                group, bytes_in_group = [], 0
        group.append(span)
        bytes_in_group += span.end - span.begin
    if group:
        yield group
