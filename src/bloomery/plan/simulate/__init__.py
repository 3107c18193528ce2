"""Simulates a scenario many times, and computes the mean goodput with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from bloomery.frozen import dataclass
from bloomery.plan.simulate import cluster, peers
from bloomery.plan.simulate.scenario import Life, Scenario

CONFIDENCE = 1.96
"""Standard errors on each side of the mean that hold 95% of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class GoodputForecast:
    """The result of simulating several lives of a scenario.

    goodput: mean share of time whose work was kept.
    low, high: 95% confidence interval of the goodput.
    hours: mean hours by cause, in the causes' usual order.
    events: mean number of each event.
    first: the first life, for a picture.
    """

    scenario: Scenario
    lives: int
    goodput: float
    low: float
    high: float
    hours: Mapping[str, float]
    events: Mapping[str, float]
    first: Life


def forecast(
    scenario: Scenario, *, lives: int, seed: int = 0, done: Callable[[], None] = lambda: None
) -> GoodputForecast:
    """Simulate `lives` lives with the seeds seed, seed + 1, …; `done` is called after each."""
    live = cluster.simulate_cluster if scenario.cluster else peers.simulate_peers
    causes = cluster.CAUSES if scenario.cluster else peers.CAUSES
    lived = []
    for number in range(lives):
        lived.append(live(scenario, seed=seed + number))
        done()
    shares = [life.goodput for life in lived]
    mean, error = fmean(shares), stdev(shares) / math.sqrt(lives) if lives > 1 else math.nan
    return GoodputForecast(
        scenario=scenario,
        lives=lives,
        goodput=mean,
        low=max(0.0, mean - CONFIDENCE * error),
        high=min(1.0, mean + CONFIDENCE * error),
        hours={cause: _mean([life.hours for life in lived], cause) for cause in causes},
        events={name: _mean([life.events for life in lived], name) for name in _names(lived)},
        first=lived[0],
    )


def _mean(ledgers: Sequence[Mapping[str, float]], name: str) -> float:
    return fmean(ledger.get(name, 0) for ledger in ledgers)


def _names(lived: Sequence[Life]) -> list[str]:
    return sorted({name for life in lived for name in life.events})
