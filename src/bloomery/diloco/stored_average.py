"""Keeps the average of a round in few bytes, as the ring sent it, until the round is committed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bloomery.config.elastic import SPARSE
from bloomery.transport.gradient_codec import Bytes, Float32, decode, encode

BLOCK = 1 << 22
"""Elements that are decoded at a time, a multiple of what a scale of any codec covers."""


class StoredAverage:
    """The average of one part: with int8 it takes 1.01 bytes an element, and its values are exact.

    A ring sends each member's segment of the array in blocks that begin at the segment's first element, so
    the segments are encoded one by one. What does not come back to the bit is kept as fp32. Of a sparse
    average the places and the values are kept that are not zero.

    codec: in which the ring sent the sums that were complete, or "sparse".
    members: of the ring.
    """

    def __init__(self, codec: str, *, members: int) -> None:
        self._codec, self._members = codec, members
        self._starts: list[int] = []
        self._blocks: list[Bytes | Float32 | _Sparse] = []
        self._sizes: list[int] = []
        self.numel = 0
        self.squares = 0.0
        """The sum of the squares of all elements."""

    @classmethod
    def of(cls, values: Tensor) -> StoredAverage:
        """Return the average with these values, kept as fp32."""
        stored = cls("fp32", members=1)
        stored.append(values)
        return stored

    @property
    def nbytes(self) -> int:
        """The bytes that are kept."""
        return sum(block.nbytes for block in self._blocks)

    def append(self, values: Tensor) -> None:
        """Add the next elements, which one call of the ring has summed. They are copied."""
        count, members = values.numel(), self._members
        share, rest = divmod(count, members)
        bounds = [share * segment + rest * segment // members for segment in range(members + 1)]
        for begin, end in itertools.pairwise(bounds):
            for start in range(begin, end, BLOCK):
                self._append_block(values[start : min(start + BLOCK, end)].numpy())

    def _append_block(self, values: Float32) -> None:
        self._starts.append(self.numel)
        self._sizes.append(values.size)
        self._blocks.append(_kept(values, self._codec))
        self.numel += values.size
        self.squares += float(np.dot(values.astype(np.float64), values))

    def blocks(self) -> Iterator[Tensor]:
        """Yield the values in order, at most BLOCK at a time."""
        for number in range(len(self._blocks)):
            yield self._values(number)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the values of elements [start, stop), each piece with the index of its first element."""
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[number]
            end = min(first + self._sizes[number], stop)
            yield start, self._values(number)[start - first : end - first]
            start, number = end, number + 1

    def whole(self) -> Tensor:
        """Return all values as one vector."""
        return torch.cat([torch.empty(0), *self.blocks()])

    def _values(self, number: int) -> Tensor:
        block = self._blocks[number]
        if isinstance(block, _Sparse):
            return torch.from_numpy(block.values_of(self._sizes[number]))
        if block.dtype == np.float32:
            return torch.from_numpy(block)
        values = np.empty(self._sizes[number], np.float32)
        decode(block.data, self._codec, values)
        return torch.from_numpy(values)


@dataclass(frozen=True)
class _Sparse:
    """The values whose bits are not all zero, and their places."""

    places: npt.NDArray[np.int32]
    values: Float32

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.values.nbytes

    def values_of(self, count: int) -> Float32:
        """Return all values, of which there are `count`."""
        values = np.zeros(count, np.float32)
        values[self.places] = self.values
        return values


def _kept(values: Float32, codec: str) -> Bytes | Float32 | _Sparse:
    """Return the values in few bytes if that loses nothing, else a copy of them."""
    if codec == "fp32":
        return values.copy()
    if codec == SPARSE:
        places = np.flatnonzero(values.view(np.uint32)).astype(np.int32)
        return _Sparse(places, values[places]) if 2 * places.size < values.size else values.copy()
    try:
        encoded = encode(values, codec)
    except ValueError:  # not finite: it is judged by what is made of it
        return values.copy()
    back = np.empty_like(values)
    decode(encoded, codec, back)
    return encoded if np.array_equal(back.view(np.uint32), values.view(np.uint32)) else values.copy()
