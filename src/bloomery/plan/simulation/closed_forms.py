"""Formulas that a simulation must agree with where they hold, each with its source."""

from __future__ import annotations

import math


def best_interval_s(*, save_s: float, mean_time_between_failures_s: float) -> float:
    """Seconds of work between saves that lose least: sqrt(2·save·MTBF) (Young, 1974)."""
    return math.sqrt(2.0 * save_s * mean_time_between_failures_s)


def wall_time_s(
    work_s: float, *, every_s: float, save_s: float, restart_s: float, mean_time_between_failures_s: float
) -> float:
    """Expected seconds that `work_s` of work takes with exponential failures, also in saves and restarts.

    M·exp(R/M)·(exp((τ+δ)/M) − 1)·work/τ (Daly, 2006, equation 13).
    """
    mean = mean_time_between_failures_s
    segment = mean * math.exp(restart_s / mean) * math.expm1((every_s + save_s) / mean)
    return segment * work_s / every_s


def ring_s(
    elements: float, *, ranks: int, bits: float, bandwidth_mbit_s: float, latency_ms: float = 0.0
) -> float:
    """Seconds of a ring all-reduce: 2(n−1)/n of the bytes over each link, in 2(n−1) hops.

    (Patarasuk & Yuan, 2009.) bandwidth: of the slowest link each way, 10⁶ bit/s; latency: one way.
    """
    if ranks == 1:
        return 0.0
    transfer = 2.0 * (ranks - 1) / ranks * elements * bits / (bandwidth_mbit_s * 1e6)
    return transfer + 2.0 * (ranks - 1) * latency_ms / 1e3
