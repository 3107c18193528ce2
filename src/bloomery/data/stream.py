"""The order that a run follows and what a checkpoint keeps of it, from its beginning through every resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from bloomery.config.data import DataSection
from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron import MegatronOrder
from bloomery.data.mixture import Mixture
from bloomery.data.order import Order, order_through
from bloomery.data.shares import Demand
from bloomery.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Stream:
    """`order` maps positions to samples. `mixtures`: what it went through; the last one is today's.

    `demand`: what today's recipe asks for, and `windows`: how many samples each of its datasets has.
    """

    order: Order | MegatronOrder
    mixtures: tuple[Mixture, ...]
    seed: int
    demand: Demand
    windows: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it, below a kilobyte with some fifty datasets."""
        state: dict[str, Any] = {"mixtures": [one.to_json() for one in self.mixtures]}
        if isinstance(self.order, MegatronOrder):
            state["megatron"] = _digest(self.order)
        return state

    def following(self, stored: Mapping[str, Any], *, at: int, left: int) -> Stream:
        """The stream that goes on from a checkpoint at stream index `at`: its past, then today's mixture.

        left: indices from `at` to the run's end. Raises DataError where the datasets are not those of the
        checkpoint, the order cannot change, or budgets cannot be kept any more.
        """
        if isinstance(self.order, MegatronOrder):
            if stored.get("megatron") != _digest(self.order):
                raise DataError(
                    "The megatron order of the checkpoint was made for other datasets, weights or a run of "
                    f"another length than today's, which is made for {self.order.samples:,} samples.",
                    remedy="Bring datasets and weights back, and set data.order_samples to what it was made "
                    f"for{_samples_of(stored)}. The bloomery order allows for such changes.",
                )
            return self
        known = tuple(Mixture.from_json(one, windows=self.windows) for one in stored["mixtures"])
        resumed = self
        if known != self.mixtures:
            resumed = replace(self, mixtures=known, order=order_through(known, self.seed))
        return resumed.demanding(self.demand, at=at, left=left)

    def _is_met(self, demand: Demand, *, end: int) -> bool:
        """Whether today's mixture was made for such a demand; with budgets, up to the same index."""
        today = self.mixtures[-1]
        if demand.budgeted or today.demand:
            planned = (today.windows, today.demand, today.at + today.length)
            return (self.windows, demand.digest, end) == planned
        return Mixture.of(self.windows, demand.shares()).is_like(today)

    def demanding(self, demand: Demand, *, at: int, left: int) -> Stream:
        """The stream that from index `at` on does what `demand` says, in the `left` indices of the run.

        What budgets have given before counts. Raises DataError where they cannot be kept.
        """
        changed = replace(self, demand=demand)
        if isinstance(self.order, MegatronOrder) or not left or self._is_met(demand, end=at + left):
            return self if demand == self.demand else changed
        given = self.order.given_before(at).tolist()
        is_new = demand.digest != self.mixtures[-1].demand
        shares = demand.shares(given=given, samples=left, is_new=is_new)
        mixture = Mixture.of(self.windows, shares, at=at, demand=demand, length=left)
        known = (*self.mixtures, mixture)
        return replace(changed, mixtures=known, order=order_through(known, self.seed))


def begin_stream(
    section: DataSection,
    datasets: Sequence[IndexedDataset],
    demand: Demand,
    *,
    seed: int,
    samples: int,
) -> Stream:
    """The stream of a run from its first sample on. samples: what the megatron order is made for."""
    length = section.sequence_length
    windows = tuple(dataset.window_count(length) for dataset in datasets)
    weights = demand.shares()
    mixture = Mixture.of(windows, weights, demand=demand, length=demand.samples)
    if section.order != "megatron":
        return Stream(
            order=order_through([mixture], seed),
            mixtures=(mixture,),
            seed=seed,
            demand=demand,
            windows=windows,
        )
    for dataset in datasets:
        dataset.refuse_stray_sequences()
    order = MegatronOrder(
        [dataset.sequence_lengths for dataset in datasets],
        [float(weight) for weight in weights],
        samples=samples,
        sequence_length=length,
        seed=seed,
    )
    return Stream(order=order, mixtures=(mixture,), seed=seed, demand=demand, windows=windows)


def _digest(order: MegatronOrder) -> str:
    """What an order of Megatron's was made for, and a digest of what else it depends on."""
    facts = [(row.order.size, row.epochs, row.epoch_tokens, row.sample_count) for row in order.rows]
    weights = order.blend.weights.tolist() if order.blend else []
    return f"{order.samples} {xxhash.xxh3_64_hexdigest(repr((facts, weights)).encode())}"


def _samples_of(stored: Mapping[str, Any]) -> str:
    made_for = str(stored.get("megatron", "")).partition(" ")[0]
    return f", {made_for}" if made_for else ""
