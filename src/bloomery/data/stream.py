"""The sample stream of a run: its order across resumes, its identity, ends of epochs, and shares of datasets.

A checkpoint stores the stream as JSON. Epochs and shares are computed without reading a token. The identity
is a few short texts that machines compare to know that they have the same stream.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bloomery.config.data import DataSection
from bloomery.config.find import from_home
from bloomery.data.dataset_shares import Demand
from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.mixture import Mixture
from bloomery.data.order import Order, order_through
from bloomery.data.position import RULE_KEY, Ranges
from bloomery.data.sample_layout import Layout, layout_of, sample_tokens
from bloomery.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleStream:
    """The sample stream of a run.

    order: maps positions to samples.
    mixtures: all mixtures that the order went through; the last one is in force.
    demand: what today's recipe asks of the mixture.
    windows: number of samples in each dataset of today's recipe.
    layouts: for each dataset, how its tokens become samples. packing: the value of `data.packing`.
    """

    order: Order | MegatronOrder
    mixtures: tuple[Mixture, ...]
    seed: int
    demand: Demand
    windows: tuple[int, ...]
    layouts: tuple[Layout, ...] = ()
    packing: str = "windows"

    def sample_tokens(self, dataset: int, tokens: int) -> float:
        """Return how many tokens the samples of a dataset that holds `tokens` have, on average."""
        length = self.demand.sequence_length  # Megatron's order has no layouts: its samples are full
        return float(sample_tokens(self.layouts[dataset], tokens)) if self.layouts else length

    def asked(self, samples: int) -> list[Fraction]:
        """Return how many of the first `samples` samples the mixtures ask of each dataset in turn."""
        asked = [Fraction(0)] * len(self.windows)
        ends = [*(mixture.at for mixture in self.mixtures[1:]), samples]
        for mixture, end in zip(self.mixtures, ends, strict=True):
            budgets_end = mixture.at + mixture.length if mixture.length else end
            for shares, begin, stop in (
                (mixture.shares, mixture.at, min(end, budgets_end, samples)),
                (mixture.shares_after, budgets_end, min(end, samples)),
            ):
                whole, length = sum(shares), max(0, stop - begin)
                for number, share in enumerate(shares):
                    asked[number] += Fraction(share * length, whole)
        return asked

    def to_json(self) -> dict[str, Any]:
        """Return the stream as a checkpoint stores it, in less than a kilobyte for some fifty datasets."""
        state: dict[str, Any] = {"mixtures": [mixture.to_json() for mixture in self.mixtures]}
        if isinstance(self.order, MegatronOrder):
            state["megatron"] = _digest(self.order)
        return state

    def following(self, stored: Mapping[str, Any], *, at: int, left: int) -> SampleStream:
        """Return the stream that goes on from a checkpoint at stream index `at`: its past, then today's
        mixture.

        left: number of indices from `at` to the run's end.
        Raises DataError if the datasets are not those of the checkpoint, the order cannot change, or budgets
        can no longer be kept.
        """
        if isinstance(self.order, MegatronOrder):
            if stored.get("megatron") != _digest(self.order):
                earlier = self.order.by_rule(1)
                if stored.get("megatron") == _digest(earlier):
                    return replace(self, order=earlier)
                raise DataError(
                    "The megatron order of the checkpoint was made for other datasets, weights or a run of "
                    f"another length than today's, which is made for {self.order.samples:,} samples.",
                    remedy="Bring datasets and weights back, and set data.order_samples to what it was made "
                    f"for{_samples_of(stored)}. The bloomery order allows for such changes.",
                )
            return self
        mixtures = tuple(Mixture.from_json(entry, windows=self.windows) for entry in stored["mixtures"])
        resumed = self
        if mixtures != self.mixtures:
            resumed = replace(self, mixtures=mixtures, order=order_through(mixtures, self.seed))
        return resumed.demanding(self.demand, at=at, left=left)

    def _is_met(self, demand: Demand, *, end: int) -> bool:
        """Whether today's mixture was made for this demand and, if it has budgets, ends at the same index."""
        today = self.mixtures[-1]
        if demand.budgeted or today.demand:
            planned = (today.windows, today.demand, today.at + today.length)
            return (self.windows, demand.digest, end) == planned
        return Mixture.of(self.windows, demand.shares()).is_like(today)

    def demanding(self, demand: Demand, *, at: int, left: int) -> SampleStream:
        """Return the stream that meets `demand` from index `at` on, in the `left` indices that remain of the
        run.

        Samples that datasets with budgets gave before count. Raises DataError if the budgets cannot be kept.
        """
        changed = replace(self, demand=demand)
        if isinstance(self.order, MegatronOrder) or not left or self._is_met(demand, end=at + left):
            return changed
        counts = self.order.given_before(at).tolist()
        is_new = demand.digest != self.mixtures[-1].demand
        shares = demand.shares(given_before=counts, samples=left, is_new=is_new)
        mixture = Mixture.of(self.windows, shares, at=at, demand=demand, length=left)
        mixtures = (*self.mixtures, mixture)
        return replace(changed, mixtures=mixtures, order=order_through(mixtures, self.seed))


def begin_stream(
    section: DataSection,
    datasets: Sequence[IndexedDataset],
    demand: Demand,
    *,
    seed: int,
    samples: int,
    layouts: Sequence[Layout] = (),
) -> SampleStream:
    """Return the stream of a run from its first sample on.

    samples: number of samples for which Megatron's order is made.
    layouts: what `layouts_of` returned for the datasets; none: it is asked here.
    """
    length = section.sequence_length
    layouts = tuple(layouts or layouts_of(section, datasets, seed=seed))
    windows = tuple(layout.sample_count for layout in layouts)
    weights = demand.shares()
    mixture = Mixture.of(windows, weights, demand=demand, length=demand.samples)
    if section.order != "megatron":
        return SampleStream(
            order=order_through([mixture], seed),
            mixtures=(mixture,),
            seed=seed,
            demand=demand,
            windows=windows,
            layouts=layouts,
            packing=section.packing,
        )
    for dataset in datasets:
        dataset.refuse_stray_sequences()
    order = MegatronOrder(
        [dataset.sequence_lengths for dataset in datasets],
        _weights_of_megatron(section, demand),
        samples=samples,
        sequence_length=length,
        seed=seed,
        kept_in=places_of_orders(section, datasets),
    )
    return SampleStream(order=order, mixtures=(mixture,), seed=seed, demand=demand, windows=windows)


def layouts_of(section: DataSection, datasets: Sequence[IndexedDataset], *, seed: int) -> list[Layout]:
    """Return how the tokens of each dataset become samples."""
    return [
        layout_of(
            dataset,
            section.packing,
            length=section.sequence_length,
            seed=seed,
            number=number,
            kept_in=place,
        )
        for number, (dataset, place) in enumerate(
            zip(datasets, places_of_orders(section, datasets), strict=True)
        )
    ]


def places_of_orders(section: DataSection, datasets: Sequence[IndexedDataset]) -> list[Path]:
    """Return where the order of each dataset is kept: on the node's own disk where the recipe names one.

    Each dataset has a directory of its own, in which the newest orders are kept: in one for all, those of
    many datasets would replace each other at each start. So where several have one name, as DE/text and
    FR/text, it is followed by a hash of where they lie.
    """
    prefixes = [dataset.prefix for dataset in datasets]
    if not section.cache:
        return [prefix.parent / "orders" / prefix.name for prefix in prefixes]
    counts = Counter(prefix.name for prefix in {*prefixes})
    names = [
        prefix.name if counts[prefix.name] == 1 else f"{prefix.name}-{_digest_of_place(prefix)}"
        for prefix in prefixes
    ]
    return [from_home(section.cache) / "orders" / name for name in names]


def _digest_of_place(prefix: Path) -> str:
    return xxhash.xxh3_64_hexdigest(str(prefix.parent.absolute()).encode())[:8]


def _weights_of_megatron(section: DataSection, demand: Demand) -> Sequence[Fraction] | None:
    """Return what Megatron would be given: the weights as written or, with budgets, the shares that follow
    from them.

    The result is None for a single dataset to which nobody gave a weight.
    """
    is_given = section.weights_file or any(dataset.weight != "auto" for dataset in section.datasets)
    if len(demand.claims) == 1 and not is_given:
        return None
    return demand.shares() if demand.budgeted else [claim.weight for claim in demand.claims]


def _digest(order: MegatronOrder) -> str:
    """Return what one of Megatron's orders was made for, with a digest of everything else it depends on."""
    facts = [(row.order.size, row.epochs, row.epoch_tokens, row.sample_count) for row in order.rows]
    weights = order.blend.weights.tolist() if order.blend else []
    return f"{order.samples} {xxhash.xxh3_64_hexdigest(repr((facts, weights)).encode())}"


def _samples_of(stored: Mapping[str, Any]) -> str:
    made_for = str(stored.get("megatron", "")).partition(" ")[0]
    return f", {made_for}" if made_for else ""


EpochEnds = tuple[tuple[int, int], ...]
"""(dataset, stream index at which its first epoch ends) for each dataset, sorted by index."""


def epoch_ends(order: Order | MegatronOrder, *, below: int) -> EpochEnds:
    """Return the ends of first epochs at stream indices up to `below`; a dataset without one is left out.

    Megatron's order shuffles samples of all epochs together. There an epoch ends once a dataset gave as many
    samples as one epoch holds.
    """
    if isinstance(order, MegatronOrder):
        sizes = [row.epoch_samples for row in order.rows]
    else:
        sizes = list(order.windows)
    ends = []
    for dataset, size in enumerate(sizes):
        last = order.sample_of_turn(dataset, size - 1, below=below) if size else None
        if last is not None:
            ends.append((dataset, last + 1))
    return tuple(sorted(ends, key=lambda end: end[1]))


def ends_passed(ends: EpochEnds, *, after: int, up_to: int) -> EpochEnds:
    """Return the ends that a run passes when its cursor moves from `after` to `up_to`."""
    return tuple(end for end in ends if after < end[1] <= up_to)


def first_repeat(order: Order | MegatronOrder, *, below: int, skips: Ranges = ()) -> int | None:
    """Return the first index below `below` at which a sample is read again; `skips` are never read."""
    if isinstance(order, MegatronOrder):
        sizes = [row.epoch_samples for row in order.rows]
    else:
        sizes = list(order.windows)
    first = below
    for dataset, size in enumerate(sizes):
        turn = size
        while size and (index := order.sample_of_turn(dataset, turn, below=first)) is not None:
            skip = next((piece for piece in skips if piece.start <= index < piece.stop), None)
            if skip is None:
                first = index
            else:
                turn = int(order.given_before(skip.stop)[dataset])
    return first if first < below else None


@dataclass(frozen=True, kw_only=True)
class DatasetRow:
    """What one dataset, or a group of datasets, gives to a run.

    tokens: number of tokens that it holds.
    epochs: how often the run goes through it.
    first_epoch_step: the step at which its first epoch ends; None for a group, and if the run ends before.
    """

    name: str
    group: str
    tokens: int
    wanted: float
    delivered: float
    epochs: float
    first_epoch_step: int | None


def dataset_rows(
    stream: SampleStream,
    *,
    names: Sequence[str],
    groups: Sequence[str],
    tokens: Sequence[int],
    samples: int,
    step_of: Callable[[int], int],
) -> list[DatasetRow]:
    """Return a row for each dataset of a run of `samples` samples.

    step_of: a function that returns the step after which so many samples are consumed.
    """
    counts = stream.order.given_before(samples).tolist()
    shares = stream.mixtures[-1].shares
    ends = dict(epoch_ends(stream.order, below=samples))
    return [
        DatasetRow(
            name=name,
            group=groups[number],
            tokens=tokens[number],
            wanted=shares[number] / sum(shares),
            delivered=counts[number] / samples,
            epochs=counts[number] * stream.sample_tokens(number, tokens[number]) / tokens[number],
            first_epoch_step=step_of(ends[number]) if number in ends else None,
        )
        for number, name in enumerate(names)
    ]


def tokens_of_rows(rows: Sequence[DatasetRow]) -> int:
    """Return how many tokens a run takes of its datasets; empty places of packed documents are none."""
    return round(sum(row.epochs * row.tokens for row in rows))


def group_rows(rows: Sequence[DatasetRow]) -> list[DatasetRow]:
    """Return a row of sums for each named group, the largest share first."""
    groups = []
    for group in {row.group: None for row in rows if row.group}:
        members = [row for row in rows if row.group == group]
        tokens = sum(row.tokens for row in members)
        groups.append(
            DatasetRow(
                name=group,
                group="",
                tokens=tokens,
                wanted=sum(row.wanted for row in members),
                delivered=sum(row.delivered for row in members),
                epochs=sum(row.epochs * row.tokens for row in members) / tokens,
                first_epoch_step=None,
            )
        )
    return sorted(groups, key=lambda row: -row.wanted)


_PIECES = 32
_PIECE_TOKENS = 4096
_NAMED = 200
"""Up to this many datasets are named one by one; more are named by one hash of all."""


def stream_identity(
    stream: SampleStream, datasets: Mapping[str, IndexedDataset], *, text: str
) -> dict[str, str]:
    """Return digests of the datasets and of the order of the samples, by what each describes.

    They are equal on two machines where each sample number means the same sample.

    text: fingerprint of the text and its tokenizer.

    A dataset may have terabytes, so 32 evenly spaced pieces of its tokens are hashed and its documents are
    counted. Equal values do not prove that every token is equal.
    """
    described = {f"the dataset '{name}'": _of_pair(dataset) for name, dataset in datasets.items()}
    if len(described) > _NAMED:
        listed = json.dumps(sorted(described.items()))
        described = {f"the {len(described)} datasets": xxhash.xxh3_64_hexdigest(listed.encode())}
    order = f"{type(stream.order).__name__} {stream.seed} {stream.windows} {stream.demand.digest}"
    if stream.packing != "windows":  # versions that know no other do not name it
        order += f" {stream.packing}"
    rule = stream.mixtures[-1].rule
    mixes = len(datasets) > 1 and isinstance(stream.order, Order)
    return {
        **described,
        "the order of the samples": xxhash.xxh3_64_hexdigest(f"{list(datasets)} {order}".encode()),
        "the text and its tokenizer": text,
        # Versions that know only rules 1 and 2 do not name theirs.
        **({RULE_KEY: str(rule)} if mixes and rule > 2 else {}),
    }


def _of_pair(dataset: IndexedDataset) -> str:
    digest = xxhash.xxh3_64()
    for start in _starts(dataset.token_count):
        count = min(_PIECE_TOKENS, dataset.token_count - start)
        digest.update(np.ascontiguousarray(dataset.window(start, count), dtype=np.int64).data)
    return f"{dataset.token_count:,} tokens in {dataset.document_count:,} documents, {digest.hexdigest()}"


def _starts(tokens: int) -> Sequence[int]:
    last = max(0, tokens - _PIECE_TOKENS)
    return sorted({last * piece // (_PIECES - 1) for piece in range(_PIECES)})
