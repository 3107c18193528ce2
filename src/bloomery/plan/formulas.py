"""Closed formulas for planning a run: initial standard deviations, checkpoint intervals, ring all_reduce.

Each function names the source of its formula.
"""

from __future__ import annotations

import math

FULL_CHECKPOINT_BYTES = 14
"""Bytes of one parameter in a full checkpoint: 8 for Adam's moments, 4 for fp32, 2 for the bf16 weight."""

WEIGHTS_BYTES = 2
"""Bytes of one parameter in a checkpoint of bf16 weights alone."""

DAY_S = 86_400.0


def init_std_megatron(hidden: int) -> float:
    """Return the initial standard deviation sqrt(1/(3h)) for hidden size h (Smith et al., 2022, for 530B)."""
    return math.sqrt(1 / (3 * hidden))


def init_std_small(hidden: int) -> float:
    """Return the initial standard deviation sqrt(2/(5h)) for hidden size h.

    (Nguyen and Salazar, 2019, "Transformers without Tears".)
    """
    return math.sqrt(2 / (5 * hidden))


_LARGEST_EXPONENT = 500.0
"""With larger ones the mean times are no floats any more, and no such run ends."""


def lost_share(
    *,
    interval_s: float,
    save_s: float,
    mean_time_between_failures_s: float,
    durable_s: float | None = None,
    restart_s: float = 0.0,
) -> float:
    """Return the share of the time that saves, restarts and repeated work take, below 1.

    With failures at a constant rate, an interval of work and its save take
    M·exp(R/M)·(exp((interval + save)/M) − 1) on average (Daly, 2006, without the approximations that follow
    there). M is the mean time between failures. R is the time until training goes on after a failure, and the
    work that is repeated because the newest save was not durable yet.

    interval_s: seconds of work between two saves.
    save_s: seconds for which a save stops the training.
    durable_s: seconds from a save's begin until a restart can load it; None: save_s.
    restart_s: seconds from a failure until training goes on from the newest save.
    """
    between_s = mean_time_between_failures_s
    undurable_s = max(0.0, (durable_s or save_s) - save_s) * interval_s / (interval_s + save_s)
    exponents = (restart_s + undurable_s) / between_s, (interval_s + save_s) / between_s
    if sum(exponents) > _LARGEST_EXPONENT:
        return 1.0
    taken_s = between_s * math.exp(exponents[0]) * math.expm1(exponents[1])
    return 1.0 - interval_s / taken_s


def lost_work_hours(*, steps_between_saves: float, step_s: float) -> float:
    """Return the hours of work that a failure just before a save loses."""
    return steps_between_saves * step_s / 3600


def days_left(*, samples: float, samples_per_s: float, hours_per_day: float = 24.0) -> float:
    """Return the days that the remaining `samples` take at a measured speed.

    hours_per_day: hours a day in which the machine may be used.
    """
    return samples / (samples_per_s * hours_per_day * 3600)


def best_interval_s(*, save_s: float, mean_time_between_failures_s: float) -> float:
    """Return the seconds of work between saves that lose least time: sqrt(2·save·MTBF) (Young, 1974)."""
    return math.sqrt(2.0 * save_s * mean_time_between_failures_s)


def ring_s(
    elements: float, *, ranks: int, bits: float, bandwidth_mbit_s: float, latency_ms: float = 0.0
) -> float:
    """Return the seconds of a ring all_reduce: 2(n−1)/n of the bytes over each link, in 2(n−1) hops.

    (Patarasuk and Yuan, 2009.)

    elements: elements of the reduced tensor.
    ranks: members of the ring, the n of the formula.
    bits: bits of one element on the wire.
    bandwidth_mbit_s: bandwidth of the slowest link in one direction, in 10⁶ bit/s.
    latency_ms: latency of one hop in one direction.
    """
    if ranks == 1:
        return 0.0
    transfer = 2.0 * (ranks - 1) / ranks * elements * bits / (bandwidth_mbit_s * 1e6)
    return transfer + 2.0 * (ranks - 1) * latency_ms / 1e3
