"""A round's average in the compressed encoding of the ring, in memory and in files that peers fetch."""

from __future__ import annotations

import bisect
import itertools
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from bloomery.config.elastic import SPARSE
from bloomery.transport.gradient_codec import Bytes, Codec, Float32, decode, encode, encoded_size

BLOCK = 1 << 22
"""Elements that are decoded at a time, a multiple of what a scale of any codec covers."""

_SQUARED = 1 << 16
"""Elements that are squared at a time: as fp64 they stay in a core's cache."""
_THREADS = 8
"""The most threads that encode blocks; each holds a block's values beside them."""

_MAGIC = b"bloomery average\n"
_HEADER = struct.Struct("<8sIQ")
"""Before each block of a file: its codec's name, how many values it has, and its bytes."""
_MOST_BLOCKS = 1 << 20
"""The most blocks of a file, three times those of 100 billion values that 500 peers averaged."""


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
        self._blocks: list[_Block] = []
        self.numel = 0
        self.squares = 0.0
        """The sum of the squares of all elements that were appended."""

    @classmethod
    def of(cls, values: Float32) -> StoredAverage:
        """Return the average with these values, kept as fp32."""
        stored = cls(Codec.FP32, members=1)
        stored.append(values)
        return stored

    @classmethod
    def load(cls, path: Path) -> StoredAverage:
        """Read a file that `save` wrote at any peer.

        Raises ValueError for a file that `save` never writes; values that no codec decodes are found by who
        reads them. Takes as much memory as the file has bytes. Raises OSError.
        """
        stored = cls(Codec.FP32, members=1)
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("the file is not the average of a round")
            left = os.fstat(file.fileno()).st_size - len(_MAGIC)
            while left:
                if len(stored._blocks) == _MOST_BLOCKS:
                    raise ValueError(f"the average has more than {_MOST_BLOCKS:,} blocks")
                block = _Block.read(file, at_most=left)
                left -= _HEADER.size + block.nbytes
                stored._add(block)
        return stored

    def save(self, path: Path) -> None:
        """Write the average as it is kept, so that a reader of `path` sees all of it or no file.

        The file is not synced, because it is a copy. Raises OSError.
        """
        draft = path.with_name(path.name + ".draft")
        try:
            with draft.open("wb") as file:
                file.write(_MAGIC)
                for block in self._blocks:
                    block.write(file)
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    @property
    def nbytes(self) -> int:
        """The bytes that are kept."""
        return sum(block.nbytes for block in self._blocks)

    def append(self, values: Float32) -> None:
        """Add the next elements, which one call of the ring has summed. They are copied."""
        count, members = values.size, self._members
        share, rest = divmod(count, members)
        bounds = [share * segment + rest * segment // members for segment in range(members + 1)]
        parts = [
            values[start : min(start + BLOCK, end)]
            for begin, end in itertools.pairwise(bounds)
            for start in range(begin, end, BLOCK)
        ]
        workers = min(_THREADS, len(os.sched_getaffinity(0)), len(parts))
        with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
            each = pool.map if pool is not None else map
            for block, squares in each(partial(_kept, codec=self._codec), parts):
                self.squares += squares
                self._add(block)

    def _add(self, block: _Block) -> None:
        self._starts.append(self.numel)
        self._blocks.append(block)
        self.numel += block.count

    def blocks(self) -> Iterator[Float32]:
        """Yield the values in order, at most BLOCK at a time. Raises ValueError, as `pieces` does."""
        return (block.values() for block in self._blocks)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Float32]]:
        """Yield the values of elements [start, stop), each piece with the index of its first element.

        Raises ValueError for a loaded average with values that no codec decodes.
        """
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, block = self._starts[number], self._blocks[number]
            end = min(first + block.count, stop)
            yield start, block.values()[start - first : end - first]
            start, number = end, number + 1

    def whole(self) -> Float32:
        """Return all values as one vector."""
        return np.concatenate([np.empty(0, np.float32), *self.blocks()])


def _kept(values: Float32, *, codec: str) -> tuple[_Block, float]:
    """Return values as they are kept, and the sum of their squares in fp64."""
    squares = 0.0
    for start in range(0, values.size, _SQUARED):
        doubles = values[start : start + _SQUARED].astype(np.float64)
        squares += float(np.dot(doubles, doubles))
    return _Block.of(values, codec), squares


@dataclass(frozen=True)
class _Block:
    """Values that were encoded together.

    codec: how; "sparse": the places of the values whose bits are not all zero, then those values.
    count: how many values; data: their code.
    """

    codec: str
    count: int
    data: Bytes

    @classmethod
    def of(cls, values: Float32, codec: str) -> _Block:
        """Encode values so that none is lost, by another codec if this one loses some."""
        if codec == SPARSE:
            places = np.flatnonzero(values.view(np.uint32)).astype(np.int32)
            if 2 * places.size < values.size:
                code = np.concatenate((places.view(np.uint8), values[places].view(np.uint8)))
                return cls(SPARSE, values.size, code)
        elif codec != Codec.FP32:
            try:
                block = cls(codec, values.size, encode(values, codec, threads=1))
                if np.array_equal(block.values(threads=1).view(np.uint32), values.view(np.uint32)):
                    return block
            except ValueError:  # not finite: it is judged by what is made of it
                pass
        return cls(Codec.FP32, values.size, values.copy().view(np.uint8))

    @classmethod
    def read(cls, file: BinaryIO, *, at_most: int) -> _Block:
        """Read what `write` wrote. at_most: the bytes that are left. Raises ValueError and OSError."""
        if at_most < _HEADER.size:
            raise ValueError("the average ends within a block")
        name, count, size = _HEADER.unpack(file.read(_HEADER.size))
        codec = name.rstrip(b"\0").decode("ascii", "replace")
        is_sparse = codec == SPARSE
        if not is_sparse and codec not in set(Codec):
            raise ValueError(f"the average has a block of an unknown codec: {codec!r}")
        if not 0 < count <= BLOCK:
            raise ValueError(f"the average has a block of {count} values; a block has at most {BLOCK}")
        if size % 8 or size > 4 * count if is_sparse else size != encoded_size(count, codec):
            raise ValueError(f"{size} bytes of the average are not {count} values of {codec}")
        if size > at_most - _HEADER.size:
            raise ValueError("the average ends within a block")
        block = cls(codec, count, np.fromfile(file, np.uint8, size))
        if is_sparse and not block._has_places():
            raise ValueError("the places of a sparse average are not in order")
        return block

    def write(self, file: BinaryIO) -> None:
        """Write the block with what it takes to read it. Raises OSError."""
        file.write(_HEADER.pack(self.codec.encode(), self.count, self.nbytes))
        file.write(self.data.data)

    @property
    def nbytes(self) -> int:
        return self.data.size

    def values(self, *, threads: int | None = None) -> Float32:
        """Return all values. Raises ValueError where a code from another peer gives none.

        threads: see `decode`.
        """
        if self.codec == Codec.FP32:
            return self.data.view(np.float32)
        if self.codec != SPARSE:
            values = np.empty(self.count, np.float32)
            decode(self.data, self.codec, values, threads=threads)
            return values
        values = np.zeros(self.count, np.float32)
        values[self._places()] = self.data[self.nbytes // 2 :].view(np.float32)
        return values

    def _places(self) -> npt.NDArray[np.int32]:
        return self.data[: self.nbytes // 2].view(np.int32)

    def _has_places(self) -> bool:
        """Return whether the places ascend and are those of values of this block."""
        places = self._places()
        return not places.size or bool(
            places[0] >= 0 and places[-1] < self.count and np.all(places[1:] > places[:-1])
        )
