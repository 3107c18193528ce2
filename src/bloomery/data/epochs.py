"""Where in the stream each dataset has been seen once: arithmetic on an order."""

from __future__ import annotations

from collections.abc import Iterable

from bloomery.data.megatron import MegatronOrder
from bloomery.data.order import Order

EpochEnds = tuple[tuple[int, int], ...]
"""(dataset, stream index from which on its first epoch is over), by index."""


def epoch_ends(order: Order | MegatronOrder, *, below: int) -> EpochEnds:
    """The ends of first epochs at stream indices up to `below`; a dataset that goes on longer has none.

    In Megatron's order samples of all epochs are shuffled together: there an epoch ends once a dataset gave
    as many samples as one epoch holds.
    """
    if isinstance(order, MegatronOrder):
        sizes = [(row.epoch_tokens - 1) // row.sequence_length for row in order.rows]
    else:
        sizes = list(order.windows)
    found = []
    for dataset, size in enumerate(sizes):
        last = order.sample_of_turn(dataset, size - 1, below=below) if size else None
        if last is not None:
            found.append((dataset, last + 1))
    return tuple(sorted(found, key=lambda end: end[1]))


def ends_passed(ends: EpochEnds, *, after: int, up_to: int) -> EpochEnds:
    """Those that a run passes which moves its cursor from `after` to `up_to`."""
    return tuple(end for end in ends if after < end[1] <= up_to)


def last_before_ends(cursors: Iterable[int], ends: Iterable[int]) -> set[int]:
    """Of the cursors of some checkpoints: for each end that a later one has passed, the last before it."""
    ordered, chosen = sorted(set(cursors)), set()
    for end in ends:
        before = [cursor for cursor in ordered if cursor < end]
        if before and ordered[-1] >= end:
            chosen.add(before[-1])
    return chosen
