"""Cuts a dataset's tokens into samples: windows, windows shifted each epoch, or best-fit packed documents.

Pieces of one length can be exchanged, so what is packed is how many there are of each length. The packing is
a table of some thousand groups of samples that are filled alike; which pieces a sample holds is computed from
it. Its size depends on the length of a sample, and not on the number of documents.

A layout says how many samples a dataset has, the same in each epoch, and what each holds. Which comes when is
the order's matter.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery.data.indexed import IndexedDataset
from bloomery.data.order import derive_key
from bloomery.data.storage import Arrays, Shapes, shared_arrays
from bloomery.errors import DataError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of some samples, those of a sample in their order.

    row: which of the samples that were asked for a piece is in. column: its first place there.
    length: its places. rank: its number among all pieces of its length.
    """

    row: Indices
    column: Indices
    length: Indices
    rank: Indices


class Packing:
    """What `best_fit` returns.

    sample_count: number of samples. capacity: places of a sample.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, int, int, int]],
        fills: Sequence[tuple[int, int, int, int]],
        *,
        capacity: int,
    ) -> None:
        """groups: (first sample, end, last of its fills, places left), in the order of samples.

        fills: (the fill before it or −1, length, times, base): sample s holds the pieces base + s · times and
        the `times` − 1 after it of this length.
        """
        columns = np.array(groups, dtype=np.int64).reshape(-1, 4)
        self._begins, self._last, self._free = columns[:, 0], columns[:, 2], columns[:, 3]
        self._fills = np.array(fills, dtype=np.int64).reshape(-1, 4)
        self.capacity = capacity
        self.sample_count = int(columns[-1, 1]) if len(columns) else 0

    def filled(self, samples: Indices) -> Indices:
        """Return how many places of each sample are filled."""
        return self.capacity - self._free[self._group_of(samples)]

    @property
    def empty_places(self) -> int:
        """Places that are empty, in all samples together."""
        sizes = np.diff(self._begins, append=self.sample_count)
        return int((sizes * self._free).sum())

    def pieces(self, samples: Indices) -> Pieces:
        """Return the pieces of some samples."""
        fill = self._last[self._group_of(samples)]
        rows, columns, lengths, ranks = [], [], [], []
        row, at = np.arange(samples.size), np.zeros(samples.size, dtype=np.int64)
        while row.size:  # once for each piece of the sample that has most kinds of them
            before, length, times, base = self._fills[fill].T
            inner = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
            rows.append(np.repeat(row, times))
            columns.append(np.repeat(at, times) + inner * np.repeat(length, times))
            lengths.append(np.repeat(length, times))
            ranks.append(np.repeat(base + samples[row] * times, times) + inner)
            more = before >= 0
            row, at, fill = row[more], (at + length * times)[more], before[more]
        if not rows:
            none = np.empty(0, dtype=np.int64)
            return Pieces(row=none, column=none, length=none, rank=none)
        joined = [np.concatenate(column) for column in (rows, columns, lengths, ranks)]
        order = np.argsort(joined[0], kind="stable")
        row, column, length, rank = (values[order] for values in joined)
        return Pieces(row=row, column=column, length=length, rank=rank)

    def _group_of(self, samples: Indices) -> Indices:
        return np.searchsorted(self._begins, samples, side="right") - 1


def best_fit(counts: Sequence[int] | Indices, *, capacity: int) -> Packing:
    """Pack pieces into samples of `capacity` places: each, from the longest to the shortest, where it leaves
    the least, and in a new sample where it fits nowhere.

    counts: number of pieces of each length, from 0 to `capacity`; [capacity + 1].

    A sample that just took a piece leaves less than any other that can take one more of the same length, so
    it is filled on: samples of equal room are filled together. A group is met at most log2(capacity) times,
    since each filling takes more than half of its room; so the work is at most capacity · log2(capacity)
    steps, whatever the number of pieces.
    """
    fills: list[tuple[int, int, int, int]] = []
    full: list[tuple[int, int, int, int]] = []
    room: dict[int, list[tuple[int, int, int]]] = {}  # by places left: (first sample, end, last fill)
    rooms: list[int] = []  # its keys, sorted
    total = 0

    def put(free: int, begin: int, end: int, fill: int) -> None:
        if not free:
            full.append((begin, end, fill, 0))
        elif free in room:
            room[free].append((begin, end, fill))
        else:
            room[free] = [(begin, end, fill)]
            insort(rooms, free)

    for length in range(capacity, 0, -1):
        left, rank = int(counts[length]), 0
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                free, before, begin = capacity, -1, total
                most = -(-left // (capacity // length))
                end = total = total + most
            else:
                free = rooms[at]
                begin, end, before = room[free].pop()
                if not room[free]:
                    del room[free], rooms[at]
            times = free // length
            taken = min(end - begin, left // times)
            if not taken:  # fewer pieces than one sample takes
                taken, times = 1, left
            if begin + taken < end:
                put(free, begin + taken, end, before)
            fills.append((before, length, times, rank - begin * times))
            put(free - length * times, begin, begin + taken, len(fills) - 1)
            rank, left = rank + taken * times, left - taken * times
    groups = [(*group, free) for free, held in room.items() for group in held]
    return Packing(sorted([*full, *groups]), fills, capacity=capacity)


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


def sample_tokens(layout: Layout, tokens: int) -> Fraction:
    """Return how many tokens a sample of a dataset of so many tokens holds, on average: packs have places
    that are empty.
    """
    if isinstance(layout, Packs):
        return Fraction(tokens, layout.sample_count)
    return Fraction(layout.length)


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
