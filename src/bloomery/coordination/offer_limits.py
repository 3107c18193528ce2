"""Bounds on what a peer may claim in its offer to a round: samples, tokens and steps."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.data.position import Position, total
from bloomery.protocol.records import Ready


@dataclass(frozen=True, kw_only=True)
class OfferLimits:
    """What a peer can bring to a round, by settings that are equal on all peers.

    tokens_per_sample: tokens of each sample.
    steps: for how many steps a peer gets samples in a round.
    batch: the most samples that a peer uses in one step.
    fragments: how many fragments of the model are averaged in turn.
    """

    tokens_per_sample: int
    steps: int
    batch: int
    fragments: int = 1


def overstated(ready: Ready, *, position: Position, limits: OfferLimits) -> str:
    """Return which claim of an offer exceeds what its samples and this round allow, or "".

    Tokens are the weight of a part, and by its steps the norm is judged, so neither is believed.

    position: of the round under way.
    """
    used = total(ready.spent)
    if used + total(ready.kept) > limits.steps * limits.batch:
        return "it spent more samples than a peer gets for a round"
    if ready.tokens != used * limits.tokens_per_sample:
        return f"it claims {ready.tokens} tokens for {used} samples of {limits.tokens_per_sample}"
    if ready.steps > min(limits.steps, used):
        return f"it claims {ready.steps} steps with {used} samples"
    # With one fragment a part spans the steps of its round; else also those of committed rounds before it.
    earlier = limits.fragments > 1
    tokens = (position.consumed + used) * limits.tokens_per_sample if earlier else 0
    steps = ready.round * limits.steps if earlier else 0
    if ready.drift_tokens > tokens or ready.drift_steps > steps:
        return "it claims more of earlier rounds than there was"
    return ""
