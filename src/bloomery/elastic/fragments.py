"""Streaming: which parts of the model are averaged together, and in which round."""

from __future__ import annotations

from collections.abc import Sequence

from bloomery.data.ranges import Ranges, merged


def fragments_of(places: Sequence[tuple[str, range]], *, numel: int, count: int) -> tuple[Ranges, ...]:
    """The elements of each of `count` fragments of a vector of `numel`, with `places` (name, elements).

    Block b is in fragment b mod count (the strided pattern of Streaming DiLoCo, arXiv 2501.18512: each
    fragment has layers of every depth); the embedding is in the first, the head and the last norm in the
    last. With one fragment it is everything, what lies between the places included.
    """
    if count == 1:
        return ((range(numel),),)
    found: list[list[range]] = [[] for _ in range(count)]
    for name, place in places:
        found[_fragment(name, count)].append(place)
    return tuple(merged(pieces) for pieces in found)


def fragment_of_round(round: int, *, count: int) -> int:
    """Which fragment round 1, 2, … averages."""
    return (round - 1) % count


def _fragment(name: str, count: int) -> int:
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) % count
    return 0 if first in ("embedding", "positions") else count - 1
