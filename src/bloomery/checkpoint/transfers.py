"""What a load reads and whom it gives it to: from the boxes that were saved and those that each rank wants.

Every rank computes the same plan from the same index and wishes. Each saved byte that anybody wants is read
by one of those who want it, in units small enough to hold in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from bloomery.checkpoint.manifest import BLOCK_BYTES, IndexedBox
from bloomery.checkpoint.state import ITEM_BYTES, Box

UNIT_BYTES = 64 << 20
_DEEP_BYTES = 4 << 20
"""Rows larger than this, wanted in part, are taken apart along their next dimension."""


@dataclass(frozen=True)
class Wish:
    """A box that a rank wants of a tensor."""

    name: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What one rank takes of a slab: `part` of the tensor, for its wish number `wish`."""

    rank: int
    wish: int
    part: Box


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A piece of a saved box that lies in one piece in the file, and who takes what of it."""

    saved: IndexedBox
    box: Box
    portions: tuple[Portion, ...]

    @property
    def span(self) -> tuple[int, int]:
        """Bytes [begin, end) of the file."""
        item = ITEM_BYTES[self.saved.dtype]
        offset, stride = 0, 1
        whole = self.saved.box
        for first, start, size in reversed(
            list(zip(whole.offset, self.box.offset, whole.shape, strict=True))
        ):
            offset += (start - first) * stride
            stride *= size
        begin = self.saved.begin + offset * item
        return begin, begin + self.box.size * item


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Slabs of one file, in its order, that one rank reads at a time."""

    reader: int
    file: str
    slabs: tuple[Slab, ...]


def plan_transfers(
    saved: Mapping[str, Sequence[IndexedBox]],
    wishes: Sequence[Sequence[Wish]],
    *,
    readers: Mapping[str, Sequence[int]] | None = None,
) -> list[Unit]:
    """Return the units in the order of files and places. wishes: those of each rank.

    The reader of a unit is the one with least to read so far of those who want something of it. readers: of
    each file, those who can read it at all, where not everybody can: then one of them, who may want nothing.
    """
    takers: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for rank, wanted in enumerate(wishes):
        for number, wish in enumerate(wanted):
            takers.setdefault(wish.name, {}).setdefault(wish.box, []).append((rank, number))
    files: dict[str, list[Slab]] = {}
    for name, boxes in takers.items():
        for item in saved.get(name, ()):
            files.setdefault(item.file, []).extend(_slabs_of(item, boxes))
    units: list[Unit] = []
    load = [0] * len(wishes)
    for file, slabs in sorted(files.items()):
        for group in _groups(sorted(slabs, key=lambda slab: slab.span)):
            candidates = {portion.rank for slab in group for portion in slab.portions}
            if readers is not None:
                able = set(readers[file])
                candidates = candidates & able or able
            reader = min(candidates, key=lambda rank: (load[rank], rank))
            load[reader] += sum(slab.span[1] - slab.span[0] for slab in group)
            units.append(Unit(reader=reader, file=file, slabs=tuple(group)))
    return units


def _slabs_of(saved: IndexedBox, takers: Mapping[Box, Sequence[tuple[int, int]]]) -> Iterator[Slab]:
    parts = {}
    for box in takers:
        part = saved.box.intersection(box)
        if part is not None and part.size:
            parts[box] = part
    if not parts:
        return
    for slab in _slabs(saved.box, tuple(parts.values()), (), ITEM_BYTES[saved.dtype]):
        portions = []
        for box, part in parts.items():
            common = part.intersection(slab)
            if common is not None:
                portions += [Portion(rank=rank, wish=wish, part=common) for rank, wish in takers[box]]
        yield Slab(saved=saved, box=slab, portions=tuple(portions))


def _slabs(saved: Box, parts: Sequence[Box], lead: tuple[int, ...], item_bytes: int) -> Iterator[Box]:
    """Yield pieces of `saved`, each unbroken in row-major order, that cover the parts.

    lead: the indices along the first dimensions that are settled already.
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
                yield from _slabs(saved, inside, (*lead, index), item_bytes)
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


def _groups(slabs: Sequence[Slab]) -> Iterator[list[Slab]]:
    """Cut a file's slabs into units: neighbours, so that a block is rarely read for two units."""
    group: list[Slab] = []
    bytes_in_group = 0
    for slab in slabs:
        begin, end = slab.span
        far = bool(group) and begin > group[-1].span[1] + BLOCK_BYTES
        if group and (far or bytes_in_group + end - begin > UNIT_BYTES):
            yield group
            group, bytes_in_group = [], 0
        group.append(slab)
        bytes_in_group += end - begin
    if group:
        yield group
