r"""The files of a token pair (.bin, .idx): names, the index's layout (Megatron's), mapping and writing.

`.idx`, little-endian and unpadded: `MMIDIDX\0\0`, u64 version 1, u8 dtype code, u64 sequences S, u64
documents + 1 = D, i32[S] lengths in tokens, i64[S] byte pointers into `.bin`, i64[D] document indices.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from bloomery.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
_SMALL_VOCABULARY = 65_500
FOREIGN = (6, 7)  # f64 and f32 in Megatron, other types in an older fork: tokens in neither
TOKENIZE_AGAIN = "Tokenise the source again, or copy the pair of files again from where they are whole."


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the token type for a vocabulary, as Megatron chooses it: u16 where it is safe, else i32."""
    return np.dtype("<u2" if vocabulary_size < _SMALL_VOCABULARY else "<i4")


def bin_path(prefix: Path) -> Path:
    """Return the path of a pair's token file."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of a pair's index."""
    return prefix.with_name(prefix.name + ".idx")


def sums_path(prefix: Path) -> Path:
    """Return the path of the checksums of a pair's blocks and pages."""
    return prefix.with_name(prefix.name + ".seal.sums")


def seal_path(prefix: Path) -> Path:
    """Return the path of a pair's seal, which describes the pair and the file of its checksums."""
    return prefix.with_name(prefix.name + ".seal.json")


PARTS = {".bin": bin_path, ".idx": idx_path, ".seal.sums": sums_path, ".seal.json": seal_path}
"""Where each file of a sealed pair lies, in the order in which the files get their names."""


def mapped(path: Path, *, at_random: bool) -> mmap.mmap | bytes:
    """Return a file's content, mapped. at_random: it is read in random order, so reading ahead is wasted."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as missing:
        raise DataError(
            f"Cannot read {path}: {missing.strerror}.",
            remedy="Give the path of a .bin/.idx pair without the ending; `bloomery data tokenize` makes it.",
        ) from missing
    if at_random and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_RANDOM)
    return mapping


def will_be_read(mapping: mmap.mmap | bytes, begin: int, end: int) -> None:
    """Tell the system that bytes [begin, end) of a mapped file are read next, the first 64 MiB of them."""
    if not isinstance(mapping, mmap.mmap) or not hasattr(mapping, "madvise"):
        return
    first = begin - begin % mmap.PAGESIZE
    with suppress(OSError):  # it is advice
        for start in range(first, min(end, first + _MOST_AHEAD), _AHEAD_AT_ONCE):
            mapping.madvise(mmap.MADV_WILLNEED, start, min(_AHEAD_AT_ONCE, end - start))


_AHEAD_AT_ONCE, _MOST_AHEAD = 128 << 10, 64 << 20
"""Linux reads no more for one advice than the device's `read_ahead_kb`, which is 128 by default."""
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
        """Close both temporary files, which removes them from the disk."""
        for file in (self._lengths, self._ends):
            with suppress(OSError):  # closing writes what is buffered, which a full disk refuses
                file.close()


def _numbers(
    file: IO[bytes], dtype: np.dtype[np.int32] | np.dtype[np.int64]
) -> Iterator[npt.NDArray[np.int64]]:
    file.seek(0)
    while piece := file.read(_READ_AT_ONCE * dtype.itemsize):
        yield np.frombuffer(piece, dtype)
