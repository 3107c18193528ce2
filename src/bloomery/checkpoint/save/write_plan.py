"""Plans a save: which rank writes which box, in which file and at which offset of the shared buffer.

Each box is written once. Where several ranks hold a box, the bytes are spread evenly over them. Every rank
computes the same plan, once, and uses it as long as the layout of the state stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from bloomery.checkpoint.format.data_file import PAGE_BYTES, lay_out, split_entries
from bloomery.checkpoint.format.state import Json, StateEntry
from bloomery.checkpoint.writer.ranks import Ranks

BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(name, offset, shape) of a box of a tensor: equal for all replicas of the box."""


@dataclass(frozen=True, order=True)
class HeldBox:
    """A box of a tensor that a rank holds, and its size in bytes."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int

    @property
    def key(self) -> BoxKey:
        """The key that all replicas of the box share."""
        return self.name, self.offset, self.shape

    def to_json(self) -> list[Json]:
        """Return the box as JSON."""
        return [self.name, list(self.offset), list(self.shape), self.bytes]


def held_boxes(entries: Sequence[StateEntry]) -> list[HeldBox]:
    """Return the boxes that a rank with these entries holds."""
    return [HeldBox(item.name, item.box.offset, item.box.shape, item.nbytes) for item in entries]


def held_boxes_from_json(listed: Sequence[Any]) -> list[HeldBox]:  # Any: JSON
    """Return the boxes that `HeldBox.to_json` turned into JSON."""
    return [HeldBox(name, tuple(offset), tuple(shape), size) for name, offset, shape, size in listed]


def box_key(entry: StateEntry) -> BoxKey:
    """Return the key of an entry's box."""
    return entry.name, entry.box.offset, entry.box.shape


def assign_writers(ranks: Sequence[Sequence[HeldBox]]) -> list[set[BoxKey]]:
    """Return for each rank the boxes that it writes. ranks: the boxes that each rank holds.

    A box that only one rank holds is written by that rank. Then each replicated box, the largest first, goes
    to the holder that has the fewest bytes to write so far; on a tie, to the lower rank.
    """
    holders: dict[HeldBox, list[int]] = {}
    for rank, boxes in enumerate(ranks):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    assigned: list[set[BoxKey]] = [set() for _ in ranks]
    loads = [0] * len(ranks)
    for box in sorted(holders, key=lambda box: (len(holders[box]) > 1, -box.bytes, box)):
        writer = min(holders[box], key=lambda rank: (loads[rank], rank))
        assigned[writer].add(box.key)
        loads[writer] += box.bytes
    return assigned


StateLayout = list[tuple[object, ...]]
"""Name, type, shapes and scope of each entry of a state: everything but the values."""


@dataclass(frozen=True, kw_only=True)
class WriteItem:
    """A box that goes into a file. entry: index among the state's entries. rows: None for all rows of it."""

    entry: int
    rows: slice | None

    def tensor_in(self, entries: Sequence[StateEntry]) -> Any:  # Any: a torch.Tensor
        """Return the item's tensor: a view of the entry's."""
        tensor = entries[self.entry].tensor
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A data file: its header, its items in order, and its `offset` in the shared buffer (page-aligned)."""

    name: str
    header: bytes
    bytes: int
    offset: int
    items: tuple[WriteItem, ...]


@dataclass(frozen=True, kw_only=True)
class RankWritePlan:
    """What this rank writes.

    bytes: what it takes in a shared buffer. file_bytes: the sum of its files' sizes.
    boxes: the files' boxes, as JSON text. box_count: how many.
    """

    files: tuple[FilePlan, ...]
    bytes: int
    file_bytes: int
    boxes: str
    box_count: int


class WritePlanner:
    """Agrees with all ranks on who writes what, and keeps the plan until the layout of the state changes.

    file_bytes: the largest size of a data file; larger boxes are split.
    """

    def __init__(self, ranks: Ranks, *, file_bytes: int) -> None:
        self._ranks, self._piece_bytes = ranks, file_bytes
        self._layout: StateLayout = []
        self._digest = ""
        self._digests: list[str] = []
        self._mine: set[BoxKey] | None = None
        self._plan: RankWritePlan | None = None
        self.file_bytes: list[int] = []
        """Bytes of all files of each rank, by rank, in the plan that was agreed on last."""
        self.buffer_bytes: list[int] = []
        """Bytes that they take in each rank's shared buffer, by rank."""

    def digest(self, entries: Sequence[StateEntry]) -> str:
        """Return a hash of the state's layout, which the caller gathers for `agree`. Not collective."""
        layout: StateLayout = [
            (e.name, e.dtype, e.global_shape, e.box.offset, e.box.shape, e.scope) for e in entries
        ]
        if layout != self._layout or not self._digest:
            self._layout = layout
            self._digest = xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())
        return self._digest

    def agree(self, entries: Sequence[StateEntry], digests: list[str]) -> RankWritePlan:
        """Return this rank's plan. Collective where the layout of some rank has changed.

        digests: of every rank's entries, in the order of the ranks.
        """
        if digests != self._digests or self._plan is None:
            self._mine = None
            if self._ranks.world > 1:
                own_boxes = [box.to_json() for box in held_boxes(list(self._split(entries)))]
                boxes_by_rank = [held_boxes_from_json(boxes) for boxes in self._ranks.gather(own_boxes)]
                self._mine = assign_writers(boxes_by_rank)[self._ranks.rank]
            self._plan = self._planned(entries)
            sizes = self._ranks.gather([self._plan.file_bytes, self._plan.bytes])
            self.file_bytes, self.buffer_bytes = ([size[n] for size in sizes] for n in (0, 1))
            self._digests = digests
        return self._plan

    def entries_to_write(self, entries: Sequence[StateEntry]) -> list[StateEntry]:
        """Return the entries that this rank writes, of those it holds. After `agree`; not collective."""
        mine = self._mine
        return [piece for piece in self._split(entries) if mine is None or box_key(piece) in mine]

    def _split(self, entries: Sequence[StateEntry]) -> Iterator[StateEntry]:
        return split_entries(entries, piece_bytes=self._piece_bytes)

    def _planned(self, entries: Sequence[StateEntry]) -> RankWritePlan:
        placed = {box_key(box): item for box, item in self._write_items(entries)}
        files, boxes, position = [], [], 0
        rank, world = self._ranks.rank, self._ranks.world
        laid_out = lay_out(
            self.entries_to_write(entries), rank=rank, world=world, file_bytes=self._piece_bytes
        )
        for file in laid_out:
            items = tuple(placed[box_key(entry)] for entry in file.entries)
            files.append(
                FilePlan(name=file.name, header=file.header, bytes=file.bytes, offset=position, items=items)
            )
            boxes += msgspec.to_builtins(file.boxes)
            position += file.bytes + -file.bytes % PAGE_BYTES
        return RankWritePlan(
            files=tuple(files),
            bytes=position,
            file_bytes=sum(file.bytes for file in files),
            boxes=json.dumps(boxes),
            box_count=len(boxes),
        )

    def _write_items(self, entries: Sequence[StateEntry]) -> Iterator[tuple[StateEntry, WriteItem]]:
        for number, entry in enumerate(entries):
            for piece in self._split([entry]):
                rows = None
                if piece.box.shape != entry.box.shape:
                    first = piece.box.offset[0] - entry.box.offset[0]
                    rows = slice(first, first + piece.box.shape[0])
                yield piece, WriteItem(entry=number, rows=rows)
