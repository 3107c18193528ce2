"""The `bloomery` order: which window of which dataset is sample k of the stream. Nothing is stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bloomery.data import kernels
from bloomery.data.mixture import Mixture
from bloomery.data.permutation import derive_key, permute
from bloomery.data.position import Position
from bloomery.data.quotas import BLOCK, RULE, Quotas, Weight, counts_to_end
from bloomery.data.ranges import Ranges
from bloomery.data.share import EVERYTHING, Share, next_samples
from bloomery.errors import DataError

Indices = npt.NDArray[np.int64]

_INSIDE_BLOCK, _INSIDE_EPOCH = 1, 2  # what a key is for
_BLOCKS_KEPT = 4  # 0.8 MB each


class TakesBatch(Protocol):
    """The part of a phase that the order reads."""

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""


def order_through(mixtures: Sequence[Mixture], seed: int) -> Order:
    """The order of a run whose mixture changed on the way; the first begins at 0."""
    order: Order | None = None
    ends = [*(mixture.at for mixture in mixtures[1:]), None]
    for mixture, end in zip(mixtures, ends, strict=True):
        if order is None:
            order = Order(mixture.windows, mixture.shares, seed, rule=mixture.rule)
        else:
            order = order.changed(mixture.windows, mixture.shares, at=mixture.at, rule=mixture.rule)
        if mixture.length:
            order = _to_the_sample(order, mixture, end=end)
    assert order is not None, "a run has a mixture"
    return order


def _to_the_sample(order: Order, mixture: Mixture, *, end: int | None) -> Order:
    """The order whose last block of the mixture ends where the run does, with what budgets leave for it.

    end: where another mixture begins. What follows the run's last sample, since others were skipped, comes
    from datasets without a budget where there are any.
    """
    run_end = mixture.at + mixture.length
    size = (mixture.length - 1) % BLOCK + 1
    begin = run_end - size
    if end is None or end > begin:
        given = order.given_before(begin) - order.given_before(mixture.at)
        counts = counts_to_end(mixture.shares, given.tolist(), samples=mixture.length)
        order = order.changed(mixture.windows, counts, at=begin, rule=mixture.rule, block=size)
    if end is None or end > run_end:
        order = order.changed(mixture.windows, mixture.shares_after, at=run_end, rule=mixture.rule)
    return order


class Order:
    """An endless stream of samples over the windows of some datasets, a pure function of (seed, index).

    The stream is cut into blocks of 65,536 samples. A block holds each dataset's exact quota, shuffled by a
    keyed permutation. The j-th sample of dataset i is window π(j mod nᵢ) of its epoch ⌊j / nᵢ⌋, with π keyed
    by (seed, dataset, epoch): so each window occurs once an epoch. Quotas and epochs survive a change of the
    mixture, see `changed`.
    """

    def __init__(
        self,
        windows: Sequence[int],
        weights: Sequence[Weight],
        seed: int,
        *,
        rule: int = RULE,
        block: int = BLOCK,
    ) -> None:
        if len(windows) != len(weights):
            raise ValueError(f"{len(windows)} datasets and {len(weights)} weights")
        for number, count in enumerate(windows):
            if count < 1:
                raise DataError(
                    f"Dataset {number} of the mixture holds no whole sample.",
                    remedy="Shorten data.sequence_length, or give it more text.",
                )
        self.windows = tuple(windows)
        self._sizes = np.array(self.windows, dtype=np.int64)
        self.seed = seed
        self._quotas = Quotas(weights, rule=rule, block=block)
        self._size = block
        self._blocks: dict[int, tuple[npt.NDArray[np.int32], Indices]] = {}
        self._lock = Lock()  # a reading thread and the caller may both ask
        self._start = 0
        self._before_start = np.zeros(len(self.windows), dtype=np.int64)
        self._earlier: Order | None = None

    def changed(
        self,
        windows: Sequence[int],
        weights: Sequence[Weight],
        *,
        at: int,
        rule: int = RULE,
        block: int = BLOCK,
    ) -> Order:
        """The order with another mixture from stream index `at` on; what lies before stays as it was.

        The datasets of this order come first, in their order (weight 0 retires one); new ones follow. Each
        goes on in its epoch where it was.
        """
        if tuple(windows[: len(self.windows)]) != self.windows:
            raise DataError(
                f"A running mixture of datasets with {self.windows} samples cannot become {tuple(windows)}.",
                remedy="Keep the datasets in their order; retire one with weight 0; add new ones last.",
            )
        order = Order(windows, weights, self.seed, rule=rule, block=block)
        order._start, order._earlier = at, self
        order._before_start[: len(self.windows)] = self.given_before(at)
        return order

    def given_before(self, sample: int) -> Indices:
        """Samples that each dataset gives at stream indices below `sample`; [datasets]."""
        if self._earlier is not None and sample <= self._start:
            given = np.zeros_like(self._before_start)
            given[: len(self._earlier.windows)] = self._earlier.given_before(sample)
            return given
        block, inside = divmod(sample - self._start, self._size)
        start = self._start + block * self._size
        datasets, _ = self.split(np.arange(start, start + inside, dtype=np.int64))
        given = self._quotas.before(block) + np.bincount(datasets, minlength=len(self.windows))
        return given + self._before_start

    def sample_of_turn(self, dataset: int, turn: int, *, below: int) -> int | None:
        """The stream index, if it is below `below`, at which a dataset gives its sample `turn` (from 0)."""
        if below <= 0:
            return None
        if self._earlier is not None and dataset < len(self._earlier.windows):
            found = self._earlier.sample_of_turn(dataset, turn, below=min(below, self._start))
            if found is not None or below <= self._start:
                return found
        wanted = turn - int(self._before_start[dataset])
        if wanted < 0:
            return None
        if len(self.windows) == 1:
            sample = self._start + wanted
        else:
            blocks = -(-(below - self._start) // self._size)
            block = self._quotas.block_of(dataset, wanted, below=blocks)
            if block is None:
                return None
            chosen, turns = self._block(block)
            inside = np.flatnonzero((chosen == dataset) & (turns == wanted))
            sample = self._start + block * self._size + int(inside[0])
        return sample if sample < below else None

    def next_span(self, position: Position, phase: TakesBatch, share: Share = EVERYTHING) -> Ranges:
        """The samples of the next global batch: sorted ranges, `phase.global_batch` samples in all."""
        return next_samples(position, phase.global_batch, share)

    def locate(self, span: Iterable[range]) -> tuple[Indices, Indices]:
        """(dataset, window) of each sample of the span, in its order; two arrays of shape [samples]."""
        return self.locate_samples(sample_indices(span))

    def locate_samples(self, samples: Indices) -> tuple[Indices, Indices]:
        """(dataset, window) of each stream index; two arrays of the shape [k] of `samples`."""
        windows = np.empty_like(samples)
        if self._earlier is not None and (old := samples < self._start).any():
            datasets = np.empty_like(samples)
            datasets[old], windows[old] = self._earlier.locate_samples(samples[old])
            datasets[~old], windows[~old] = self.locate_samples(samples[~old])
            return datasets, windows
        datasets, turns = self.split(samples)
        if kernels.windows(self._sizes, self.seed, _INSIDE_EPOCH, datasets, turns, windows):
            return datasets, windows
        for dataset in np.unique(datasets).tolist():
            here = np.flatnonzero(datasets == dataset)
            windows[here] = self._windows_of(dataset, turns[here])
        return datasets, windows

    def split(self, samples: Indices) -> tuple[Indices, Indices]:
        """For each stream index its dataset, and how many samples that dataset gave before it."""
        if len(self.windows) == 1:  # the epoch's permutation shuffles already
            return np.zeros_like(samples), samples + (int(self._before_start[0]) - self._start)
        local = samples - self._start
        datasets, turns = np.empty_like(samples), np.empty_like(samples)
        blocks, inside = local // self._size, local % self._size
        alone = blocks.size > 0 and bool((blocks == blocks[0]).all())
        for block in [int(blocks[0])] if alone else np.unique(blocks).tolist():
            here = slice(None) if alone else np.flatnonzero(blocks == block)
            chosen, block_turns = self._block(block)
            datasets[here] = chosen[inside[here]]
            turns[here] = block_turns[inside[here]]
        return datasets, turns + self._before_start[datasets]

    def _block(self, block: int) -> tuple[npt.NDArray[np.int32], Indices]:
        """(dataset, turn) of each sample of a block. The last few blocks asked for are kept."""
        with self._lock:
            if block not in self._blocks:
                while len(self._blocks) >= _BLOCKS_KEPT:
                    del self._blocks[next(iter(self._blocks))]
                self._blocks[block] = self._shuffled_block(block)
            return self._blocks[block]

    def _shuffled_block(self, block: int) -> tuple[npt.NDArray[np.int32], Indices]:
        given = self._quotas.before(block)
        quotas = self._quotas.before(block + 1) - given
        key = derive_key(self.seed, _INSIDE_BLOCK, self._start, block)
        size = self._size
        chosen, turns = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int64)
        if kernels.mix_block(quotas, given, size, int(key[0]), chosen, turns):
            return chosen, turns
        place = permute(np.arange(size, dtype=np.int64), size, key)
        chosen = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)[place]
        first_turns = given - np.cumsum(quotas) + quotas
        by_dataset = np.argsort(chosen, kind="stable")  # so each dataset gives its turns in stream order
        turns[by_dataset] = np.arange(size) + first_turns[chosen[by_dataset]]
        return chosen, turns

    def _windows_of(self, dataset: int, turns: Indices) -> Indices:
        """The windows that a dataset gives as its `turns`-th samples."""
        count = self.windows[dataset]
        epochs, inside = np.divmod(turns, count)
        first = int(epochs[0])
        same = bool((epochs == first).all())
        key = derive_key(self.seed, _INSIDE_EPOCH, dataset, first if same else epochs)
        return permute(inside, count, key)


def sample_indices(span: Iterable[range]) -> Indices:
    """The stream indices of a span, in its order."""
    pieces = [np.arange(piece.start, piece.stop, dtype=np.int64) for piece in span]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
