"""Giving out samples: each once, to whoever takes part in a round."""

from __future__ import annotations

from collections.abc import Mapping

from bloomery.data.position import Position
from bloomery.data.ranges import Ranges, merged, total
from bloomery.data.share import Share, lease
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.control.snapshot import Present
from bloomery.elastic.records import Shares


def give_out(
    position: Position,
    members: Mapping[str, Present],
    round: int,
    settings: RoundSettings,
    *,
    kept: Mapping[str, Ranges] | None = None,
) -> Shares:
    """Return the shares of a round for these members: inner_steps each, fewer where the run ends.

    kept: holes of the position that are a member's already, and are part of its share.
    """
    kept = {name: merged(pieces) for name, pieces in (kept or {}).items() if pieces}
    samples = {name: members[name].member.samples for name in sorted(members)}
    steps = settings.inner_steps
    left = settings.total_samples - position.consumed
    if left <= 0:
        return Shares(round=round, position=position, shares={}, live=0)
    if sum(samples.values()):
        steps = max(1, min(steps, -(-left // sum(samples.values()))))
    parts, position = lease(
        position,
        samples=[max(0, steps * count - total(kept.get(name, ()))) for name, count in samples.items()],
        outstanding=[Share(lease=pieces) for pieces in kept.values()],
    )
    shares = {
        name: merged((*kept.get(name, ()), *(part.lease or ())))
        for name, part in zip(samples, parts, strict=True)
    }
    return Shares(round=round, position=position, shares=shares, live=len(shares))


def with_newcomer(shares: Shares, peer: str, *, samples: int, settings: RoundSettings) -> Shares:
    """Return the shares with one for a peer that comes while the round is under way."""
    part, position = lease(
        shares.position,
        samples=[samples * settings.inner_steps],
        outstanding=[Share(lease=pieces) for pieces in shares.shares.values()],
    )
    return Shares(
        round=shares.round,
        position=position,
        shares={**shares.shares, peer: part[0].lease or ()},
        live=shares.live + 1,
    )
