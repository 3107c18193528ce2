"""Giving out samples: each once, to whoever takes part in a round."""

from __future__ import annotations

from collections.abc import Mapping

from bloomery.data.position import Position
from bloomery.data.share import Share, lease
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.control.snapshot import Present
from bloomery.elastic.records import Shares


def give_out(
    position: Position, members: Mapping[str, Present], round: int, settings: RoundSettings
) -> Shares:
    """Return the shares of a round for these members: inner_steps each, fewer where the run ends."""
    samples = {name: members[name].member.samples for name in sorted(members)}
    steps = settings.inner_steps
    left = settings.total_samples - position.consumed
    if left <= 0:
        return Shares(round=round, position=position, shares={}, live=0)
    if sum(samples.values()):
        steps = max(1, min(steps, -(-left // sum(samples.values()))))
    parts, position = lease(position, samples=[steps * count for count in samples.values()])
    shares = {name: part.lease or () for name, part in zip(samples, parts, strict=True)}
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
