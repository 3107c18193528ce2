"""The columns of an `.idx` file while its pair is written: on the disk, so that memory stays small."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

_READ_AT_ONCE = 1 << 20
_LENGTH, _END = np.dtype("<i4"), np.dtype("<i8")


class IndexColumns:
    """The lengths of sequences, and the number of sequences at the end of each document.

    They lie in files of `directory` without a name, which are gone once `close` was called.
    """

    def __init__(self, directory: Path) -> None:
        self.sequence_count = self.document_count = 0
        self._lengths = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  — `close` closes both
        self._ends = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115

    def add_lengths(self, lengths: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> None:
        """Append sequences, by their numbers of tokens. Raises OSError."""
        self._lengths.write(np.ascontiguousarray(lengths, dtype=_LENGTH).data)
        self.sequence_count += len(lengths)

    def add_ends(self, ends: npt.NDArray[np.int64]) -> None:
        """Append documents, by the number of sequences at the end of each. Raises OSError."""
        self._ends.write(np.ascontiguousarray(ends, dtype=_END).data)
        self.document_count += len(ends)

    def pieces(self, item_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of `.idx` after its header: lengths, where each sequence begins, where each
        document does. Nothing is added afterwards.

        item_bytes: bytes of a token.
        """
        yield from (lengths.data for lengths in _numbers(self._lengths, _LENGTH))
        begin = 0
        for lengths in _numbers(self._lengths, _LENGTH):
            ends = begin + np.cumsum(lengths, dtype=np.int64) * item_bytes
            yield (ends - lengths * np.int64(item_bytes)).astype(_END).data
            begin = int(ends[-1])
        yield np.zeros(1, dtype=_END).data
        yield from (ends.data for ends in _numbers(self._ends, _END))

    def close(self) -> None:
        """Remove the columns from the disk."""
        self._lengths.close()
        self._ends.close()


def _numbers(
    file: IO[bytes], dtype: np.dtype[np.int32] | np.dtype[np.int64]
) -> Iterator[npt.NDArray[np.int64]]:
    file.seek(0)
    while piece := file.read(_READ_AT_ONCE * dtype.itemsize):
        yield np.frombuffer(piece, dtype)
