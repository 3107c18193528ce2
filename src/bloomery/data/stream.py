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
from bloomery.data.quotas import Weight
from bloomery.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Stream:
    """`order` maps positions to samples. `mixtures`: what it went through; the last one is today's."""

    order: Order | MegatronOrder
    mixtures: tuple[Mixture, ...]
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it, below a kilobyte with some fifty datasets."""
        state: dict[str, Any] = {"mixtures": [one.to_json() for one in self.mixtures]}
        if isinstance(self.order, MegatronOrder):
            state["megatron"] = _digest(self.order)
        return state

    def following(self, stored: Mapping[str, Any], *, at: int) -> Stream:
        """The stream that goes on from a checkpoint at stream index `at`: its past, then today's mixture.

        Raises DataError where the datasets are not those of the checkpoint, or the order cannot change.
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
        today = replace(self.mixtures[-1], at=at)
        known = tuple(Mixture.from_json(one, windows=today.windows) for one in stored["mixtures"])
        if not today.is_like(known[-1]):
            known = (*known, today)
        if known == self.mixtures:
            return self
        return replace(self, mixtures=known, order=order_through(known, self.seed))


def begin_stream(
    section: DataSection,
    datasets: Sequence[IndexedDataset],
    weights: Sequence[Weight],
    *,
    seed: int,
    samples: int,
) -> Stream:
    """The stream of a run from its first sample on. samples: what the megatron order is made for."""
    length = section.sequence_length
    mixture = Mixture.of([dataset.window_count(length) for dataset in datasets], weights)
    if section.order != "megatron":
        return Stream(order=order_through([mixture], seed), mixtures=(mixture,), seed=seed)
    for dataset in datasets:
        dataset.refuse_stray_sequences()
    order = MegatronOrder(
        [dataset.sequence_lengths for dataset in datasets],
        [float(weight) for weight in weights],
        samples=samples,
        sequence_length=length,
        seed=seed,
    )
    return Stream(order=order, mixtures=(mixture,), seed=seed)


def _digest(order: MegatronOrder) -> str:
    """What an order of Megatron's was made for, and a digest of what else it depends on."""
    facts = [(row.order.size, row.epochs, row.epoch_tokens, row.sample_count) for row in order.rows]
    weights = order.blend.weights.tolist() if order.blend else []
    return f"{order.samples} {xxhash.xxh3_64_hexdigest(repr((facts, weights)).encode())}"


def _samples_of(stored: Mapping[str, Any]) -> str:
    made_for = str(stored.get("megatron", "")).partition(" ")[0]
    return f", {made_for}" if made_for else ""
