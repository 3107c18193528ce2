"""Keeps what a peer did since each fragment of the model was last averaged, as frozen values.

Streaming DiLoCo averages one fragment a round, so a part spans the steps of several rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bloomery.checkpoint.format.state import Json
from bloomery.data.position import Ranges, merged, total
from bloomery.protocol.records import Ready

PAST_PARTS = 5
"""How many of its earlier parts a peer tells the others of."""


@dataclass(frozen=True, kw_only=True)
class FragmentHistory:
    """What this peer did since a fragment of the model was last averaged, and what it brought before.

    steps, samples: of the committed rounds since then, which averaged other fragments.
    parts: (steps, norm) of its last parts of this fragment that were averaged.
    """

    steps: int = 0
    samples: int = 0
    parts: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_json(cls, values: Any) -> FragmentHistory:
        """Read what `to_json` wrote. Raises TypeError or ValueError for other values."""
        steps, samples, parts = values
        brought = tuple((int(part_steps), float(norm)) for part_steps, norm in parts[-PAST_PARTS:])
        return cls(steps=int(steps), samples=int(samples), parts=brought)

    def to_json(self) -> Json:
        """Return what a checkpoint keeps."""
        return [self.steps, self.samples, [list(part) for part in self.parts]]

    def after(self, ready: Ready, *, is_averaged: bool) -> FragmentHistory:
        """Return the history after a round that included this peer's part of it, or of another fragment."""
        if not is_averaged:
            steps, samples = self.steps + ready.steps, self.samples + total(ready.spent)
            return replace(self, steps=steps, samples=samples)
        brought = ((ready.spanned_steps, ready.norm),) if ready.tokens and ready.norm is not None else ()
        return FragmentHistory(parts=(*self.parts, *brought)[-PAST_PARTS:])


def fragment_of_round(round: int, *, count: int) -> int:
    """Return the index of the fragment that round 1, 2, … averages."""
    return (round - 1) % count


def fragments_of(places: Sequence[tuple[str, range]], *, numel: int, count: int) -> tuple[Ranges, ...]:
    """Return the elements of each of `count` fragments of a rank's vector.

    places: (logical name, elements) of each tensor in the vector.
    numel: the vector's length.

    Block b is in fragment b mod count (the strided pattern of Streaming DiLoCo, arXiv 2501.18512: each
    fragment has layers of every depth); the embedding is in the first, the head and the last norm in the
    last. One fragment is the whole vector.
    """
    if count == 1:
        return ((range(numel),),)
    fragments: list[list[range]] = [[] for _ in range(count)]
    for name, elements in places:
        fragments[_fragment(name, count)].append(elements)
    return tuple(merged(pieces) for pieces in fragments)


def _fragment(name: str, count: int) -> int:
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) % count
    return 0 if first in ("embedding", "positions") else count - 1
