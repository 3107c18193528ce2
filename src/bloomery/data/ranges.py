"""Sets of samples as sorted, disjoint, non-empty ranges: the arithmetic under positions, spans and shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Ranges = tuple[range, ...]


def merged(ranges: Iterable[range]) -> Ranges:
    """The same samples, sorted, neighbours joined, empty ranges gone."""
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
    """Number of samples."""
    return sum(piece.stop - piece.start for piece in ranges)


def within(ranges: Ranges, allowed: Ranges) -> Ranges:
    """The samples in both sets (each as `merged` gives it)."""
    return merged(
        range(max(piece.start, other.start), min(piece.stop, other.stop))
        for piece in ranges
        for other in allowed
        if piece.start < other.stop and other.start < piece.stop
    )


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """The samples of the first set (as `merged` gives it) that are not in the second."""
    remaining = list(ranges)
    for hole in removed:
        remaining = [
            part
            for piece in remaining
            for part in (
                range(piece.start, min(piece.stop, hole.start)),
                range(max(piece.start, hole.stop), piece.stop),
            )
            if len(part)
        ]
    return tuple(remaining)


def first(ranges: Ranges, count: int) -> Ranges:
    """The first `count` samples, or all of them when there are fewer."""
    taken: list[range] = []
    for piece in ranges:
        if count <= 0:
            break
        taken.append(range(piece.start, min(piece.stop, piece.start + count)))
        count -= len(taken[-1])
    return tuple(taken)


def to_pairs(ranges: Ranges) -> list[list[int]]:
    """As JSON: `[[start, stop], …]`."""
    return [[piece.start, piece.stop] for piece in ranges]


def from_pairs(pairs: Sequence[Sequence[int]]) -> Ranges:
    """What `to_pairs` wrote. Anything else raises ValueError or TypeError."""
    return tuple(range(int(start), int(stop)) for start, stop in pairs)
