"""How the tokens of a dataset become samples: windows, windows that are cut elsewhere each epoch, or packs.

A layout says how many samples a dataset has, the same in each epoch, and what each holds. Which comes when is
the order's matter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery.data.best_fit import Packing, best_fit
from bloomery.data.indexed import IndexedDataset
from bloomery.data.kept_arrays import Arrays, Shapes, shared_arrays
from bloomery.data.order import derive_key
from bloomery.errors import DataError

Indices = npt.NDArray[np.int64]

_SHIFT = 3  # the purpose of a key; `order.py` has 1 and 2
_DOCUMENTS_AT_ONCE = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Sample k of epoch e is the L tokens from o + k · L on, and the token after them; L is `length`.

    is_shifted: o is drawn for each epoch, from 0 to L - 1, so that documents are cut at other places; else it
    is 0. An epoch leaves out fewer than L tokens, or than 2 · L where o is drawn, at the ends of the dataset.
    dataset: its number, with `seed` the address of what is drawn.
    """

    sample_count: int
    length: int
    is_shifted: bool = False
    seed: int = 0
    dataset: int = 0

    @classmethod
    def of(
        cls, tokens: int, *, length: int, is_shifted: bool = False, seed: int = 0, dataset: int = 0
    ) -> Windows:
        """Return the windows of a dataset of so many tokens."""
        count = max(0, (tokens - length if is_shifted else tokens - 1) // length)
        return cls(sample_count=count, length=length, is_shifted=is_shifted, seed=seed, dataset=dataset)

    def starts(self, numbers: Indices, epochs: Indices) -> Indices:
        """Return the first token of each sample."""
        if not self.is_shifted:
            return numbers * self.length
        drawn = derive_key(self.seed, _SHIFT, self.dataset, epochs) % np.uint64(self.length)
        return numbers * self.length + drawn.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class PackedPieces:
    """The pieces of some packs, those of a pack in their order.

    row: which of the packs that were asked for. column: first place in it. start: first token of the dataset.
    length: number of tokens. continues: whether the piece goes on with a document that began before it.
    """

    row: Indices
    column: Indices
    start: Indices
    length: Indices
    continues: npt.NDArray[np.bool_]


class Packs:
    """Samples that hold whole documents, by best fit; a document takes as many places as it has tokens.

    Only a document longer than a sample is cut: into pieces of a whole sample, and one that is left. Each
    token of the dataset is a target once an epoch: the first of a document after an end of document, the
    first of another piece after the token before it. 8 bytes a piece are kept in `kept_in`, and mapped.
    """

    def __init__(self, dataset: IndexedDataset, *, length: int, kept_in: Path | None = None) -> None:
        self.length = length
        counts, digest = _count_pieces(dataset, length)
        self.packing: Packing = best_fit(counts, capacity=length)
        self.sample_count = self.packing.sample_count
        self._begins = np.concatenate([[0], np.cumsum(counts)])  # of each length among all places
        shapes: Shapes = {"places": (int(counts.sum()), np.int64)}
        fill = functools.partial(_fill_places, dataset, length, self._begins)
        self._places = shared_arrays(kept_in, f"packs-{length}-{digest}", shapes, fill)["places"]

    def filled(self, numbers: Indices) -> Indices:
        """Return how many tokens each sample holds."""
        return self.packing.filled(numbers)

    def pieces(self, numbers: Indices) -> PackedPieces:
        """Return the pieces of some samples."""
        found = self.packing.pieces(numbers)
        places = self._places[self._begins[found.length] + found.rank].astype(np.int64)
        return PackedPieces(
            row=found.row,
            column=found.column,
            start=places >> 1,
            length=found.length,
            continues=(places & 1).astype(bool),
        )


Layout = Windows | Packs


def layout_of(
    dataset: IndexedDataset,
    packing: str,
    *,
    length: int,
    seed: int,
    number: int,
    kept_in: Path | None = None,
) -> Layout:
    """Return the layout that `data.packing` names.

    number: of the dataset. kept_in: a directory of the node for what is large.
    """
    if packing == "documents":
        packs = Packs(dataset, length=length, kept_in=kept_in)
        if not packs.sample_count:
            raise DataError(
                f"The dataset {dataset.prefix} holds no document.", remedy="Give it text, or leave it out."
            )
        return packs
    is_shifted = packing == "shifted"
    return Windows.of(dataset.token_count, length=length, is_shifted=is_shifted, seed=seed, dataset=number)


def _pieces_of(
    dataset: IndexedDataset, length: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield (places, lengths) of the pieces of some documents at a time, in the dataset's order.

    A place is twice the first token, and one more if the piece continues a document.
    """
    for begin in range(0, dataset.document_count, _DOCUMENTS_AT_ONCE):
        starts = dataset.starts_between(begin, min(begin + _DOCUMENTS_AT_ONCE, dataset.document_count))
        tokens = np.diff(starts)
        pieces = -(-tokens // length)
        document = np.repeat(np.arange(tokens.size), pieces)
        turn = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        lengths = np.minimum(tokens[document] - turn * length, length)
        yield 2 * (starts[document] + turn * length) + (turn > 0), lengths


def _count_pieces(dataset: IndexedDataset, length: int) -> tuple[Indices, str]:
    """Return how many pieces there are of each length, [length + 1], and a digest of them all."""
    counts, digest = np.zeros(length + 1, dtype=np.int64), xxhash.xxh3_128()
    for places, lengths in _pieces_of(dataset, length):
        counts += np.bincount(lengths, minlength=length + 1)
        digest.update(places.data)
        digest.update(lengths.data)
    return counts, digest.hexdigest()


def _fill_places(dataset: IndexedDataset, length: int, begins: Indices, arrays: Arrays) -> None:
    """Sort the pieces by their lengths, those of one length in the dataset's order."""
    places, at = arrays["places"], begins[:-1].copy()
    for some, lengths in _pieces_of(dataset, length):
        by_length = np.argsort(lengths, kind="stable")
        counts = np.bincount(lengths, minlength=length + 1)
        before = np.cumsum(counts) - counts
        ordered = lengths[by_length]
        places[at[ordered] + np.arange(ordered.size) - before[ordered]] = some[by_length]
        at += counts
