"""Leases samples to the peers that take part in a round, each sample once."""

from __future__ import annotations

from collections.abc import Mapping

from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.snapshot import Present
from bloomery.data.position import Position, Ranges, SampleShare, lease, merged, total
from bloomery.protocol.records import RoundShares


def lease_samples(
    position: Position,
    members: Mapping[str, Present],
    round: int,
    settings: RoundSettings,
    *,
    kept: Mapping[str, Ranges] | None = None,
) -> RoundShares:
    """Return the shares of a round for these members: inner_steps each, fewer where the run ends.

    kept: holes of the position that are a member's already, and are part of its share.
    """
    kept = {name: merged(pieces) for name, pieces in (kept or {}).items() if pieces}
    samples = {name: members[name].member.samples for name in sorted(members)}
    steps = settings.inner_steps
    left = settings.total_samples - position.consumed
    if left <= 0:
        return RoundShares(round=round, position=position, shares={}, live=0)
    if sum(samples.values()):
        steps = max(1, min(steps, -(-left // sum(samples.values()))))
    parts, position = lease(
        position,
        samples=[max(0, steps * count - total(kept.get(name, ()))) for name, count in samples.items()],
        outstanding=[SampleShare(lease=pieces) for pieces in kept.values()],
    )
    shares = {
        name: merged((*kept.get(name, ()), *(part.lease or ())))
        for name, part in zip(samples, parts, strict=True)
    }
    return RoundShares(round=round, position=position, shares=shares, live=len(shares))


def with_newcomer(shares: RoundShares, peer: str, *, samples: int, settings: RoundSettings) -> RoundShares:
    """Return the shares with one for a peer that comes while the round is under way."""
    part, position = lease(
        shares.position,
        samples=[samples * settings.inner_steps],
        outstanding=[SampleShare(lease=pieces) for pieces in shares.shares.values()],
    )
    return RoundShares(
        round=shares.round,
        position=position,
        shares={**shares.shares, peer: part[0].lease or ()},
        live=shares.live + 1,
    )
