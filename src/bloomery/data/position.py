"""Where a run stands in its stream of samples: a value, from which resuming and skipping are arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.data.ranges import Ranges, first, from_pairs, merged, to_pairs, total, within, without


@dataclass(frozen=True, kw_only=True)
class Position:
    """What became of every index of the stream so far.

    `consumed` counts the samples that trained the model. `skips` are never to be used. `holes` were given
    out to a peer and are not committed: they are served first. So the indices below `cursor` are exactly
    the consumed ones, the holes, and the skips there; nothing at or above it was ever given out.
    """

    consumed: int = 0
    skips: Ranges = ()
    holes: Ranges = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "skips", merged(self.skips))
        object.__setattr__(self, "holes", merged(self.holes))
        starts = [piece.start for piece in (*self.skips, *self.holes)]
        if self.consumed < 0 or min(starts, default=0) < 0:
            raise ValueError(f"a position below zero: {self}")
        if within(self.skips, self.holes):
            raise ValueError(f"samples both skipped and waiting to be given out again: {self}")
        if self.holes and self.holes[-1].stop > self.cursor:
            raise ValueError(f"a hole at or beyond the cursor {self.cursor}: {self}")

    @property
    def cursor(self) -> int:
        """The smallest index that was never given out and is not skipped."""
        index = self.consumed + total(self.holes)
        for skip in self.skips:
            if skip.start > index:
                break
            index += len(skip)
        return index

    def next_samples(self, count: int, *, withheld: Ranges = ()) -> Ranges:
        """The next `count` samples: holes first, then from the cursor, never a skip.

        `withheld`: holes that are still on lease to somebody and must not be given out twice.
        """
        from_holes = first(without(self.holes, merged(withheld)), count)
        return merged((*from_holes, *self._fresh(count - total(from_holes))))

    def after(self, span: Iterable[range]) -> Position:
        """The position once `span` has trained the model.

        `span` must be something that could have been given out: holes, and what lies next at the cursor.
        """
        taken = self._takeable(span)
        return Position(
            consumed=self.consumed + total(taken), skips=self.skips, holes=without(self.holes, taken)
        )

    def giving_out(self, span: Iterable[range]) -> Position:
        """The position while `span` is on lease: its samples are holes until `after` commits them."""
        return Position(
            consumed=self.consumed, skips=self.skips, holes=merged((*self.holes, *self._takeable(span)))
        )

    def returning(self, span: Iterable[range]) -> Position:
        """The position when `span`, counted as consumed, turns out not to have been committed."""
        pieces = tuple(span)
        back = merged(pieces)
        used = without(without((range(self.cursor),), self.skips), self.holes)
        if total(back) != total(pieces) or without(back, used):
            raise ValueError(f"{pieces} cannot be returned: not all of it was consumed by {self}")
        return Position(
            consumed=self.consumed - total(back), skips=self.skips, holes=merged((*self.holes, *back))
        )

    def skipping(self, samples: range) -> Position:
        """The position from which `samples` will never be given out.

        What already trained the model stays counted as it is; holes inside `samples` become skips.
        """
        wanted = merged((samples,))
        dropped_holes = within(self.holes, wanted)
        ahead = without(wanted, (range(self.cursor),))
        return Position(
            consumed=self.consumed,
            skips=merged((*self.skips, *ahead, *dropped_holes)),
            holes=without(self.holes, dropped_holes),
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data; `from_json` gives an equal position."""
        return {"consumed": self.consumed, "skips": to_pairs(self.skips), "holes": to_pairs(self.holes)}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Position:
        """What `to_json` wrote; ValueError, TypeError or KeyError when it is something else."""
        return Position(
            consumed=int(stored["consumed"]),
            skips=from_pairs(stored["skips"]),
            holes=from_pairs(stored["holes"]),
        )

    def _takeable(self, span: Iterable[range]) -> Ranges:
        pieces = tuple(span)
        taken = merged(pieces)
        fresh = without(taken, self.holes)
        if total(taken) != total(pieces) or fresh != self._fresh(total(fresh)):
            raise ValueError(f"{pieces} is not what comes next at cursor {self.cursor} of {self}")
        return taken

    def _fresh(self, count: int) -> Ranges:
        """The next `count` samples from the cursor on."""
        start, pieces = self.cursor, []
        for skip in self.skips:
            if count <= 0:
                break
            if skip.start >= start:
                pieces.append(range(start, min(skip.start, start + count)))
                count -= len(pieces[-1])
                start = skip.stop
        pieces.append(range(start, start + max(count, 0)))
        return merged(pieces)
