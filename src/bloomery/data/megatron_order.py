"""Megatron's order of samples, with which a run that Megatron began continues on the same samples.

Documents are shuffled and laid end to end in a row. Sample k of a dataset is tokens [k·L, k·L + L] of that
row, and a second shuffle gives the order of samples. Everything except the weights of a blend is computed in
integers, because Megatron's older code counts epochs in float32 and goes wrong at 10**12 tokens. Weights are
float64, and are normalised and compared step by step as Megatron does. Legend: a sample has L tokens, and one
more is read as the last target.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery.data import native_kernels
from bloomery.data.mixture import Weight
from bloomery.data.order import sample_indices
from bloomery.data.position import EVERYTHING, Position, Ranges, SampleShare, next_samples
from bloomery.data.storage import Arrays, Shapes, digest_of, shared_arrays
from bloomery.errors import DataError

Indices = npt.NDArray[np.int64]

_TARGET = 1  # number of tokens that a sample takes beyond its length
_SURPLUS = 0.005  # each dataset provides this fraction of its share more than a blend needs
_SEPARATE_BELOW = 0.8  # a last epoch with fewer of its samples than this fraction is shuffled apart
_BLOCK = 1 << 16
_BLOCKS_KEPT = 4
_LARGEST_SEED = (1 << 32) - 1

RULE = 2
"""How weights become a blend today, which is Megatron's way. The first checkpoints were made with rule 1,
which took exact shares and normalised them once, let datasets of weight 0 take part, and did not blend a
single dataset. Runs that began with rule 1 keep it.
"""


class MegatronOrder:
    """Maps `samples` stream indices to samples of a blend in Megatron's order.

    lengths: for each dataset, the number of tokens in each of its sequences.
    weights: as given to Megatron, before normalising; None for one dataset without a weight, which then
    provides no surplus.
    kept_in: for each dataset, a directory for its row, which all processes of a node then share.

    The result is a function of (lengths, weights, samples, seed). Unlike the `bloomery` order it ends, and it
    takes 12 bytes for each document and epoch, and up to 6 for each sample.
    """

    def __init__(
        self,
        lengths: Sequence[npt.NDArray[np.int32]],
        weights: Sequence[Weight] | None,
        *,
        samples: int,
        sequence_length: int,
        seed: int,
        rule: int = RULE,
        kept_in: Sequence[Path] = (),
    ) -> None:
        if not 0 <= seed <= _LARGEST_SEED:
            raise DataError(
                f"The megatron order has no seed {seed}: its generator takes 0 to {_LARGEST_SEED:,}.",
                remedy="Set data.order_seed to Megatron's --seed.",
            )
        if weights is None and len(lengths) != 1:
            raise ValueError(f"{len(lengths)} datasets and no weights")
        self.samples = samples
        self._again = functools.partial(
            MegatronOrder,
            lengths,
            weights,
            samples=samples,
            sequence_length=sequence_length,
            seed=seed,
            kept_in=kept_in,
        )
        is_blend = weights is not None and (rule > 1 or len(lengths) > 1)
        self.blend = Blend(weights, samples, rule=rule) if weights is not None and is_blend else None
        shares = self.blend.shares.tolist() if self.blend else []
        provided = [with_surplus(samples, share) for share in shares] or [samples]
        places: Sequence[Path | None] = kept_in or [None] * len(lengths)
        self.rows = tuple(
            DocumentRow(
                dataset_lengths, samples=wanted, sequence_length=sequence_length, seed=seed, kept_in=directory
            )
            for dataset_lengths, wanted, directory in zip(lengths, provided, places, strict=True)
        )

    def by_rule(self, rule: int) -> MegatronOrder:
        """Return the order of the same datasets and weights by another `RULE`."""
        return self._again(rule=rule)

    def next_span(self, position: Position, global_batch: int, share: SampleShare = EVERYTHING) -> Ranges:
        """Return the samples of the next global batch as sorted ranges, `global_batch` samples in
        all.
        """
        span = next_samples(position, global_batch, share)
        end = self.samples if self.blend else self.rows[0].sample_count
        if span[-1].stop > end:
            raise DataError(
                f"The megatron order was made for {self.samples:,} samples and ends at sample {end:,}; the "
                f"next batch would take those up to {span[-1].stop:,}.",
                remedy="Shorten the run. A longer order is another order: set data.order_samples before the "
                "first start, with room for skipped samples.",
            )
        return span

    def locate(self, span: Iterable[range]) -> tuple[Indices, Indices]:
        """Return (dataset, sample of its row) of each sample of the span, as two arrays of shape
        [samples].
        """
        return self.locate_samples(sample_indices(span))

    def locate_samples(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return (dataset, sample of its row) of each stream index, as two arrays of the shape [k] of
        `samples`.
        """
        if self.blend is None:
            return np.zeros_like(samples), self.rows[0].shuffled(samples)
        datasets, turns = self.blend.locate(samples)
        located = np.empty_like(samples)
        for dataset in np.unique(datasets).tolist():
            of_dataset = datasets == dataset
            located[of_dataset] = self.rows[dataset].shuffled(turns[of_dataset])
        return datasets, located

    def sample_of_turn(self, dataset: int, turn: int, *, below: int) -> int | None:
        """Return the stream index, if it is below `below`, at which a dataset gives its sample `turn` (from
        0).
        """
        sample = turn if self.blend is None else self.blend.sample_of(dataset, turn)
        return sample if sample is not None and sample < min(below, self.samples) else None

    def given_before(self, sample: int) -> Indices:
        """Return the number of samples that each dataset gives at stream indices below `sample`;
        [datasets].
        """
        return np.array([sample]) if self.blend is None else self.blend.before(sample)


class DocumentRow:
    """One dataset's documents, shuffled over its epochs and laid end to end, with the shuffle of its samples.

    order: document numbers; [epochs · documents].
    ends: token of the row at which each of these documents ends.
    kept_in: see `MegatronOrder`; None computes the row in memory.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int32],
        *,
        samples: int,
        sequence_length: int,
        seed: int,
        kept_in: Path | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens < 1:
            raise DataError("A dataset of the mixture holds no token.", remedy="Leave it out.")
        plan = plan_epochs(tokens, samples=samples, sequence_length=sequence_length)
        self.epochs, self.epoch_tokens, self.sample_count = plan.epochs, tokens, plan.samples
        shapes: Shapes = {
            "order": (plan.epochs * lengths.size, np.uint32 if lengths.size < 1 << 32 else np.int64),
            "ends": (plan.epochs * lengths.size, np.int64),
            "shuffle": (plan.samples, np.uint32 if plan.samples < 1 << 32 else np.int64),
        }
        key = "" if kept_in is None else digest_of([lengths], f"row 1 {plan} {sequence_length} {seed}")
        arrays = shared_arrays(kept_in, key, shapes, functools.partial(_fill_row, lengths, plan, seed))
        self.order, self.ends, self._shuffle = arrays["order"], arrays["ends"], arrays["shuffle"]

    def shuffled(self, turns: Indices) -> Indices:
        """Return the samples of the row that come as the `turns`-th ones."""
        if turns.size and int(turns.max()) >= self.sample_count:
            raise DataError(
                f"A dataset of {self.sample_count:,} samples is asked for its sample {int(turns.max()):,}.",
                remedy="Its weight is too small for this blend: give it more, or leave it out.",
            )
        return self._shuffle[turns].astype(np.int64)

    def first_tokens(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return the document and the token in it with which each of these samples of the row begins; [k]."""
        at = samples * self.sequence_length
        places = np.searchsorted(self.ends, at, "right")
        begins = np.where(places > 0, self.ends[places - 1], 0)
        return self.order[places].astype(np.int64), at - begins

    def pieces(self, sample: int) -> list[tuple[int, int, int]]:
        """Return (document, first token in it, tokens) for each piece of a sample's L + 1 tokens, in their
        order.
        """
        at, wanted, pieces = sample * self.sequence_length, self.sequence_length + _TARGET, []
        place = int(np.searchsorted(self.ends, at, "right"))
        while wanted:
            end = int(self.ends[place])
            begin = int(self.ends[place - 1]) if place else 0
            taken = min(wanted, end - at)
            if taken:
                pieces.append((int(self.order[place]), at - begin, taken))
            at, wanted, place = at + taken, wanted - taken, place + 1
        return pieces

    @property
    def epoch_samples(self) -> int:
        """The number of samples that one epoch's tokens make; 0 where they are too few for one."""
        return (self.epoch_tokens - _TARGET) // self.sequence_length

    @property
    def nbytes(self) -> int:
        """The memory that the row takes, in bytes."""
        return self.order.nbytes + self.ends.nbytes + self._shuffle.nbytes


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How often a dataset is laid out, and how its samples are shuffled.

    separate: whether the last epoch's samples, those after `samples_before_last`, are shuffled apart.
    """

    epochs: int
    samples: int
    samples_before_last: int
    separate: bool


def plan_epochs(tokens: int, *, samples: int, sequence_length: int) -> EpochPlan:
    """Plan how often a dataset of so many tokens is laid out to give at least `samples` samples."""
    epochs = max(1, -(-(samples * sequence_length + _TARGET) // tokens))
    before_last = max(0, ((epochs - 1) * tokens - _TARGET) // sequence_length)
    separate = False
    if epochs > 1:
        an_epoch = (tokens - _TARGET) // sequence_length
        separate = samples - before_last < int(_SEPARATE_BELOW * an_epoch)
    return EpochPlan(
        epochs=epochs,
        samples=(epochs * tokens - _TARGET) // sequence_length,
        samples_before_last=before_last,
        separate=separate,
    )


class Blend:
    """Decides which dataset gives sample s: always the one that is furthest behind its weight.

    shares: the normalised weights, from which follows how many samples each dataset provides.
    weights: the shares normalised once more, as Megatron does, which may change their last bit.

    Datasets of weight 0, which Megatron refuses, give nothing. The choices are kept, 2 bytes for each sample,
    with the counts at each block's start.
    """

    def __init__(self, weights: Sequence[Weight], samples: int, *, rule: int = RULE) -> None:
        raw = np.array([float(weight) for weight in weights], dtype=np.float64)
        with np.errstate(over="ignore"):
            total = raw.sum()
        if not np.isfinite(total) or (raw < 0).any() or total <= 0:
            raise DataError(
                f"The weights of the datasets, {raw.tolist()}, give no mixture.",
                remedy="Give each dataset a weight of 0 or more, and at least one of them more than 0.",
            )
        members = np.flatnonzero(raw > 0)
        if rule == 1:
            exact = [Fraction(weight) for weight in weights]
            raw = np.array([float(weight / sum(exact)) for weight in exact])
            members = np.arange(raw.size)
        self.shares, self.weights = np.zeros_like(raw), np.zeros_like(raw)
        self.shares[members] = _normalised(raw[members])
        self.weights[members] = _normalised(self.shares[members]) if rule > 1 else self.shares[members]
        self.datasets = np.empty(samples, dtype=np.uint16)
        counts = np.zeros(members.size, dtype=np.int64)
        self._starts = np.zeros((-(-samples // _BLOCK) + 1, raw.size), dtype=np.int64)
        for block, first in enumerate(range(0, samples, _BLOCK)):
            chosen = self.datasets[first : first + _BLOCK]
            _blend(self.weights[members], first, counts, chosen)
            if members.size < raw.size:
                chosen[:] = members[chosen]
            self._starts[block + 1, members] = counts
        self._turns: dict[int, Indices] = {}
        self._lock = Lock()

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return (dataset, number of samples it gave before) for each sample."""
        turns = np.empty_like(samples)
        blocks = samples // _BLOCK
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            turns[in_block] = self._block(block)[samples[in_block] % _BLOCK]
        return self.datasets[samples].astype(np.int64), turns

    def before(self, sample: int) -> Indices:
        """Return how many samples each dataset gives before `sample`."""
        block = min(sample // _BLOCK, len(self._starts) - 1)
        rest = self.datasets[block * _BLOCK : sample]
        counts: Indices = self._starts[block] + np.bincount(rest, minlength=self.weights.size)
        return counts

    def sample_of(self, dataset: int, turn: int) -> int | None:
        """Return the sample at which a dataset gives its sample `turn`, counted from 0."""
        block = int(np.searchsorted(self._starts[:, dataset], turn, "right")) - 1
        places = np.flatnonzero(self.datasets[block * _BLOCK : (block + 1) * _BLOCK] == dataset)
        place = turn - int(self._starts[block, dataset])
        return block * _BLOCK + int(places[place]) if place < places.size else None

    def _block(self, block: int) -> Indices:
        with self._lock:
            if block not in self._turns:
                while len(self._turns) >= _BLOCKS_KEPT:
                    del self._turns[next(iter(self._turns))]
                chosen = self.datasets[block * _BLOCK : (block + 1) * _BLOCK]
                grouped = np.argsort(chosen, kind="stable")
                counts = np.bincount(chosen, minlength=self.weights.size)
                firsts = self._starts[block] - np.cumsum(counts) + counts
                turns = np.empty(chosen.size, dtype=np.int64)
                turns[grouped] = np.arange(chosen.size) + firsts[chosen[grouped]]
                self._turns[block] = turns
            return self._turns[block]


class _LegacyRandom:
    """NumPy's RandomState, whose stream never changes, with a quicker shuffle if there is a native
    library.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)

    def shuffle(self, values: npt.NDArray[Any]) -> None:
        """Shuffle in place, as RandomState does."""
        name, words, place, *rest = self._random.get_state(legacy=True)
        words, at = np.array(words, dtype=np.uint32), np.array([place], dtype=np.int32)
        if native_kernels.shuffle(words, at, values):
            self._random.set_state((name, words, int(at[0]), *rest))
        else:
            self._random.shuffle(values)


def _fill_row(lengths: npt.NDArray[np.int32], plan: EpochPlan, seed: int, arrays: Arrays) -> None:
    """Compute the arrays of a `DocumentRow` in place: they may be larger than the memory.

    The documents of all epochs are shuffled together, and so are the samples; a separate last epoch is
    shuffled apart.
    """
    random, documents = _LegacyRandom(seed), lengths.size
    order, ends, shuffle = arrays["order"], arrays["ends"], arrays["shuffle"]
    for epoch in range(plan.epochs):
        _count_up(order[epoch * documents : (epoch + 1) * documents])
    _shuffle_apart(order, (plan.epochs - 1) * documents if plan.separate else order.size, random)
    if not native_kernels.cumulate(lengths, order, ends):
        np.cumsum(lengths[order], dtype=np.int64, out=ends)
    _count_up(shuffle)
    _shuffle_apart(shuffle, plan.samples_before_last if plan.separate else plan.samples, random)


def _count_up(values: npt.NDArray[Any]) -> None:
    """Fill with 0, 1, 2 …, some at a time."""
    for start in range(0, values.size, _BLOCK):
        stop = min(start + _BLOCK, values.size)
        values[start:stop] = np.arange(start, stop)


def _shuffle_apart(values: npt.NDArray[Any], cut: int, random: _LegacyRandom) -> None:
    random.shuffle(values[:cut])
    if cut < values.size:
        random.shuffle(values[cut:])


def _blend(
    weights: npt.NDArray[np.float64], first: int, counts: Indices, datasets: npt.NDArray[np.uint16]
) -> None:
    """Fill `datasets` from sample `first` on, and advance `counts`."""
    if native_kernels.blend(weights, first, counts, datasets):
        return
    for place in range(datasets.size):
        chosen = int(np.argmax(weights * max(first + place, 1) - counts))
        datasets[place] = chosen
        counts[chosen] += 1


def _normalised(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each weight's part of their sum. np.sum adds in pairs, and its rounding is part of the order."""
    parts: npt.NDArray[np.float64] = weights / np.sum(weights)
    return parts


def with_surplus(samples: int, share: float) -> int:
    """Return how many samples a dataset with this share provides for a blend of `samples` samples."""
    return math.ceil(math.ceil(samples * share) * (1 + _SURPLUS))
