"""Gives each peer of a round the samples of its inner steps, each sample to one peer."""

from __future__ import annotations

from collections.abc import Mapping

from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.snapshot import ListedMember
from bloomery.data.position import Position, Ranges, SampleShare, lease, merged, total
from bloomery.protocol.records import RoundShares


def lease_samples(
    position: Position,
    members: Mapping[str, ListedMember],
    round: int,
    settings: RoundSettings,
    *,
    kept: Mapping[str, Ranges] | None = None,
) -> RoundShares:
    """Return the shares of a round for these members: samples for inner_steps each, fewer at the run's end.

    kept: for each member, ranges that it has leased and not used yet. They are holes of the position and
        become part of its share. None: there are none.
    """
    kept = {name: merged(pieces) for name, pieces in (kept or {}).items() if pieces}
    samples = {name: members[name].member.samples for name in sorted(members)}
    steps = settings.inner_steps
    samples_left = settings.total_samples - position.consumed
    if samples_left <= 0:
        return RoundShares(round=round, position=position, shares={}, live=0)
    if sum(samples.values()):
        steps = max(1, min(steps, -(-samples_left // sum(samples.values()))))
    leased, position = lease(
        position,
        samples=[max(0, steps * count - total(kept.get(name, ()))) for name, count in samples.items()],
        outstanding=[SampleShare(lease=pieces) for pieces in kept.values()],
    )
    shares = {
        name: merged((*kept.get(name, ()), *(share.lease or ())))
        for name, share in zip(samples, leased, strict=True)
    }
    return RoundShares(round=round, position=position, shares=shares, live=len(shares))


def with_newcomer(shares: RoundShares, peer: str, *, samples: int, settings: RoundSettings) -> RoundShares:
    """Return the shares and one more, for a peer that joins while the round is under way.

    samples: how many the peer uses in one inner step.
    """
    leased, position = lease(
        shares.position,
        samples=[samples * settings.inner_steps],
        outstanding=[SampleShare(lease=pieces) for pieces in shares.shares.values()],
    )
    return RoundShares(
        round=shares.round,
        position=position,
        shares={**shares.shares, peer: leased[0].lease or ()},
        live=shares.live + 1,
    )
