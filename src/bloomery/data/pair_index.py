"""The mapped index (.idx) of a token pair: its columns, and what finds that it contradicts itself."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bloomery.data.pair_files import DTYPES, FOREIGN, HEADER, MAGIC, TOKENIZE_AGAIN, idx_path, mapped
from bloomery.data.sealing import PageCheck
from bloomery.errors import DataError

_CHECKED_AT_ONCE = 1 << 20


class PairIndex:
    """A whole index. Opening it reads the header and the ends of its last column.

    lengths, pointers: tokens of each sequence, and the byte of `.bin` at which it begins; [sequences].
    documents: the sequence that each document begins with, and at the end the sequence count;
    [document_count + 1]. All three are views of the file, unaligned.
    pages: compares the file with its seal; None where no seal has sums of its pages.
    """

    def __init__(self, prefix: Path) -> None:
        self._path = idx_path(prefix)
        self.content = mapped(self._path, at_random=False)
        self.type_code, self.sequence_count, entries = checked_header(self._path, self.content)
        self.dtype, self.document_count = np.dtype(DTYPES[self.type_code]), entries - 1
        self.pages: PageCheck | None = None
        ends = self.documents[0], self.documents[-1]
        if ends != (0, self.sequence_count):
            raise DataError(
                f"{self._path} is damaged: its document indices (from byte "
                f"{HEADER.size + 12 * self.sequence_count:,}) run from {ends[0]} to {ends[1]}, not from 0 to "
                f"{self.sequence_count}.",
                remedy=TOKENIZE_AGAIN,
            )

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence."""
        return np.frombuffer(self.content, "<i4", self.sequence_count, HEADER.size)

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """The byte of `.bin` at which each sequence begins."""
        return np.frombuffer(self.content, "<i8", self.sequence_count, HEADER.size + 4 * self.sequence_count)

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """The sequence that each document begins with, and at the end the sequence count."""
        offset = HEADER.size + 12 * self.sequence_count
        return np.frombuffer(self.content, "<i8", self.document_count + 1, offset)

    @property
    def end(self) -> int:
        """The byte of `.bin` at which the last sequence ends."""
        if not self.sequence_count:
            return 0
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize

    def refuse_contradictions(self, begin: int, stop: int) -> None:
        """Raise DataError where the index is not what was sealed or, without sums of its pages, where it
        contradicts itself about the documents [begin, stop).

        It is asked before documents are taken to begin where their first sequence does, and to adjoin.
        """
        if self.pages is not None:
            self.pages.check_all()
            return
        indices = self.documents[begin : stop + 1]
        _refuse_falling(self._path, indices, first=begin, sequences=self.sequence_count)
        _refuse_apart(
            self._path,
            self.pointers,
            self.lengths,
            range(int(indices[0]), int(indices[-1]) + 1),
            item_bytes=self.dtype.itemsize,
            end=self.end,
        )

    def refuse_wrong_edge(self, document: int) -> None:
        """Raise DataError where the index is not what was sealed, or contradicts itself, about where a
        document begins; the document after the last one begins at the end.
        """
        if self.pages is None:
            self.refuse_contradictions(max(document - 1, 0), min(document + 1, self.document_count))
            return
        at = np.array([HEADER.size + 12 * self.sequence_count + 8 * document])
        self.pages.check(at, at + 8)
        sequence = self.documents[document]
        if sequence < self.sequence_count:
            at = HEADER.size + 4 * self.sequence_count + 8 * np.array([sequence])
            self.pages.check(at, at + 8)

    def refuse_strays(self, sequences: slice) -> None:
        """Raise DataError for one of some sequences that does not lie within `.bin`."""
        if self.pages is not None:
            self.pages.check_all()
        _refuse_outside(
            self._path,
            self.pointers[sequences],
            self.lengths[sequences],
            item_bytes=self.dtype.itemsize,
            end=self.end,
        )


def checked_header(path: Path, content: mmap.mmap | bytes) -> tuple[int, int, int]:
    """Return (dtype code, sequences, entries of the document array) of an index that is whole."""
    if len(content) < HEADER.size or content[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not an index of tokens: it does not begin (byte 0) with {MAGIC!r}.",
            remedy="Give the path of a Megatron .bin/.idx pair, without the ending.",
        )
    _, version, code, sequences, entries = HEADER.unpack(content[: HEADER.size])
    if version != 1:
        raise DataError(
            f"{path} has version {version} (byte 9); only version 1 is known.",
            remedy="Convert it with the program that wrote it, or tokenise again.",
        )
    if code not in DTYPES:
        kind = "floats, or other types in an older fork" if code in FOREIGN else "unknown"
        raise DataError(
            f"{path} has token type {code} (byte 17): {kind}, not token ids.",
            remedy="Tokenise again; ids are stored as integers (codes 1 to 5 and 8).",
        )
    wanted = HEADER.size + 12 * sequences + 8 * entries
    if entries < 1 or len(content) != wanted:
        raise DataError(
            f"{path} is damaged: its header (bytes 18 to 33) tells of {sequences:,} sequences and "
            f"{entries - 1:,} documents, which take {wanted:,} bytes, and it has {len(content):,}.",
            remedy=TOKENIZE_AGAIN,
        )
    return code, sequences, entries


def _refuse_apart(
    path: Path,
    pointers: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    some: range,
    *,
    item_bytes: int,
    end: int,
) -> None:
    """Raise DataError where a sequence of `some` does not begin where the one before it ends.

    pointers, lengths: of all sequences. item_bytes: bytes of a token. end: bytes of all tokens; the sequence
    behind the last one would begin there.
    """
    for start in range(some.start, some.stop, _CHECKED_AT_ONCE):
        stop = min(start + _CHECKED_AT_ONCE, some.stop)
        begins = pointers[start : min(stop, len(pointers))].copy()
        if stop > len(pointers):
            begins = np.append(begins, end)
        before = slice(max(start - 1, 0), stop - 1)
        wanted = pointers[before] + lengths[before].astype(np.int64) * item_bytes
        if not start:
            wanted = np.concatenate([[0], wanted])
        apart = np.flatnonzero(begins != wanted)
        if apart.size:
            first = int(apart[0])
            raise DataError(
                f"{path} is damaged: sequence {start + first:,} begins at byte {begins[first]:,} and not "
                f"where the one before it ends, byte {wanted[first]:,}.",
                remedy=TOKENIZE_AGAIN,
            )


def _refuse_outside(
    path: Path,
    pointers: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    *,
    item_bytes: int,
    end: int,
) -> None:
    """Raise DataError for a sequence that is not of whole tokens within `.bin`, which ends at byte `end`."""
    for start in range(0, len(pointers), _CHECKED_AT_ONCE):
        begins = pointers[start : start + _CHECKED_AT_ONCE]
        counts = lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
        stray = (counts < 0) | (begins < 0) | (begins > end) | (begins % item_bytes != 0)
        stray |= counts > (end - begins) // item_bytes
        if stray.any():
            first = int(np.argmax(stray))
            raise DataError(
                f"{path} is damaged: sequence {start + first:,} has {counts[first]:,} tokens from byte "
                f"{begins[first]:,} on, and {path.stem}.bin has tokens of {item_bytes} bytes up to byte "
                f"{end:,}.",
                remedy=TOKENIZE_AGAIN,
            )


def _refuse_falling(path: Path, indices: npt.NDArray[np.int64], *, first: int, sequences: int) -> None:
    """Raise DataError where document indices fall, or are of no sequence. first: number of the first one's
    document.
    """
    strange = np.flatnonzero((indices < 0) | (indices > sequences))
    back = np.flatnonzero(np.diff(indices) < 0)
    if strange.size or back.size:
        number = int(strange[0]) if strange.size else int(back[0]) + 1
        raise DataError(
            f"{path} is damaged: document {first + number:,} begins with sequence {indices[number]:,}, of "
            f"{sequences:,}, or before the document before it.",
            remedy=TOKENIZE_AGAIN,
        )
