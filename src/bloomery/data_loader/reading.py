"""Reads samples from memory-mapped token files into arrays, and counts bigrams in them.

Tokens are copied, widened to int32 and checked against the vocabulary in one pass. Legend: k samples of L
tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery.data import native_kernels
from bloomery.data.answers import AnswerTokens
from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import DocumentRow, MegatronOrder
from bloomery.data.native_kernels import DamagedPage
from bloomery.data.order import Order
from bloomery.data.sample_layout import Layout, PackedPieces, Packs, Windows
from bloomery.data_loader.packs import IGNORED, SampleRows, empty_packs, read_packs
from bloomery.errors import DataError

Indices = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
"""The type of token ids in main memory: half the bytes of the int64 that a device widens them to."""

_MOST_IDS = 1 << 31
_SAMPLES_AHEAD = 64


class Samples:
    """Reads the samples of an order. It holds no state of a read, so threads may share it.

    vocabulary_size: token ids at or above it are refused; None refuses only ids that do not fit into int32.
    layouts: how each dataset's tokens become samples; none: windows at multiples of L.
    eod: the end-of-document token, which packs of documents begin with.
    answers: which tokens of each dataset count in the loss; none: all do.
    """

    def __init__(
        self,
        order: Order | MegatronOrder,
        datasets: Sequence[IndexedDataset],
        *,
        sequence_length: int,
        vocabulary_size: int | None = None,
        layouts: Sequence[Layout] = (),
        eod: int = 0,
        answers: Sequence[AnswerTokens] = (),
    ) -> None:
        self._order = order
        self._datasets = tuple(datasets)
        self._length = sequence_length
        self._vocabulary_size = _MOST_IDS if vocabulary_size is None else vocabulary_size
        self._layouts = tuple(layouts)
        self._eod, self._answers = eod, tuple(answers)

    def read(
        self, samples: Indices, *, beginning: Callable[[str], None] = lambda name: None
    ) -> tuple[Ids, Ids]:
        """Return inputs and targets of some samples, each int32 [k, L]: what `rows` returns, without more."""
        rows = self.rows(samples, beginning=beginning)
        return rows.tokens, rows.targets

    def rows(self, samples: Indices, *, beginning: Callable[[str], None] = lambda name: None) -> SampleRows:
        """Return some samples.

        beginning: is called with the name of each dataset before it is read.
        Of windows, tokens and targets are views of one array, [k, L + 1]: a target is the input of the next
        place.
        """
        rows = self._read(samples, beginning=beginning)
        if not self._answers:
            return rows
        targets = np.full(rows.targets.shape, IGNORED, dtype=np.int32)
        for dataset, pieces in self._target_pieces(samples):
            answers, places = self._answers[dataset], (pieces.row, pieces.column, pieces.start, pieces.length)
            for row, column, start, length in zip(*(place.tolist() for place in places), strict=True):
                mask, piece = answers.mask(start, length), slice(column, column + length)
                targets[row, piece][mask] = rows.targets[row, piece][mask]
        return SampleRows(tokens=rows.tokens, targets=targets, documents=rows.documents)

    def _read(self, samples: Indices, *, beginning: Callable[[str], None]) -> SampleRows:
        if any(isinstance(layout, Packs) for layout in self._layouts):
            return self._packed(samples, beginning=beginning)
        read = np.empty((samples.size, self._length + 1), dtype=np.int32)
        for dataset, rows, numbers, epochs in self._by_dataset(samples):
            source = self._datasets[dataset]
            beginning(str(source.prefix))
            row = self._order.rows[dataset] if isinstance(self._order, MegatronOrder) else None
            starts = numbers * self._length if epochs is None else self._starts(dataset, numbers, epochs)
            largest = read_rows(source, starts, rows, read, documents=row)
            if int(largest.max()) >= self._vocabulary_size:
                first = int(np.flatnonzero(largest >= self._vocabulary_size)[0])
                self._refuse(source, int(starts[first]), int(largest[first]), documents=row)
        return SampleRows(tokens=read[:, :-1], targets=read[:, 1:])

    def counted(self, samples: Indices) -> int:
        """Return how many targets of some samples count in the loss; no token is read."""
        if self._answers:
            return sum(
                self._answers[dataset].count(pieces.start, pieces.length)
                for dataset, pieces in self._target_pieces(samples)
            )
        if not any(isinstance(layout, Packs) for layout in self._layouts):
            return samples.size * self._length
        which, numbers = self._order.locate_samples(samples)
        return sum(
            int(layout.filled(numbers[which == dataset]).sum())
            for dataset, layout in enumerate(self._layouts)
            if isinstance(layout, Packs)
        )

    def _target_pieces(self, samples: Indices) -> Iterator[tuple[int, PackedPieces]]:
        """Yield each dataset that occurs with the pieces of it that are the targets of some samples."""
        for dataset, rows, numbers, epochs in self._by_dataset(samples):
            layout = self._layouts[dataset] if self._layouts else None
            if isinstance(layout, Packs):
                pieces = layout.pieces(numbers)
                yield dataset, replace(pieces, row=rows[pieces.row])
                continue
            starts = numbers * self._length if epochs is None else self._starts(dataset, numbers, epochs)
            yield (
                dataset,
                PackedPieces(
                    row=rows,
                    column=np.zeros_like(rows),
                    start=starts + 1,  # a target is the token behind its input
                    length=np.full_like(rows, self._length),
                    continues=np.ones(rows.size, dtype=bool),
                ),
            )

    def _packed(self, samples: Indices, *, beginning: Callable[[str], None]) -> SampleRows:
        rows = empty_packs(samples.size, self._length, eod=self._eod)
        for dataset, places, numbers, _ in self._by_dataset(samples):
            source, layout = self._datasets[dataset], self._layouts[dataset]
            assert isinstance(layout, Packs), "all datasets of a run have layouts of one kind"
            beginning(str(source.prefix))
            pieces = layout.pieces(numbers)
            largest, start = read_packs(source, pieces, places, rows, eod=self._eod)
            if largest >= self._vocabulary_size:
                self._refuse(source, start, largest, documents=None)
        return rows

    def _starts(self, dataset: int, numbers: Indices, epochs: Indices) -> Indices:
        layout = self._layouts[dataset]
        assert isinstance(layout, Windows), "packs are read by themselves"
        return layout.starts(numbers, epochs)

    def _by_dataset(self, samples: Indices) -> Iterator[tuple[int, Indices, Indices, Indices | None]]:
        """Yield each dataset that occurs, its places in `samples`, and the windows and epochs at these
        places; None for epochs that change nothing.
        """
        epochs: Indices | None = None
        if isinstance(self._order, Order) and any(_is_shifted(layout) for layout in self._layouts):
            which, numbers, epochs = self._order.locate_epochs(samples)
        else:
            which, numbers = self._order.locate_samples(samples)
        # a sort would take noticeable time
        if which.size and (len(self._datasets) == 1 or (which == which[0]).all()):
            yield int(which[0]), np.arange(which.size), numbers, epochs
            return
        for dataset in np.unique(which).tolist():
            rows = np.flatnonzero(which == dataset)
            yield dataset, rows, numbers[rows], None if epochs is None else epochs[rows]

    def _refuse(
        self, source: IndexedDataset, start: int, largest: int, *, documents: DocumentRow | None
    ) -> None:
        end = start + self._length
        place = f"tokens {start:,} to {end:,}"
        if documents is not None:
            number, first, _ = documents.pieces(start // self._length)[0]
            place = f"the sample that begins with token {first:,} of document {number:,}"
        raise _beyond_vocabulary(source, largest, place, vocabulary=self._vocabulary_size)


def _beyond_vocabulary(source: IndexedDataset, largest: int, place: str, *, vocabulary: int) -> DataError:
    """Return the error of an id that the vocabulary lacks. largest: the id; a negative one is above 2⁶³."""
    problem = f"token id {largest}" if largest < 1 << 63 else "a negative token id"
    return DataError(
        f"{source.prefix} has {problem} within {place}, and the vocabulary ends at {vocabulary - 1}.",
        remedy="Set data.tokenizer to the one that made this dataset, or tokenise it again.",
    )


def _is_shifted(layout: Layout) -> bool:
    return isinstance(layout, Windows) and layout.is_shifted


def read_rows(
    source: IndexedDataset,
    starts: Indices,
    rows: Indices,
    out: Ids,
    *,
    documents: DocumentRow | None = None,
    ahead: int = _SAMPLES_AHEAD,
) -> npt.NDArray[np.uint64]:
    """Fill some rows of `out`, [.., L + 1], with the samples that begin at tokens `starts`.

    starts: first token of each sample, counted in the file or, with `documents`, in their row.
    ahead: how many samples before it is read a page is requested from the system.
    Returns each sample's largest id, a negative one as unsigned; [rows].
    """
    largest = np.empty(starts.size, dtype=np.uint64)
    starts = np.ascontiguousarray(starts)
    if source.mirror is None:
        _copy_rows(source, starts, rows, out, largest, documents=documents, ahead=ahead)
        return largest
    count = out.shape[1]
    _refuse_outside(source, starts, count, documents)
    ranges = [_byte_ranges(source, start, count, documents) for start in starts.tolist()]
    mirror = source.mirror
    for group in _groups(
        [mirror.blocks_of(*byte_range) for byte_range in ranges], most=max(1, mirror.capacity // 4)
    ):
        begins, ends = (np.concatenate([byte_range[side] for byte_range in ranges[group]]) for side in (0, 1))

        def copy(group: slice = group) -> None:
            _copy_rows(source, starts[group], rows[group], out, largest[group], documents=documents, ahead=0)

        mirror.read(begins, ends, copy)
    return largest


def _copy_rows(
    source: IndexedDataset,
    starts: Indices,
    rows: Indices,
    out: Ids,
    largest: npt.NDArray[np.uint64],
    *,
    documents: DocumentRow | None,
    ahead: int,
) -> None:
    """What `read_rows` does, where all of it is here."""
    pages = source.pages.address if source.pages else None
    try:
        if documents is None:
            done = native_kernels.gather(
                source.flat, source.type_code, starts, rows, ahead, pages, out, largest
            )
        else:
            done = native_kernels.gather_documents(
                *source.file_and_pointers,
                source.type_code,
                starts,
                rows,
                ahead,
                pages,
                order=documents.order,
                ends=documents.ends,
                out=out,
                largest=largest,
            )
    except IndexError:
        _refuse_outside(source, starts, out.shape[1], documents)
        raise
    except DamagedPage:
        _refuse_damaged(source, starts, out.shape[1], documents)
        raise
    if not done:
        _refuse_outside(source, starts, out.shape[1], documents)
        for number, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            read = _one(source, start, out.shape[1], documents)
            out[row] = read
            largest[number] = _largest(read)


def _refuse_damaged(
    source: IndexedDataset, starts: Indices, count: int, documents: DocumentRow | None
) -> None:
    """Raise the DataError that names the first page of some samples that differs from its sum."""
    assert source.pages is not None, "whoever finds damage had sums"
    ranges = [_byte_ranges(source, start, count, documents) for start in starts.tolist()]
    begins, ends = (np.concatenate([sample[side] for sample in ranges]) for side in (0, 1))
    source.pages.refuse(begins, ends)


def _refuse_outside(
    source: IndexedDataset, starts: Indices, count: int, documents: DocumentRow | None
) -> None:
    limit = source.token_count if documents is None else int(documents.ends[-1])
    if starts.size and (int(starts.min()) < 0 or int(starts.max()) + count > limit):
        raise IndexError(f"samples from tokens {starts.min()} to {starts.max()} on, of {limit}")


def _groups(blocks: list[int], *, most: int) -> Iterator[slice]:
    """Yield groups of neighbouring samples that take at most `most` blocks together, and at least one sample
    each.
    """
    start, held = 0, 0
    for number, count in enumerate(blocks):
        if number > start and held + count > most:
            yield slice(start, number)
            start, held = number, 0
        held += count
    if start < len(blocks):
        yield slice(start, len(blocks))


def _byte_ranges(
    source: IndexedDataset, start: int, count: int, documents: DocumentRow | None
) -> tuple[Indices, Indices]:
    """Return where in `.bin` the pieces of `count` tokens from `start` on begin and end."""
    size = source.dtype.itemsize
    if documents is None:
        begin = source.first_byte + start * size
        return np.array([begin]), np.array([begin + count * size])
    _, pointers = source.file_and_pointers
    pieces = documents.pieces(start // documents.sequence_length)
    begins = np.array([int(pointers[number]) + first * size for number, first, _ in pieces])
    return begins, begins + np.array([taken * size for *_, taken in pieces])


def _one(source: IndexedDataset, start: int, count: int, documents: DocumentRow | None) -> npt.NDArray[Any]:
    if documents is None:
        return source.window(start, count)
    if source.pages is not None:
        source.pages.check(*_byte_ranges(source, start, count, documents))
    whole, pointers = source.file_and_pointers
    pieces = []
    for number, first, taken in documents.pieces(start // documents.sequence_length):
        begin = int(pointers[number]) // source.dtype.itemsize + first
        pieces.append(whole[begin : begin + taken])
    return np.concatenate(pieces)


def _largest(read: npt.NDArray[Any]) -> int:
    return int(read.max()) if int(read.min()) >= 0 else (1 << 64) - 1


MOST_TOKENS = 50_000_000
"""The number of tokens of each dataset that are counted; more would change the statistics little."""
_PIECE = 1 << 22


def count_bigrams(datasets: Sequence[IndexedDataset], vocabulary: int) -> npt.NDArray[np.int64]:
    """Return counts[a, b], how often b follows a over the beginning of each dataset; [vocabulary,
    vocabulary]. Raises DataError for an id that the vocabulary lacks.
    """
    counts = np.zeros(vocabulary * vocabulary, dtype=np.int64)
    for dataset in datasets:
        counted = min(dataset.token_count, MOST_TOKENS)
        for start in range(0, counted - 1, _PIECE):
            tokens = dataset.window(start, min(_PIECE, counted - 1 - start) + 1)
            if (largest := _largest(tokens)) >= vocabulary:
                place = f"tokens {start:,} to {start + tokens.size - 1:,}"
                raise _beyond_vocabulary(dataset, largest, place, vocabulary=vocabulary)
            tokens = tokens.astype(np.int64)
            pairs, times = np.unique(tokens[:-1] * vocabulary + tokens[1:], return_counts=True)
            counts[pairs] += times
    return counts.reshape(vocabulary, vocabulary)
