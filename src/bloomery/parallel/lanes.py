"""The ways that messages go between pipeline ranks. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from bloomery.plan.partition import rank_of_stage


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Messages of one kind from one pipeline rank to another: activations, or gradients."""

    activations: bool
    sender: int
    receiver: int


def lanes_of(*, pipeline: int, chunks: int, schedule: str) -> tuple[Lane, ...]:
    """Every lane between the ranks of neighbouring stages, each once, in an order that all ranks share."""
    ranks = [rank_of_stage(stage, pipeline=pipeline, schedule=schedule) for stage in range(pipeline * chunks)]
    hops = dict.fromkeys((one, following) for one, following in pairwise(ranks) if one != following)
    return tuple(
        lane
        for one, following in hops
        for lane in (
            Lane(activations=True, sender=one, receiver=following),
            Lane(activations=False, sender=following, receiver=one),
        )
    )
