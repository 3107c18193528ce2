"""The position of a run in its sample stream, and the leases by which peers take samples from it.

A position is a value; resuming, skipping and going back are arithmetic on it. A set of samples is a tuple of
ranges that are sorted, disjoint and not empty.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.errors import DataError

RULE_KEY = "the rule of the mixture"
"""The key in a stream's identity of the rule by which datasets' quotas are rounded (`mixture.RULE`)."""

Ranges = tuple[range, ...]


def merged(ranges: Iterable[range]) -> Ranges:
    """Return the same samples in sorted ranges, with neighbours joined and without empty ranges."""
    joined: list[range] = []
    for piece in sorted((piece for piece in ranges if len(piece)), key=lambda piece: piece.start):
        if piece.step != 1:
            raise ValueError(f"{piece} has gaps; samples are counted in steps of one")
        if joined and piece.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, piece.stop))
        else:
            joined.append(piece)
    return tuple(joined)


def total(ranges: Iterable[range]) -> int:
    """Return the number of samples."""
    return sum(piece.stop - piece.start for piece in ranges)


def within(ranges: Ranges, allowed: Ranges) -> Ranges:
    """Return the samples that are in both sets; each set must be as `merged` returns it."""
    return merged(
        range(max(piece.start, other.start), min(piece.stop, other.stop))
        for piece in ranges
        for other in _meeting(piece, allowed)
    )


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """Return the samples of the first set that are not in the second; each set must be as `merged` returns
    it.
    """
    holes, remaining = merged(removed), list[range]()
    for piece in ranges:
        start = piece.start
        for hole in _meeting(piece, holes):
            remaining.append(range(start, max(start, hole.start)))
            start = hole.stop
        remaining.append(range(start, max(start, piece.stop)))
    return tuple(piece for piece in remaining if piece.stop > piece.start)


def _meeting(piece: range, others: Ranges) -> Ranges:
    """Return those of `others` that share samples with `piece`; `others` must be as `merged` returns it.

    It bisects, because another machine may send two sets of 65,536 ranges, and comparing each with each would
    take far too long.
    """
    low = bisect_right(others, piece.start, key=lambda other: other.stop)
    return others[low : bisect_left(others, piece.stop, lo=low, key=lambda other: other.start)]


def first(ranges: Ranges, count: int) -> Ranges:
    """Return the first `count` samples, or all of them if there are fewer."""
    taken: list[range] = []
    for piece in ranges:
        if count <= 0:
            break
        taken.append(range(piece.start, min(piece.stop, piece.start + count)))
        count -= len(taken[-1])
    return tuple(taken)


def fewer(ranges: Ranges, at_most: int) -> Ranges:
    """Return at most `count` ranges that hold all samples of `ranges`, and those of the smallest gaps.

    ranges: as `merged` returns them.
    """
    surplus = len(ranges) - at_most
    if surplus <= 0:
        return ranges
    gaps = sorted(range(1, len(ranges)), key=lambda place: ranges[place].start - ranges[place - 1].stop)
    bridges = [range(ranges[place - 1].stop, ranges[place].start) for place in gaps[:surplus]]
    return merged((*ranges, *bridges))


def to_pairs(ranges: Ranges) -> list[list[int]]:
    """Return the ranges as JSON: `[[start, stop], …]`."""
    return [[piece.start, piece.stop] for piece in ranges]


def from_pairs(pairs: Sequence[Sequence[int]]) -> Ranges:
    """Return the ranges that `to_pairs` wrote. Raises ValueError or TypeError for anything else."""
    return tuple(range(int(start), int(stop)) for start, stop in pairs)


@dataclass(frozen=True, kw_only=True)
class Position:
    """What became of each index of the stream so far.

    consumed: number of samples that trained the model.
    skips: samples that are never to be used.
    holes: samples that were leased to a peer and are not committed; they are served first.

    The indices below `cursor` are exactly the consumed samples, the holes and the skips there. No index at or
    above `cursor` was ever leased.
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
        """The smallest index that was never leased and is not skipped."""
        index = self.consumed + total(self.holes)
        for skip in self.skips:
            if skip.start > index:
                break
            index += len(skip)
        return index

    def next_samples(self, count: int, *, withheld: Ranges = ()) -> Ranges:
        """Return the next `count` samples: holes first, then indices from the cursor on, without skips.

        withheld: holes that somebody holds a lease on, so they must not be given out twice.
        """
        from_holes = first(without(self.holes, merged(withheld)), count)
        return merged((*from_holes, *self._fresh(count - total(from_holes))))

    def after(self, span: Iterable[range]) -> Position:
        """Return the position once `span` has trained the model.

        span: samples that could have been leased: holes, and what comes next at the cursor.
        """
        taken = self._takeable(span)
        return Position(
            consumed=self.consumed + total(taken), skips=self.skips, holes=without(self.holes, taken)
        )

    def giving_out(self, span: Iterable[range]) -> Position:
        """Return the position while `span` is leased: its samples are holes until `after` commits them."""
        return Position(
            consumed=self.consumed, skips=self.skips, holes=merged((*self.holes, *self._takeable(span)))
        )

    def returning(self, span: Iterable[range]) -> Position:
        """Return the position after `span`, which was counted as consumed, turned out not to be committed."""
        pieces = tuple(span)
        back = merged(pieces)
        used = without(without((range(self.cursor),), self.skips), self.holes)
        if total(back) != total(pieces) or without(back, used):
            raise ValueError(f"{pieces} cannot be returned: not all of it was consumed by {self}")
        return Position(
            consumed=self.consumed - total(back), skips=self.skips, holes=merged((*self.holes, *back))
        )

    def skipping(self, *samples: range) -> Position:
        """Return the position from which these samples will never be given out.

        Samples that trained the model already stay counted; holes inside `samples` become skips.
        """
        wanted = merged(samples)
        dropped_holes = within(self.holes, wanted)
        ahead = without(wanted, (range(self.cursor),))
        return Position(
            consumed=self.consumed,
            skips=merged((*self.skips, *ahead, *dropped_holes)),
            holes=without(self.holes, dropped_holes),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the position as plain data, from which `from_json` makes an equal position."""
        return {"consumed": self.consumed, "skips": to_pairs(self.skips), "holes": to_pairs(self.holes)}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Position:
        """Return the position that `to_json` wrote. Raises ValueError, TypeError or KeyError for anything
        else.
        """
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
        """Return the next `count` samples from the cursor on."""
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


@dataclass(frozen=True, kw_only=True)
class SampleShare:
    """The part of the stream from which one peer may take samples.

    lease: the ranges that this peer may take; None if it may take everything, without a lease.
    """

    lease: Ranges | None = None


EVERYTHING = SampleShare()


def lease(
    position: Position, *, samples: Sequence[int], outstanding: Sequence[SampleShare] = ()
) -> tuple[tuple[SampleShare, ...], Position]:
    """Divide the next samples among peers, and return their leases and the position while these are out.

    samples: number of samples for each peer.
    outstanding: leases that have not ended.

    The leased samples are holes of the returned position until `Position.after` commits them. So a peer that
    dies leaves holes, which the next leases serve first.
    """
    withheld = merged(piece for share in outstanding for piece in share.lease or ())
    ahead = position.next_samples(sum(samples), withheld=withheld)
    position = position.giving_out(ahead)
    shares = []
    for count in samples:
        part = first(ahead, count)
        ahead = without(ahead, part)
        shares.append(SampleShare(lease=part))
    return tuple(shares), position


def next_samples(position: Position, count: int, share: SampleShare) -> Ranges:
    """Return the next `count` samples that this share allows. Raises DataError when a lease runs out."""
    if share.lease is None:
        return position.next_samples(count)
    unused = without(merged(share.lease), without(merged(share.lease), position.holes))
    taken = first(unused, count)
    if total(taken) < count:
        raise DataError(
            f"The lease of this peer has {total(taken)} samples left, and the batch takes {count}.",
            remedy="Lease a whole number of global batches for each round.",
        )
    return taken
