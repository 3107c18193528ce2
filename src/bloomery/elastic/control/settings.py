"""What the rounds of a run are judged by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """Of the recipe's [elastic], and the run's length. joins_within: newcomers begin
    within a round. answer_s: for saying that one has let go of a ring.
    """

    inner_steps: int
    total_samples: int
    peers: int = 1
    minimum_peers: int = 1
    grace_s: float = 60.0
    patience_s: float = 10.0
    outlier_factor: float = 10.0
    joins_within: bool = False
    answer_s: float = 0.7
    stagger_s: float = 0.2
