"""The `bloomery` order: which window of which dataset is sample k of the stream. Nothing is stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bloomery.data.permutation import derive_key, permute
from bloomery.data.position import Position
from bloomery.data.quotas import BLOCK, Quotas
from bloomery.data.ranges import Ranges
from bloomery.data.share import EVERYTHING, Share, next_samples
from bloomery.errors import DataError

Indices = npt.NDArray[np.int64]

_INSIDE_BLOCK, _INSIDE_EPOCH = 1, 2  # what a key is for


class TakesBatch(Protocol):
    """The part of a phase that the order reads."""

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""


class Order:
    """An endless stream of samples over the windows of some datasets, a pure function of (seed, index).

    The stream is cut into blocks of 65,536 samples. A block holds each dataset's exact quota, shuffled by a
    keyed permutation. The j-th sample of dataset i is window π(j mod nᵢ) of its epoch ⌊j / nᵢ⌋, with π keyed
    by (seed, dataset, epoch): so each window occurs once an epoch.
    """

    def __init__(self, windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if len(windows) != len(weights):
            raise ValueError(f"{len(windows)} datasets and {len(weights)} weights")
        for number, count in enumerate(windows):
            if count < 1:
                raise DataError(
                    f"Dataset {number} of the mixture holds no whole sample.",
                    remedy="Shorten data.sequence_length, or give it more text.",
                )
        self.windows = tuple(windows)
        self._seed = seed
        self._quotas = Quotas(weights)

    def next_span(self, position: Position, phase: TakesBatch, share: Share = EVERYTHING) -> Ranges:
        """The samples of the next global batch: sorted ranges, `phase.global_batch` samples in all."""
        return next_samples(position, phase.global_batch, share)

    def locate(self, span: Iterable[range]) -> tuple[Indices, Indices]:
        """(dataset, window) of each sample of the span, in its order; two arrays of shape [samples]."""
        return self.locate_samples(sample_indices(span))

    def locate_samples(self, samples: Indices) -> tuple[Indices, Indices]:
        """(dataset, window) of each stream index; two arrays of the shape [k] of `samples`."""
        if len(self.windows) == 1:  # the epoch's permutation shuffles already
            datasets, turns = np.zeros_like(samples), samples
        else:
            datasets, turns = self._split(samples)
        windows = np.empty_like(samples)
        for dataset in np.unique(datasets).tolist():
            here = np.flatnonzero(datasets == dataset)
            windows[here] = self._windows_of(dataset, turns[here])
        return datasets, windows

    def _split(self, samples: Indices) -> tuple[Indices, Indices]:
        """For each stream index its dataset, and how many samples that dataset gave before it."""
        datasets, turns = np.empty_like(samples), np.empty_like(samples)
        blocks = samples // BLOCK
        for block in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == block)
            given = self._quotas.before(block)
            bounds = np.concatenate(([0], np.cumsum(self._quotas.before(block + 1) - given)))
            key = derive_key(self._seed, _INSIDE_BLOCK, block)
            place = permute(samples[here] - block * BLOCK, BLOCK, key)
            chosen = np.searchsorted(bounds, place, side="right") - 1
            datasets[here], turns[here] = chosen, given[chosen] + place - bounds[chosen]
        return datasets, turns

    def _windows_of(self, dataset: int, turns: Indices) -> Indices:
        """The windows that a dataset gives as its `turns`-th samples."""
        count = self.windows[dataset]
        epochs, inside = np.divmod(turns, count)
        first = int(epochs[0])
        same = bool((epochs == first).all())
        key = derive_key(self._seed, _INSIDE_EPOCH, dataset, first if same else epochs)
        return permute(inside, count, key)


def sample_indices(span: Iterable[range]) -> Indices:
    """The stream indices of a span, in its order."""
    pieces = [np.arange(piece.start, piece.stop, dtype=np.int64) for piece in span]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
