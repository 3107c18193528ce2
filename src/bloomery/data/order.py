"""The `bloomery` order: computes which window of which dataset is sample k of the stream, without an index.

Within an epoch, windows are shuffled by a keyed permutation that is computed element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from bloomery.data import native_kernels
from bloomery.data.fair_quotas import FairQuotas
from bloomery.data.mixture import (
    BLOCK,
    RULE,
    Mixture,
    Quotas,
    Weight,
    counts_to_end,
    shares_to_end,
    whole_shares,
)
from bloomery.data.position import EVERYTHING, Position, Ranges, SampleShare, next_samples
from bloomery.errors import DataError

Unsigned = npt.NDArray[np.uint64]
# a small domain keeps traces of its structure unless it gets more rounds
_ROUNDS, _SMALL_ROUNDS, _SMALL_BITS = 6, 16, 12
_WORD = (1 << 64) - 1


def derive_key(seed: int, *address: int | npt.NDArray[np.int64]) -> Unsigned:
    """Return a 64-bit key for each address, such as (dataset, epoch).

    Arrays in the address are broadcast; the result has their shape, or [1] without any.
    """
    state = _mix(np.array([seed & _WORD], dtype=np.uint64))
    for part in address:
        state = _mix(state ^ _mix(np.atleast_1d(np.asarray(part)).astype(np.uint64)))
    return state


def permute(index: npt.NDArray[np.int64], size: int, key: Unsigned) -> npt.NDArray[np.int64]:
    """Return the value to which the permutation of range(size) with this key sends each index.

    index: any values of range(size), shape [k].
    key: shape [1] for one permutation, or [k] for a permutation of its own for each element.

    The permutation is a Feistel network on the next power of two. A value outside range(size) is sent
    through the network again until it falls inside (cycle walking, Black & Rogaway 2002), so the result is a
    permutation of range(size).
    """
    if size < 1 or size > 1 << 62:
        raise ValueError(f"a permutation of range({size})")
    sent = np.empty(index.size, dtype=np.int64)
    if native_kernels.permute(index, size, key, sent):
        return sent
    bits = max(2, (size - 1).bit_length())
    rounds = _SMALL_ROUNDS if bits <= _SMALL_BITS else _ROUNDS
    round_keys = [
        (_mix(key + np.uint64(turn + 1)) >> np.uint64(32)).astype(np.uint32) for turn in range(rounds)
    ]
    values = index.astype(np.uint64)
    values = _feistel(values, bits, round_keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        keys = [turn if turn.size == 1 else turn[outside] for turn in round_keys]
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(values: Unsigned, bits: int, round_keys: list[npt.NDArray[np.uint32]]) -> Unsigned:
    """Permute range(2**bits) by a Feistel network whose halves have at most 32 bits; they are unequal when
    `bits` is odd.
    """
    low_bits = bits // 2
    low_mask, high_mask = np.uint32((1 << low_bits) - 1), np.uint32((1 << (bits - low_bits)) - 1)
    high = (values >> np.uint64(low_bits)).astype(np.uint32)
    low = values.astype(np.uint32) & low_mask
    for turn in range(0, len(round_keys), 2):
        high ^= _scramble(low, round_keys[turn]) & high_mask
        low ^= _scramble(high, round_keys[turn + 1]) & low_mask
    return (high.astype(np.uint64) << np.uint64(low_bits)) | low.astype(np.uint64)


def _scramble(half: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return a 32-bit multiply-xorshift hash of (half, key): wraps at 2**32 on purpose."""
    mixed = (half ^ key) * np.uint32(0x9E3779B1)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(13)
    return mixed


def _mix(state: Unsigned) -> Unsigned:
    """Return the finaliser of SplitMix64 (Steele, Lea & Flood 2014): wraps at 2**64 on purpose."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


Indices = npt.NDArray[np.int64]

_INSIDE_BLOCK, _INSIDE_EPOCH = 1, 2  # the purposes of keys
_BLOCKS_KEPT = 4  # each takes 0.8 MB


def order_through(mixtures: Sequence[Mixture], seed: int) -> Order:
    """Return the order of a run whose mixture changed on the way; the first mixture begins at index 0."""
    order: Order | None = None
    ends = [*(mixture.at for mixture in mixtures[1:]), None]
    for mixture, end in zip(mixtures, ends, strict=True):
        rule, length = mixture.rule, mixture.length if mixture.rule > 2 else 0
        if order is None:
            order = Order(mixture.windows, mixture.shares, seed, rule=rule, length=length)
        else:
            order = order.changed(mixture.windows, mixture.shares, at=mixture.at, rule=rule, length=length)
        if not mixture.length:
            continue
        if rule <= 2:
            order = _to_the_sample(order, mixture, end=end)
        run_end = mixture.at + mixture.length
        if end is None or end > run_end:
            # This follows the run's last sample, where others were skipped.
            order = order.changed(mixture.windows, mixture.shares_after, at=run_end, rule=rule)
    assert order is not None, "a run has a mixture"
    return order


def _to_the_sample(order: Order, mixture: Mixture, *, end: int | None) -> Order:
    """Return the order with a last block that is cut to end at the run's last sample, so that budgets are met
    exactly.

    end: stream index where another mixture begins; None if this mixture is the last.
    """
    run_end = mixture.at + mixture.length
    size = (mixture.length - 1) % BLOCK + 1
    begin = run_end - size
    if end is None or end > begin:
        before = order.given_before(begin) - order.given_before(mixture.at)
        counts = counts_to_end(mixture.shares, before.tolist(), samples=mixture.length)
        order = order.changed(mixture.windows, counts, at=begin, rule=mixture.rule, block=size)
    return order


class Order:
    """Maps each index of an endless stream to a dataset and a window of it, as a pure function of (seed,
    index).

    The stream is cut into blocks of 65,536 samples. By rule 3 each dataset is within one sample of its share
    at every index (`FairQuotas`); by the earlier rules a block holds each dataset's exact quota, shuffled by
    a keyed permutation. The j-th sample of dataset i is window π(j mod nᵢ) of its epoch ⌊j / nᵢ⌋, with π
    keyed by (seed, dataset, epoch): so each window occurs once an epoch. Quotas and epochs survive a change
    of the mixture, see `changed`.
    """

    def __init__(
        self,
        windows: Sequence[int],
        weights: Sequence[Weight],
        seed: int,
        *,
        rule: int = RULE,
        block: int = BLOCK,
        length: int = 0,
    ) -> None:
        """Make the order. length: of a stream whose budgets are spent at its end (rule 3); 0: it has none."""
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
        self._quotas: Quotas | FairQuotas
        if rule > 2:
            shares = whole_shares(weights)
            shares = shares_to_end(shares, samples=length) if length else shares
            self._quotas = FairQuotas(shares, block=block, length=length)
        else:
            self._quotas = Quotas(weights, rule=rule, block=block)
        self._size = block
        self._blocks: dict[int, tuple[npt.NDArray[np.int32], Indices]] = {}
        self._lock = Lock()  # a reading thread and the caller may both ask for a block
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
        length: int = 0,
    ) -> Order:
        """Return the order with another mixture from stream index `at` on; earlier samples stay as they were.

        The datasets of this order come first and in their order (weight 0 retires one); new ones follow. Each
        dataset goes on in its epoch where it was.
        """
        if tuple(windows[: len(self.windows)]) != self.windows:
            raise DataError(
                f"A running mixture of datasets with {self.windows} samples cannot become {tuple(windows)}.",
                remedy="Keep the datasets in their order; retire one with weight 0; add new ones last.",
            )
        order = Order(windows, weights, self.seed, rule=rule, block=block, length=length)
        order._start, order._earlier = at, self
        order._before_start[: len(self.windows)] = self.given_before(at)
        return order

    def given_before(self, sample: int) -> Indices:
        """Return the number of samples that each dataset gives at stream indices below `sample`;
        [datasets].
        """
        if self._earlier is not None and sample <= self._start:
            counts = np.zeros_like(self._before_start)
            counts[: len(self._earlier.windows)] = self._earlier.given_before(sample)
            return counts
        block, inside = divmod(sample - self._start, self._size)
        start = self._start + block * self._size
        datasets, _ = self.split(np.arange(start, start + inside, dtype=np.int64))
        counts = self._quotas.before(block) + np.bincount(datasets, minlength=len(self.windows))
        return counts + self._before_start

    def sample_of_turn(self, dataset: int, turn: int, *, below: int) -> int | None:
        """Return the stream index, if it is below `below`, at which a dataset gives its sample `turn` (from
        0).
        """
        if below <= 0:
            return None
        if self._earlier is not None and dataset < len(self._earlier.windows):
            earlier = self._earlier.sample_of_turn(dataset, turn, below=min(below, self._start))
            if earlier is not None or below <= self._start:
                return earlier
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

    def next_span(self, position: Position, global_batch: int, share: SampleShare = EVERYTHING) -> Ranges:
        """Return the samples of the next global batch as sorted ranges, `global_batch` samples in
        all.
        """
        return next_samples(position, global_batch, share)

    def locate(self, span: Iterable[range]) -> tuple[Indices, Indices]:
        """Return (dataset, window) of each sample of the span, in its order, as two arrays of shape
        [samples].
        """
        return self.locate_samples(sample_indices(span))

    def locate_samples(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return (dataset, window) of each stream index, as two arrays of the shape [k] of `samples`."""
        datasets, turns = self._turns(samples)
        return datasets, self._windows(datasets, turns)

    def locate_epochs(self, samples: Indices) -> tuple[Indices, Indices, Indices]:
        """Return (dataset, window, epoch of the dataset) of each stream index; each [k]."""
        datasets, turns = self._turns(samples)
        return datasets, self._windows(datasets, turns), turns // self._sizes[datasets]

    def _windows(self, datasets: Indices, turns: Indices) -> Indices:
        windows = np.empty_like(turns)
        if native_kernels.windows(self._sizes, self.seed, _INSIDE_EPOCH, datasets, turns, windows):
            return windows
        for dataset in np.unique(datasets).tolist():
            of_dataset = np.flatnonzero(datasets == dataset)
            windows[of_dataset] = self._windows_of(dataset, turns[of_dataset])
        return windows

    def _turns(self, samples: Indices) -> tuple[Indices, Indices]:
        """What `split` returns, under the mixture that was in force at each index."""
        if self._earlier is not None and (old := samples < self._start).any():
            datasets, turns = np.empty_like(samples), np.empty_like(samples)
            datasets[old], turns[old] = self._earlier._turns(samples[old])
            datasets[~old], turns[~old] = self.split(samples[~old])
            return datasets, turns
        return self.split(samples)

    def split(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return for each stream index its dataset, and how many samples that dataset gave before it."""
        if len(self.windows) == 1:  # the epoch's permutation shuffles enough
            return np.zeros_like(samples), samples + (int(self._before_start[0]) - self._start)
        local = samples - self._start
        if not local.size:
            return np.empty_like(samples), np.empty_like(samples)
        first, last = (int(extreme) // self._size for extreme in (local.min(), local.max()))
        if first == last:
            chosen, block_turns = self._block(first)
            inside = local - first * self._size
            datasets, turns = chosen[inside].astype(np.int64), block_turns[inside]
        else:
            datasets, turns = np.empty_like(samples), np.empty_like(samples)
            blocks, inside = local // self._size, local % self._size
            for block in np.unique(blocks).tolist():
                in_block = np.flatnonzero(blocks == block)
                chosen, block_turns = self._block(block)
                datasets[in_block] = chosen[inside[in_block]]
                turns[in_block] = block_turns[inside[in_block]]
        if self._earlier is not None:
            turns += self._before_start[datasets]
        return datasets, turns

    def _block(self, block: int) -> tuple[npt.NDArray[np.int32], Indices]:
        """Return (dataset, turn) of each sample of a block, and keep the last few blocks."""
        with self._lock:
            if block not in self._blocks:
                while len(self._blocks) >= _BLOCKS_KEPT:
                    del self._blocks[next(iter(self._blocks))]
                self._blocks[block] = (
                    self._quotas.samples_of(block)
                    if isinstance(self._quotas, FairQuotas)
                    else self._shuffled_block(block, self._quotas)
                )
            return self._blocks[block]

    def _shuffled_block(self, block: int, totals: Quotas) -> tuple[npt.NDArray[np.int32], Indices]:
        counts = totals.before(block)
        quotas = totals.before(block + 1) - counts
        key = derive_key(self.seed, _INSIDE_BLOCK, self._start, block)
        size = self._size
        chosen, turns = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int64)
        if native_kernels.mix_block(quotas, counts, size, int(key[0]), chosen, turns):
            return chosen, turns
        place = permute(np.arange(size, dtype=np.int64), size, key)
        chosen = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)[place]
        first_turns = counts - np.cumsum(quotas) + quotas
        by_dataset = np.argsort(chosen, kind="stable")  # each dataset gives its turns in stream order
        turns[by_dataset] = np.arange(size) + first_turns[chosen[by_dataset]]
        return chosen, turns

    def _windows_of(self, dataset: int, turns: Indices) -> Indices:
        """Return the windows that a dataset gives as its `turns`-th samples."""
        count = self.windows[dataset]
        epochs, inside = np.divmod(turns, count)
        first = int(epochs[0])
        same = bool((epochs == first).all())
        key = derive_key(self.seed, _INSIDE_EPOCH, dataset, first if same else epochs)
        return permute(inside, count, key)


def sample_indices(span: Iterable[range]) -> Indices:
    """Return the stream indices of a span, in its order."""
    pieces = [np.arange(piece.start, piece.stop, dtype=np.int64) for piece in span]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
