"""SparseLoCo's codec and average: of each chunk only the largest values are sent, with 2 bits each.

SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706) sends 1 to 3% of a pseudo-gradient and keeps the rest as
error feedback. Here a chunk is 4096 values in a row. Of its largest values by magnitude the code has two
levels of magnitude, which fit them best; for each value its sign and which level it is; and
the places in Elias-Fano form: the low bits of each place as they are, and the high bits as a bitmap, which
takes within half a bit of the least that sorted places need. A density of 1/64 takes 84 bytes a chunk.

The length of a code depends on the number of values and the density alone, so that all members' codes are
equally long. A code that arrives is checked whole before any of it is used.

Sparse parts do not fit a ring that adds up: sums of them have other places. So each member's code goes round
the ring as it is, and every member adds up all codes, in the order of the members. All do the same fp32
arithmetic on the same bytes, so all get the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloomery.transport.gradient_codec import LARGEST, Bytes, Float32, largest_magnitude
from bloomery.transport.ring_all_reduce import LARGEST_OWN

Words = npt.NDArray[np.uint32]
_Places = npt.NDArray[np.int64]

CHUNK = 4096
_CHUNKS = 1024
"""Chunks that are encoded or decoded at a time, which bounds the memory beside the code."""
_LEVEL_BYTES, _LEVELS = 4, 2
_LARGEST_LEVEL = int(LARGEST.view(np.uint32)) >> 16


@dataclass(frozen=True)
class _Row:
    """How a chunk is encoded. values: how many it has. kept: how many of them are sent."""

    values: int
    kept: int

    @property
    def low_bits(self) -> int:
        """The bits of a place that are stored as they are."""
        return max(0, (self.values // self.kept).bit_length() - 1)

    @property
    def bitmap(self) -> int:
        """The bits of the bitmap, of which one is set for each place."""
        return self.kept + (self.values - 1 >> self.low_bits)

    @property
    def bits(self) -> int:
        """The bits after the levels, without those that fill the last byte."""
        return self.kept * (self.low_bits + 2) + self.bitmap

    @property
    def bytes(self) -> int:
        """The size of the chunk's code."""
        return _LEVEL_BYTES + (self.bits + 7) // 8


def sparse_words(count: int, density: float) -> int:
    """Return how many 32-bit words the code of `count` values has."""
    return -(-sum(rows * row.bytes for row, rows in _shapes(count, density)) // 4)


def encode_sparse(values: Float32, density: float) -> Words:
    """Return the code of the largest values by magnitude. values: one dimension.

    density: the share of each chunk that is sent. Raises ValueError if a value is not finite or its magnitude
    is above 2^120.
    """
    if not bool(np.all(np.abs(values) <= LARGEST)):
        raise ValueError("a value is not finite, or beyond 2^120")
    words = np.zeros(sparse_words(values.size, density), np.uint32)
    for row, part, code in _parts(values, words.view(np.uint8), density):
        code[:] = _encoded(part, row)
    return words


def add_sparse(words: Words, density: float, out: Float32, *, weight: float) -> None:
    """Add weight × the decoded values to `out`. Product and sum are rounded by themselves, on any machine.

    Raises ValueError if the code is not one that `encode_sparse` can have made of so many values; `out` is
    then undefined.
    """
    if words.size != sparse_words(out.size, density):
        raise ValueError(f"{words.size} words are not {out.size} values of density {density}")
    code_bytes = words.view(np.uint8)
    used = 0
    for row, part, code in _parts(out, code_bytes, density):
        places, decoded = _decoded(code, row)
        places += np.arange(0, part.size, row.values)[:, None]
        part[places.reshape(-1)] += decoded.reshape(-1) * np.float32(weight)
        used += code.size
    if code_bytes[used:].any():
        raise ValueError("there are bits after the end")


def _shapes(count: int, density: float) -> list[tuple[_Row, int]]:
    """Return how chunks are encoded, and how many so: the whole ones, and a shorter one at the end."""
    whole, rest = divmod(count, CHUNK)
    sizes = [(size, rows) for size, rows in ((CHUNK, whole), (rest, 1)) if size and rows]
    return [(_Row(size, min(size, max(1, round(density * size)))), rows) for size, rows in sizes]


def _parts(
    values: Float32, code: Bytes, density: float
) -> Iterator[tuple[_Row, Float32, npt.NDArray[np.uint8]]]:
    """Yield views of some chunks and of their code, [chunks, bytes], at a time."""
    at_value = at_byte = 0
    for row, rows in _shapes(values.size, density):
        for first, last in itertools.pairwise((*range(0, rows, _CHUNKS), rows)):
            chunks = last - first
            part = values[at_value : at_value + chunks * row.values]
            yield row, part, code[at_byte : at_byte + chunks * row.bytes].reshape(chunks, row.bytes)
            at_value, at_byte = at_value + chunks * row.values, at_byte + chunks * row.bytes


def _encoded(values: Float32, row: _Row) -> Bytes:
    chunks = values.reshape(-1, row.values)
    if row.kept < row.values:
        largest = np.argpartition(np.abs(chunks), row.values - row.kept, axis=1)[:, -row.kept :]
    else:
        largest = np.broadcast_to(np.arange(row.values), chunks.shape)
    places = np.sort(largest, axis=1)
    chosen = np.take_along_axis(chunks, places, axis=1)
    levels, is_high = _fitted(np.abs(chosen))
    bitmap = np.zeros((len(chunks), row.bitmap), np.uint8)
    np.put_along_axis(bitmap, (places >> row.low_bits) + np.arange(row.kept), 1, axis=1)
    low = places[:, :, None] >> np.arange(row.low_bits) & 1
    bits = [low.reshape(len(chunks), -1).astype(np.uint8), bitmap, np.signbit(chosen), is_high]
    packed = np.packbits(np.concatenate(bits, axis=1).astype(np.uint8), axis=1)
    return np.concatenate([levels.view(np.uint8), packed], axis=1)


def _fitted(magnitudes: Float32) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """Return two levels for each row, as upper halves of fp32 values, and which magnitudes are the higher.

    The levels are the means of the sorted magnitudes below and above the cut that loses least. They are
    rounded towards zero, so a row never becomes longer than it was.
    """
    kept = magnitudes.shape[1]
    ordered = np.sort(magnitudes, axis=1)
    above = np.cumsum(ordered[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]  # from each cut on
    below, counts = above[:, :1] - above, np.arange(kept)
    # The squares of a group's distances from its mean are least where sum² / count, over both, is largest.
    explained = below**2 / np.maximum(counts, 1) + above**2 / (kept - counts)
    border = np.take_along_axis(ordered, explained.argmax(axis=1)[:, None], axis=1)
    is_high = magnitudes >= border
    count = is_high.sum(axis=1, keepdims=True)
    high_sum = np.where(is_high, magnitudes, 0).sum(axis=1, dtype=np.float64, keepdims=True)
    low_sum = np.where(is_high, 0, magnitudes).sum(axis=1, dtype=np.float64, keepdims=True)
    high, low = high_sum / count, low_sum / np.maximum(kept - count, 1)
    levels = np.concatenate([low, high], axis=1).astype(np.float32)
    return (levels.view(np.uint32) >> 16).astype(np.uint16), is_high


def _decoded(code: npt.NDArray[np.uint8], row: _Row) -> tuple[_Places, Float32]:
    """Return the places within each chunk and their values, [chunks, kept]. Raises ValueError."""
    chunks = len(code)
    levels = np.ascontiguousarray(code[:, :_LEVEL_BYTES]).view(np.uint16)
    if levels.max(initial=0) > _LARGEST_LEVEL or (levels[:, 0] > levels[:, 1]).any():
        raise ValueError("a level is not finite, too large, or above the next one")
    bits = np.unpackbits(code[:, _LEVEL_BYTES:], axis=1)
    if bits[:, row.bits :].any():
        raise ValueError("there are bits after the end of a chunk")
    cuts = list(itertools.accumulate([row.kept * row.low_bits, row.bitmap, row.kept]))
    low_bits, bitmap, signs, is_high = np.split(bits[:, : row.bits], cuts, axis=1)
    if (bitmap.sum(axis=1, dtype=np.int64) != row.kept).any():
        raise ValueError("a chunk does not have as many places as its density says")
    high = np.nonzero(bitmap)[1].reshape(chunks, row.kept) - np.arange(row.kept)
    shifts = np.arange(row.low_bits)
    low = (low_bits.reshape(chunks, row.kept, row.low_bits).astype(np.int64) << shifts).sum(axis=2)
    places = (high << row.low_bits) | low
    if (places[:, -1] >= row.values).any() or (np.diff(places, axis=1) <= 0).any():
        raise ValueError("the places of a chunk are not in order, or outside it")
    magnitudes = (levels.astype(np.uint32) << 16).view(np.float32)
    values = np.take_along_axis(magnitudes, is_high.astype(np.int64), axis=1)
    return places, np.where(signs, -values, values)


class NotSendable(ValueError):
    """A member's own values are not finite, or beyond 2^100: they cannot be encoded, and nothing was sent."""


class WrongCode(ValueError):
    """A member sent what is no code. index: of the member."""

    def __init__(self, why: str, *, index: int) -> None:
        super().__init__(why)
        self.index = index


def average_sparse(
    values: Float32,
    *,
    gather: Callable[[Words], object],
    weights: Sequence[float],
    index: int,
    density: float,
    residual: Float32 | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Replace `values` by the sum of weight × what each member sent of its values.

    gather: fills an array [members, words] with the rows of the other members; this one's is in its place.
    weights, index: the weights of all members, and which of them this one is.
    residual: what was not sent of weight × values is added to it; None: that is lost. With weight 0 nothing
        counts as sent, so it stays as it is.
    check: called before each member's code is added, which takes minutes for hundreds of members; may raise.
    Raises NotSendable, WrongCode, and what these two raise; `values` and `residual` are then undefined.
    """
    weight = np.float32(weights[index])
    if not largest_magnitude(values) * max(1.0, float(weight)) <= LARGEST_OWN:
        raise NotSendable("own values are not finite, or beyond 2^100; nothing was sent")
    code = encode_sparse(values, density)
    if residual is not None and weight:
        unsent = values.copy()
        add_sparse(code, density, unsent, weight=-1.0)
        residual += unsent * weight
    codes = np.zeros((len(weights), code.size), np.uint32)
    codes[index] = code
    gather(codes)
    values.fill(0.0)
    for member, row in enumerate(codes):
        check()
        try:
            add_sparse(row, density, values, weight=weights[member])
        except ValueError as error:
            raise WrongCode(str(error), index=member) from error
