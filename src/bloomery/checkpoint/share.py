"""What one rank writes of a state, and where: laid out once, and used while the state keeps its form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from bloomery.checkpoint.assignment import Key, assign, from_json, held, key_of
from bloomery.checkpoint.datafile import in_pieces, lay_out
from bloomery.checkpoint.imagefile import PAGE_BYTES
from bloomery.checkpoint.ranks import Ranks
from bloomery.checkpoint.state import StateEntry

Form = list[tuple[object, ...]]
"""Everything about a state but the bytes."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box that goes into a file: of which entry of the state, and which of its rows; None for all."""

    entry: int
    rows: slice | None

    def tensor_in(self, entries: Sequence[StateEntry]) -> Any:  # Any: a torch.Tensor
        """Return the tensor: a view of the entry's."""
        tensor = entries[self.entry].tensor
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A data file that will lie at `offset` of an arena, a multiple of a page."""

    name: str
    header: bytes
    bytes: int
    offset: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What this rank writes. bytes: of an arena; file_bytes: of all its files; boxes: theirs, as JSON."""

    files: tuple[FilePlan, ...]
    bytes: int
    file_bytes: int
    boxes: str
    box_count: int


class Shares:
    """Agrees on who writes what. Remembers it: a layout stays what it is for a whole run."""

    def __init__(self, ranks: Ranks, *, file_bytes: int) -> None:
        self._ranks, self._piece_bytes = ranks, file_bytes
        self._form: Form = []
        self._digest = ""
        self._digests: list[str] = []
        self._mine: set[Key] | None = None
        self._share: Share | None = None
        self.file_bytes: list[int] = []
        """Bytes of all files, by rank; of the share that was agreed on last."""
        self.arena_bytes: list[int] = []
        """The same of what they take in an arena."""

    def digest(self, entries: Sequence[StateEntry]) -> str:
        """Return what tells whether a state has the form of another. For `agree`, gathered. Local."""
        form: Form = [(e.name, e.dtype, e.global_shape, e.box.offset, e.box.shape, e.scope) for e in entries]
        if form != self._form or not self._digest:
            self._form = form
            self._digest = xxhash.xxh3_128_hexdigest(json.dumps(form).encode())
        return self._digest

    def agree(self, entries: Sequence[StateEntry], digests: list[str]) -> Share:
        """Return this rank's share. digests: of every rank's entries. Collective where a form has changed."""
        if digests != self._digests or self._share is None:
            self._mine = None
            if self._ranks.world > 1:
                listed = [item.to_json() for item in held(list(self._cut(entries)))]
                everyones = self._ranks.gather(listed)
                self._mine = assign([from_json(boxes) for boxes in everyones])[self._ranks.rank]
            self._share = self._planned(entries)
            sizes = self._ranks.gather([self._share.file_bytes, self._share.bytes])
            self.file_bytes, self.arena_bytes = ([one[n] for one in sizes] for n in (0, 1))
            self._digests = digests
        return self._share

    def pieces(self, entries: Sequence[StateEntry]) -> list[StateEntry]:
        """Return the boxes that this rank is to write, of those it holds; after `agree`. Local."""
        mine = self._mine
        return [piece for piece in self._cut(entries) if mine is None or key_of(piece) in mine]

    def _cut(self, entries: Sequence[StateEntry]) -> Iterator[StateEntry]:
        return in_pieces(entries, piece_bytes=self._piece_bytes)

    def _planned(self, entries: Sequence[StateEntry]) -> Share:
        places = {key_of(piece): place for piece, place in self._placed(entries)}
        files, boxes, position = [], [], 0
        rank, world = self._ranks.rank, self._ranks.world
        laid_out = lay_out(self.pieces(entries), rank=rank, world=world, file_bytes=self._piece_bytes)
        for file in laid_out:
            pieces = tuple(places[key_of(entry)] for entry in file.entries)
            files.append(
                FilePlan(name=file.name, header=file.header, bytes=file.bytes, offset=position, pieces=pieces)
            )
            boxes += [asdict(box) for box in file.boxes]
            position += file.bytes + -file.bytes % PAGE_BYTES
        return Share(
            files=tuple(files),
            bytes=position,
            file_bytes=sum(file.bytes for file in files),
            boxes=json.dumps(boxes),
            box_count=len(boxes),
        )

    def _placed(self, entries: Sequence[StateEntry]) -> Iterator[tuple[StateEntry, Piece]]:
        for number, entry in enumerate(entries):
            for piece in self._cut([entry]):
                rows = None
                if piece.box.shape != entry.box.shape:
                    first = piece.box.offset[0] - entry.box.offset[0]
                    rows = slice(first, first + piece.box.shape[0])
                yield piece, Piece(entry=number, rows=rows)
