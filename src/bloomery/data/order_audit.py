"""Audits the order of samples: how well it is shuffled, and how often each sample is taken.

Do neighbours in the stream lie near each other in the files?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import DocumentRow, MegatronOrder
from bloomery.data.order import Order, sample_indices
from bloomery.data.position import Ranges, within, without
from bloomery.events.records import ProgressCallback, ignore_progress

LAGS = 32
"""The distances 1, 2, … in the order at which the places of samples are correlated."""
COUNTED = 1 << 22
"""The samples up to which all are read; of more, stretches of STRETCH at even distances."""
STRETCH = 1 << 16
"""The samples of one stretch."""
_NEAR, _NEAR_PARTS = 0.01, 100
_EPOCHS = 1000
_ALARM = 5.0  # standard deviations: by chance once in a million tests


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """How samples of one dataset that follow each other in the stream lie in it.

    looked_at: the number of pairs of neighbours that were compared. is_exact: whether all samples were.
    correlations: of the places of samples 1, 2, … apart; by chance each is within ± 1/√looked_at or so, and
    in a dataset of n samples, which an epoch takes once each, below 0 by up to 1/(n - 1).
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
class SampleCounts:
    """How often the samples of one dataset are taken over the run.

    epochs: samples taken in its first, second, … epoch; of more than 1,000, the first ones.
    least, most: how often a sample is taken, counted sample by sample; None where they are too many, and
    where each epoch is cut into other samples (Megatron's order).
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
    datasets: Sequence[IndexedDataset] = (),
    progress: ProgressCallback = ignore_progress,
) -> list[Neighbours]:
    """Return for each dataset how its neighbours in the stream lie.

    sizes: samples that each dataset has.
    datasets: for a MegatronOrder, whose samples are cut from shuffled documents, the files of these.
    """
    is_exact = samples <= COUNTED
    count = 1 if is_exact else COUNTED // STRETCH
    length = samples if is_exact else STRETCH
    sums = [_Sums() for _ in sizes]
    for number in range(count):
        begin = number * (samples - length) // max(count - 1, 1)
        which, windows = order.locate_samples(np.arange(begin, begin + length, dtype=np.int64))
        turns = None if isinstance(order, MegatronOrder) else order.given_before(begin).tolist()
        for dataset in np.unique(which).tolist():
            own = windows[which == dataset]
            if isinstance(order, MegatronOrder):
                sums[dataset].add(_places_in_file(order.rows[dataset], own, datasets[dataset]))
            elif turns is not None:
                sums[dataset].add_windows(own, size=sizes[dataset], turn=turns[dataset])
        progress("checking the order", (number + 1) * length, count * length, "samples")
    return [found.result(is_exact=is_exact) for found in sums]


def _places_in_file(
    row: DocumentRow, samples: npt.NDArray[np.int64], dataset: IndexedDataset
) -> npt.NDArray[np.float64]:
    """Return where in a file, from 0 to 1, samples of a row of its shuffled documents begin."""
    documents, inside = row.first_tokens(samples)
    tokens = (dataset.pointers[documents] - dataset.first_byte) // dataset.dtype.itemsize + inside
    places: npt.NDArray[np.float64] = (tokens + 0.5) / dataset.token_count
    return places


class _Sums:
    """Sums over pairs of places, each from 0 to 1, and what they come to by chance."""

    def __init__(self) -> None:
        self._products, self._pairs = np.zeros(LAGS), np.zeros(LAGS, dtype=np.int64)
        self._products_by_chance = np.zeros(LAGS)
        self._near, self._near_by_chance = 0, 0.0

    def add(self, places: npt.NDArray[np.float64]) -> None:
        """Add places that by chance are independent of each other and evenly spread."""
        self._add_products(places)
        self._near += int((np.abs(np.diff(places)) <= _NEAR).sum())
        self._near_by_chance += max(places.size - 1, 0) * (2 * _NEAR - _NEAR**2)

    def add_windows(self, windows: npt.NDArray[np.int64], *, size: int, turn: int) -> None:
        """Add neighbouring windows of a dataset of `size` windows, each of which every epoch takes once.

        turn: how many it gave before. Two of one epoch are never the same; two of different ones may be.
        """
        self._add_products((windows + 0.5) / size)
        for lag in range(1, min(LAGS, windows.size - 1) + 1):
            together = _pairs_of_an_epoch(turn, turn + windows.size, lag=lag, size=size)
            self._products_by_chance[lag - 1] -= together * (1 - 1 / size**2) / max(size - 1, 1)
        self._near += int((np.abs(np.diff(windows)) * _NEAR_PARTS <= size).sum())
        apart = size // _NEAR_PARTS
        others = apart * (2 * size - apart - 1)  # ordered pairs of windows that are near, of each epoch
        together = _pairs_of_an_epoch(turn, turn + windows.size, lag=1, size=size)
        self._near_by_chance += together * others / max(size * (size - 1), 1)
        self._near_by_chance += (windows.size - 1 - together) * (size + others) / size**2

    def _add_products(self, places: npt.NDArray[np.float64]) -> None:
        centred = (places - 0.5) * math.sqrt(12)  # mean 0 and variance 1 where they are even
        for lag in range(1, min(LAGS, places.size - 1) + 1):
            self._products[lag - 1] += float(centred[:-lag] @ centred[lag:])
            self._pairs[lag - 1] += places.size - lag

    def result(self, *, is_exact: bool) -> Neighbours:
        pairs = int(self._pairs[0])
        correlations = self._products / np.maximum(self._pairs, 1)
        near, by_chance = self._near / max(pairs, 1), self._near_by_chance / max(pairs, 1)
        alarms = []
        if pairs:
            strange = np.abs(self._products - self._products_by_chance) / np.sqrt(np.maximum(self._pairs, 1))
            worst = int(np.argmax(strange))
            if strange[worst] > _ALARM:
                alarms.append(
                    f"samples {worst + 1} apart have places that correlate by {correlations[worst]:+.4f}, "
                    f"{strange[worst]:.0f} standard deviations from chance"
                )
            if _surprise(self._near, self._near_by_chance) > _ALARM**2 / 2:
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


def _surprise(count: int, expected: float) -> float:
    """Return -ln of a bound on the chance of so many, or so few, of independent events (Chernoff 1952)."""
    if not expected:
        return math.inf if count else 0.0
    return (count * math.log(count / expected) if count else 0.0) - count + expected


def _pairs_of_an_epoch(begin: int, end: int, *, lag: int, size: int) -> int:
    """Return how many of the turns [begin, end - lag) have the turn `lag` later in their epoch of `size`."""
    inside = max(size - lag, 0)

    def below(turn: int) -> int:
        return turn // size * inside + min(turn % size, inside)

    return below(end - lag) - below(begin)


def sample_counts_of(
    order: Order | MegatronOrder, sizes: Sequence[int], *, samples: int, skips: Ranges = ()
) -> list[SampleCounts]:
    """Return for each dataset how often its samples are taken in the first `samples` of the stream.

    skips: stream indices that are never taken.
    """
    taken = without((range(samples),), skips)
    skipped = [
        (order.given_before(piece.start).tolist(), order.given_before(piece.stop).tolist())
        for piece in within(skips, (range(samples),))
    ]
    given = order.given_before(samples).tolist()
    extremes: list[tuple[int | None, int | None]] = [(None, None)] * len(sizes)
    if samples <= COUNTED and sum(sizes) <= 1 << 28:
        which, windows = order.locate_samples(sample_indices(taken))
        for dataset, size in enumerate(sizes):
            if isinstance(order, MegatronOrder) and order.rows[dataset].epochs > 1:
                continue
            times = np.bincount(windows[which == dataset], minlength=size)
            extremes[dataset] = int(times.min()), int(times.max())
    return [
        SampleCounts(
            samples=size,
            taken=given[dataset] - sum(after[dataset] - before[dataset] for before, after in skipped),
            epochs=_epochs(given[dataset], size, [(first[dataset], end[dataset]) for first, end in skipped]),
            least=extremes[dataset][0],
            most=extremes[dataset][1],
        )
        for dataset, size in enumerate(sizes)
    ]


def _epochs(given: int, size: int, skipped: Sequence[tuple[int, int]] = ()) -> tuple[int, ...]:
    """Return the samples taken of each of the first thousand epochs.

    given: samples of the dataset up to here. skipped: [first, end) of those among them that are not taken.
    """
    counts = []
    for epoch in range(min(-(-given // size), _EPOCHS)):
        begin, end = epoch * size, min((epoch + 1) * size, given)
        counts.append(end - begin - sum(max(0, min(stop, end) - max(at, begin)) for at, stop in skipped))
    return tuple(counts)
