"""Examines the order of samples that a run is under: do neighbours in the stream lie near each other in the
files, and how often is each sample taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.events.records import ProgressCallback, ignore_progress

LAGS = 32
COUNTED = 1 << 22
"""Up to so many samples all are looked at; of more, stretches of STRETCH at even distances."""
STRETCH = 1 << 16
_NEAR = 0.01
_ALARM = 5.0  # standard deviations: by chance once in a million looks


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """How samples of one dataset that follow each other in the stream lie in it.

    looked_at: pairs of neighbours. is_exact: whether all samples of the run were looked at.
    correlations: of the places of samples 1, 2, … apart; by chance each is within ± 1/√looked_at or so.
    near: share of neighbours whose places are within 1% of the dataset; near_by_chance: as expected.
    alarms: sentences about what chance does not explain.
    """

    looked_at: int
    is_exact: bool
    correlations: tuple[float, ...]
    near: float
    near_by_chance: float
    alarms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """How often the samples of one dataset are taken over the run.

    epochs: samples taken in its first, second, … epoch; of more than 1,000, the first ones.
    least, most: how often a sample is taken, counted sample by sample; None where they are too many.
    """

    samples: int
    taken: int
    epochs: tuple[int, ...]
    least: int | None
    most: int | None


def neighbours_of(
    order: Order | MegatronOrder,
    sizes: Sequence[int],
    *,
    samples: int,
    progress: ProgressCallback = ignore_progress,
) -> list[Neighbours]:
    """Return for each dataset how its neighbours in the stream lie. sizes: samples that each dataset has."""
    is_exact = samples <= COUNTED
    count = 1 if is_exact else COUNTED // STRETCH
    length = samples if is_exact else STRETCH
    sums = [_Sums() for _ in sizes]
    for number in range(count):
        begin = number * (samples - length) // max(count - 1, 1)
        which, windows = order.locate_samples(np.arange(begin, begin + length, dtype=np.int64))
        for dataset in np.unique(which).tolist():
            sums[dataset].add((windows[which == dataset] + 0.5) / sizes[dataset])
        progress("looking at the order", (number + 1) * length, count * length, "samples")
    return [found.result(is_exact=is_exact) for found in sums]


class _Sums:
    """Sums over pairs of places, each from 0 to 1, evenly spread by chance."""

    def __init__(self) -> None:
        self._products, self._pairs = np.zeros(LAGS), np.zeros(LAGS, dtype=np.int64)
        self._near = 0

    def add(self, places: npt.NDArray[np.float64]) -> None:
        centred = (places - 0.5) * math.sqrt(12)  # mean 0 and variance 1 where they are even
        for lag in range(1, min(LAGS, places.size - 1) + 1):
            self._products[lag - 1] += float(centred[:-lag] @ centred[lag:])
            self._pairs[lag - 1] += places.size - lag
        self._near += int((np.abs(np.diff(places)) <= _NEAR).sum())

    def result(self, *, is_exact: bool) -> Neighbours:
        pairs = int(self._pairs[0])
        correlations = self._products / np.maximum(self._pairs, 1)
        by_chance = 2 * _NEAR - _NEAR**2
        near = self._near / max(pairs, 1)
        alarms = []
        if pairs:
            strange = np.abs(correlations) * np.sqrt(self._pairs)
            worst = int(np.argmax(strange))
            if strange[worst] > _ALARM:
                alarms.append(
                    f"samples {worst + 1} apart have places that correlate by {correlations[worst]:+.4f}, "
                    f"{strange[worst]:.0f} standard deviations from chance"
                )
            spread = math.sqrt(by_chance * (1 - by_chance) / pairs)
            if abs(near - by_chance) > _ALARM * spread:
                alarms.append(
                    f"{near:.2%} of neighbours lie within {_NEAR:.0%} of the dataset from each other, and "
                    f"{by_chance:.2%} would by chance"
                )
        return Neighbours(
            looked_at=pairs,
            is_exact=is_exact,
            correlations=tuple(correlations.tolist()),
            near=near,
            near_by_chance=by_chance,
            alarms=tuple(alarms),
        )


def taken_of(order: Order | MegatronOrder, sizes: Sequence[int], *, samples: int) -> list[Taken]:
    """Return for each dataset how often its samples are taken in the first `samples` of the stream."""
    counts = order.given_before(samples).tolist()
    extremes: list[tuple[int | None, int | None]] = [(None, None)] * len(sizes)
    if samples <= COUNTED and sum(sizes) <= 1 << 28:
        which, windows = order.locate_samples(np.arange(samples, dtype=np.int64))
        for dataset, size in enumerate(sizes):
            times = np.bincount(windows[which == dataset], minlength=size)
            extremes[dataset] = int(times.min()), int(times.max())
    return [
        Taken(samples=size, taken=taken, epochs=_epochs(taken, size), least=least, most=most)
        for taken, size, (least, most) in zip(counts, sizes, extremes, strict=True)
    ]


def _epochs(taken: int, size: int) -> tuple[int, ...]:
    whole, rest = divmod(taken, size)
    return (*[size] * min(whole, 1000), *([rest] if rest and whole < 1000 else []))
