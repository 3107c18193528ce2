"""Plans a load: which rank reads which bytes of the saved files, and which ranks receive them.

Every rank computes the same plan from the index and from the boxes that each rank wants. Each saved byte that
any rank wants is read by one of those ranks, in units small enough to hold in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from bloomery.checkpoint.format.manifest import BLOCK_BYTES, IndexedBox
from bloomery.checkpoint.format.state import ITEM_BYTES, Box

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
        item_bytes = ITEM_BYTES[self.saved.dtype]
        offset, stride = 0, 1
        whole = self.saved.box
        for first, start, size in reversed(
            list(zip(whole.offset, self.box.offset, whole.shape, strict=True))
        ):
            offset += (start - first) * stride
            stride *= size
        begin = self.saved.begin + offset * item_bytes
        return begin, begin + self.box.size * item_bytes


@dataclass(frozen=True, kw_only=True)
class ReadUnit:
    """Neighbouring items of one file, in the file's order, which one rank reads at a time."""

    reader: int
    file: str
    items: tuple[ReadItem, ...]


def plan_load(
    saved: Mapping[str, Sequence[IndexedBox]],
    wanted: Sequence[Sequence[WantedBox]],
    *,
    readers: Mapping[str, Sequence[int]] | None = None,
) -> list[ReadUnit]:
    """Return the units, in the order of files and of their bytes.

    The reader of a unit is, of the ranks that want something of it, the one with the fewest bytes to read so
    far.

    saved: the stored boxes of each tensor, by name. wanted: the boxes that each rank wants.
    readers: for each file, the ranks that can read it, of which one is taken even if it wants nothing of the
        unit; None where every rank can read every file.
    """
    takers: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for rank, boxes in enumerate(wanted):
        for number, want in enumerate(boxes):
            takers.setdefault(want.name, {}).setdefault(want.box, []).append((rank, number))
    files: dict[str, list[ReadItem]] = {}
    for name, takers_by_box in takers.items():
        for stored in saved.get(name, ()):
            files.setdefault(stored.file, []).extend(_read_items(stored, takers_by_box))
    units: list[ReadUnit] = []
    load = [0] * len(wanted)
    for file, items in sorted(files.items()):
        for group in _groups(sorted(items, key=lambda item: item.span)):
            candidates = {destination.rank for item in group for destination in item.destinations}
            if readers is not None:
                able = set(readers[file])
                candidates = candidates & able or able
            reader = min(candidates, key=lambda rank: (load[rank], rank))
            load[reader] += sum(item.span[1] - item.span[0] for item in group)
            units.append(ReadUnit(reader=reader, file=file, items=tuple(group)))
    return units


def _read_items(saved: IndexedBox, takers: Mapping[Box, Sequence[tuple[int, int]]]) -> Iterator[ReadItem]:
    parts = {}
    for box in takers:
        part = saved.box.intersection(box)
        if part is not None and part.size:
            parts[box] = part
    if not parts:
        return
    for box in _contiguous_boxes(saved.box, tuple(parts.values()), (), ITEM_BYTES[saved.dtype]):
        destinations = []
        for wanted_box, part in parts.items():
            common = part.intersection(box)
            if common is not None:
                destinations += [
                    Destination(rank=rank, wanted=number, region=common)
                    for rank, number in takers[wanted_box]
                ]
        yield ReadItem(saved=saved, box=box, destinations=tuple(destinations))


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
            for index in range(start, stop):
                inside = [p for p in parts if p.offset[dim] <= index < p.offset[dim] + p.shape[dim]]
                yield from _contiguous_boxes(saved, inside, (*lead, index), item_bytes)
            continue
        for first in range(start, stop, rows):
            shape = (*(1 for _ in lead), min(rows, stop - first), *trailing)
            yield Box((*lead, first, *saved.offset[dim + 1 :]), shape)


def _merged(intervals: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _groups(items: Sequence[ReadItem]) -> Iterator[list[ReadItem]]:
    """Group a file's items into units of neighbours, so that few blocks are read for two units."""
    group: list[ReadItem] = []
    bytes_in_group = 0
    for item in items:
        begin, end = item.span
        far = bool(group) and begin > group[-1].span[1] + BLOCK_BYTES
        if group and (far or bytes_in_group + end - begin > UNIT_BYTES):
            yield group
            group, bytes_in_group = [], 0
        group.append(item)
        bytes_in_group += end - begin
    if group:
        yield group
