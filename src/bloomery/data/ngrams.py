"""Reads documents block by block, hashes their n-grams of one size, and looks hashes up in a set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery.data.indexed import IndexedDataset

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

_BASE = np.uint64(0x9E3779B97F4A7C15)
_DOCUMENTS_AT_ONCE, _TOKENS_AT_ONCE = 1 << 13, 1 << 20
HASHED_TOKENS = 1 << 24
"""The tokens of a document that are hashed, from its beginning; the rest of a longer one is left out."""


@dataclass(frozen=True, kw_only=True)
class SomeDocuments:
    """Neighbouring documents of a dataset.

    tokens: of all of them, one after another. left_out: tokens at the end of a document that is too long.
    """

    first: int
    lengths: Indices
    tokens: npt.NDArray[Any]  # Any: an integer type of token files
    left_out: int = 0

    @property
    def starts(self) -> Indices:
        """Where each begins within `tokens`."""
        return np.cumsum(self.lengths) - self.lengths


def documents_in_turn(
    dataset: IndexedDataset, *, begin: int = 0, stop: int | None = None
) -> Iterator[SomeDocuments]:
    """Yield the documents [begin, stop) in their order, some at a time. Memory: that of a million tokens, or
    of one document of at most HASHED_TOKENS.
    """
    stop = dataset.document_count if stop is None else stop
    for block in range(begin, stop, _DOCUMENTS_AT_ONCE):
        starts = dataset.starts_between(block, min(block + _DOCUMENTS_AT_ONCE, stop))
        at = 0
        while at < starts.size - 1:
            end = int(np.searchsorted(starts, starts[at] + _TOKENS_AT_ONCE, side="right")) - 1
            end = min(max(end, at + 1), starts.size - 1)
            lengths = np.diff(starts[at : end + 1])
            size = int(lengths.sum())
            left_out = max(0, size - HASHED_TOKENS) if lengths.size == 1 else 0
            if left_out:
                lengths, size = np.array([HASHED_TOKENS]), HASHED_TOKENS
            tokens = dataset.window(int(starts[at]), size)
            yield SomeDocuments(first=block + at, lengths=lengths, tokens=tokens, left_out=left_out)
            at = end


def tokens_of_document(dataset: IndexedDataset, number: int) -> npt.NDArray[Any]:
    """Return the tokens of one document, without a copy of the index of all."""
    start, stop = dataset.starts_between(number, number + 1).tolist()
    return dataset.window(start, stop - start)


def ngram_hashes(tokens: npt.NDArray[Any], lengths: Indices, size: int) -> tuple[Hashes, Indices]:
    """Return the hash of every n-gram within each document, and how many each has; [ngrams], [documents].

    size: n. A document of fewer tokens is one n-gram, of all its tokens; an empty one has none.
    """
    values = tokens.astype(np.uint64) + np.uint64(1)  # an id of 0 counts too
    sums = np.zeros(values.size, dtype=np.uint64)
    starts = np.cumsum(lengths) - lengths
    places = np.arange(values.size)
    left = np.repeat(starts + lengths, lengths) - places  # tokens from here to the document's end
    for step in range(size):
        inside = values[step:].copy() if step else values
        used = left[: inside.size] > step
        sums[: inside.size] = np.where(used, sums[: inside.size] * _BASE + inside, sums[: inside.size])
    whole = left >= size
    is_short = np.repeat((lengths < size) & (lengths > 0), lengths)
    wanted = whole | (is_short & (places == np.repeat(starts, lengths)))
    counts = np.where(lengths >= size, lengths - size + 1, (lengths > 0).astype(np.int64))
    return _mixed(sums[wanted]), counts


def _mixed(state: Hashes) -> Hashes:
    """Return the finaliser of SplitMix64 (Steele, Lea & Flood 2014): wraps at 2**64 on purpose."""
    state = state + _BASE
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class HashSet:
    """A sorted set of hashes; `holds` says which of many hashes are in it: a bitmap first, then a search."""

    _BITS = 24

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = np.unique(hashes)
        self._maybe = np.zeros(1 << self._BITS, dtype=bool)
        self._maybe[self._slots(self.hashes)] = True

    def __len__(self) -> int:
        return int(self.hashes.size)

    def holds(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return for each hash whether the set holds it."""
        found = self._maybe[self._slots(hashes)]
        places = np.flatnonzero(found)
        at = np.searchsorted(self.hashes, hashes[places])
        found[places] = (
            self.hashes[np.minimum(at, self.hashes.size - 1)] == hashes[places] if len(self) else False
        )
        return found

    def _slots(self, hashes: Hashes) -> Indices:
        return (hashes >> np.uint64(64 - self._BITS)).astype(np.int64)
