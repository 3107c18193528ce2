"""The arithmetic that every run begins with, in one place; each function says which formula it is.

Three figures that a published README computed are another here: it divided by 3,660 seconds an hour (20.02
hours, not 19.69), put 167 for 176 billion parameters (127.31 days, not 120.80), and called one sample of
2,048 tokens a thousand.
"""

from __future__ import annotations

import math

FULL_CHECKPOINT_BYTES = 14
"""A parameter's in a full checkpoint: 8 of Adam, 4 of the fp32 weight, 2 of the bf16 weight."""

WEIGHTS_BYTES = 2
DAY_S = 86_400.0


def run_days(
    *, tokens: float, parameters: float, accelerators: int, teraflops: float, recomputes: bool = True
) -> float:
    """Tokens × 8 × parameters / (accelerators × FLOP/s): 6 in place of 8 without recomputation."""
    operations = tokens * (8 if recomputes else 6) * parameters
    return operations / (accelerators * teraflops * 1e12) / DAY_S


def data_degree(*, nodes: int, per_node: int, tensor: int, pipeline: int) -> float:
    """Nodes × accelerators / (TP × PP); a fraction where they do not divide."""
    return nodes * per_node / (tensor * pipeline)


def init_std_megatron(hidden: int) -> float:
    """sqrt(1/(3h)): Smith et al., 2022 (530B)."""
    return math.sqrt(1 / (3 * hidden))


def init_std_small(hidden: int) -> float:
    """sqrt(2/(5h)): Nguyen and Salazar, 2019 ("Transformers without Tears")."""
    return math.sqrt(2 / (5 * hidden))


def lost_share(*, interval_s: float, save_s: float, mean_time_between_failures_s: float) -> float:
    """Part of the time that saving takes and failures undo: save/interval + interval/(2 × MTBF)."""
    return save_s / interval_s + interval_s / (2 * mean_time_between_failures_s)


def lost_work_hours(*, steps_between_saves: float, step_s: float) -> float:
    """What a failure just before a save undoes."""
    return steps_between_saves * step_s / 3600


def days_left(*, samples: float, samples_per_s: float, hours_per_day: float = 24.0) -> float:
    """At a measured speed, with so many hours of allocation a day."""
    return samples / (samples_per_s * hours_per_day * 3600)
