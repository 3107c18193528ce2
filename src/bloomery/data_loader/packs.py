"""Reads packed samples (whole documents) into arrays: tokens, targets, and the document of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery.data.indexed import IndexedDataset
from bloomery.data.sample_layout import PackedPieces

IGNORED = -100
"""The target of a token that does not count in the loss."""

Indices = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """Some samples, int32 [k, L] each.

    documents: the number of each token's document in its sample; None where samples are windows of tokens.
    """

    tokens: Ids
    targets: Ids
    documents: Ids | None = None


def empty_packs(count: int, length: int, *, eod: int) -> SampleRows:
    """Return samples without a document: places that no token takes, and that count in no loss."""
    return SampleRows(
        tokens=np.full((count, length), eod, dtype=np.int32),
        targets=np.full((count, length), IGNORED, dtype=np.int32),
        documents=np.full((count, length), -1, dtype=np.int32),
    )


def read_packs(
    source: IndexedDataset, pieces: PackedPieces, places: Indices, out: SampleRows, *, eod: int
) -> tuple[int, int]:
    """Fill rows `places` of `out` with some pieces, and return their largest id and the first token of the
    piece that has it; a negative id counts as 2⁶⁴ − 1.

    The input before a document's first token is the end of a document; before that of another piece, the
    token before it. Pages are compared with their sums; of a remote pair blocks are fetched.
    """
    assert out.documents is not None, "empty_packs made it"
    values = np.empty(int(pieces.length.sum()), dtype=np.int64)
    before = np.full(pieces.start.size, eod, dtype=np.int64)
    begins, ends, at = _byte_ranges(source, pieces), _byte_ends(source, pieces), 0
    for group in _groups(source, begins, ends):
        some = PackedPieces(**{field.name: getattr(pieces, field.name)[group] for field in fields(pieces)})

        def copy(some: PackedPieces = some, at: int = at, group: slice = group) -> None:
            flat: Any = source.flat
            token = _ramp(some.start, some.length)
            values[at : at + token.size] = flat[token]
            more = np.flatnonzero(some.continues)
            before[group][more] = flat[some.start[more] - 1]

        if source.mirror is not None:
            source.mirror.read(begins[group], ends[group], copy)
        else:
            if source.pages is not None:
                source.pages.check(begins[group], ends[group])
            copy()
        at += int(some.length.sum())
    length = out.tokens.shape[1]
    first = np.cumsum(pieces.length) - pieces.length
    place = _ramp(places[pieces.row] * length + pieces.column, pieces.length)
    inputs = np.empty_like(values)
    inputs[1:], inputs[first] = values[:-1], before
    out.targets.reshape(-1)[place], out.tokens.reshape(-1)[place] = values, inputs
    _number_documents(pieces, places, out.documents)
    if not values.size:
        return 0, 0
    worst = int(np.argmin(values)) if int(values.min()) < 0 else int(np.argmax(values))
    largest = int(values[worst])
    piece = int(np.searchsorted(first, worst, side="right")) - 1
    return (largest if largest >= 0 else (1 << 64) - 1), int(pieces.start[piece])


def _number_documents(pieces: PackedPieces, places: Indices, documents: Ids) -> None:
    """Write the number of each place's document; empty places at the end have a number of their own."""
    counts = np.bincount(pieces.row, minlength=places.size)
    numbers = np.arange(pieces.row.size) - (np.cumsum(counts) - counts)[pieces.row]
    documents[places] = counts[:, None]
    place = _ramp(places[pieces.row] * documents.shape[1] + pieces.column, pieces.length)
    documents.reshape(-1)[place] = np.repeat(numbers, pieces.length)


def _ramp(starts: Indices, lengths: Indices) -> Indices:
    """Return start, start + 1, … of each range, one range after another."""
    steps = np.arange(int(lengths.sum()))
    return steps + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def _byte_ranges(source: IndexedDataset, pieces: PackedPieces) -> Indices:
    return source.first_byte + (pieces.start - pieces.continues) * source.dtype.itemsize


def _byte_ends(source: IndexedDataset, pieces: PackedPieces) -> Indices:
    return source.first_byte + (pieces.start + pieces.length) * source.dtype.itemsize


def _groups(source: IndexedDataset, begins: Indices, ends: Indices) -> Iterator[slice]:
    """Yield groups of pieces; of a remote pair, as many as a quarter of its cache holds."""
    if source.mirror is None:
        yield slice(0, begins.size)
        return
    most = max(1, source.mirror.capacity // 4)
    start, held = 0, 0
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        count = source.mirror.blocks_of(np.array([begin]), np.array([end]))
        if number > start and held + count > most:
            yield slice(start, number)
            start, held = number, 0
        held += count
    if start < begins.size:
        yield slice(start, begins.size)
