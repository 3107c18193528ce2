"""Who writes what: each box once, the bytes spread over the ranks that hold it. The same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.checkpoint.state import Json, StateEntry

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(name, offset, shape): a box of a tensor."""


@dataclass(frozen=True, order=True)
class Held:
    """A box that a rank has, and its size in bytes."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int

    @property
    def key(self) -> Key:
        """What replicas of it have in common."""
        return self.name, self.offset, self.shape

    def to_json(self) -> list[Json]:
        """Return it as JSON."""
        return [self.name, list(self.offset), list(self.shape), self.bytes]


def held(entries: Sequence[StateEntry]) -> list[Held]:
    """Return what a rank with these entries has."""
    return [Held(item.name, item.box.offset, item.box.shape, item.nbytes) for item in entries]


def from_json(listed: Sequence[Any]) -> list[Held]:  # Any: JSON
    """Return what `Held.to_json` made of each."""
    return [Held(name, tuple(offset), tuple(shape), size) for name, offset, shape, size in listed]


def key_of(entry: StateEntry) -> Key:
    """Return the key of the box that an entry is."""
    return entry.name, entry.box.offset, entry.box.shape


def assign(ranks: Sequence[Sequence[Held]]) -> list[set[Key]]:
    """Return for each rank the boxes that it is to write, from those that each has.

    What one rank alone has is its own to write. Then the replicated boxes, largest first, go to that holder
    which has least to write so far; the lower rank wins a tie.
    """
    holders: dict[Held, list[int]] = {}
    for rank, boxes in enumerate(ranks):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    assigned: list[set[Key]] = [set() for _ in ranks]
    loads = [0] * len(ranks)
    for box in sorted(holders, key=lambda box: (len(holders[box]) > 1, -box.bytes, box)):
        writer = min(holders[box], key=lambda rank: (loads[rank], rank))
        assigned[writer].add(box.key)
        loads[writer] += box.bytes
    return assigned
