"""What one peer may take from the stream: everything when it trains alone, a lease between peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloomery.data.position import Position
from bloomery.data.ranges import Ranges, first, merged, total, without
from bloomery.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Share:
    """`lease`: the ranges this peer may take; None when there is no lease and it may take everything."""

    lease: Ranges | None = None


EVERYTHING = Share()


def lease(
    position: Position, *, samples: Sequence[int], outstanding: Sequence[Share] = ()
) -> tuple[tuple[Share, ...], Position]:
    """Divide what comes next: `samples[i]` samples for the i-th peer, and the position while they are out.

    The samples are holes of the returned position until `Position.after` commits them, so a peer that dies
    leaves holes, which the next leases serve first. `outstanding`: leases that are still running.
    """
    withheld = merged(piece for share in outstanding for piece in share.lease or ())
    ahead = position.next_samples(sum(samples), withheld=withheld)
    position = position.giving_out(ahead)
    shares = []
    for count in samples:
        part = first(ahead, count)
        ahead = without(ahead, part)
        shares.append(Share(lease=part))
    return tuple(shares), position


def next_samples(position: Position, count: int, share: Share) -> Ranges:
    """The next `count` samples this share allows. A lease that runs out is a DataError."""
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
