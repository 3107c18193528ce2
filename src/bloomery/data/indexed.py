r"""Reads and writes token files in Megatron's indexed format: tokens in `PREFIX.bin`, index in `PREFIX.idx`.

`.idx`, little-endian and unpadded: `MMIDIDX\0\0`, u64 version 1, u8 dtype code, u64 sequences S, u64
documents + 1 = D, i32[S] lengths in tokens, i64[S] byte pointers into `.bin`, i64[D] document indices.
"""

from __future__ import annotations

import copy
import mmap
import os
import shutil
import struct
from array import array
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery import durable
from bloomery.data.storage import refusals_named
from bloomery.data.streaming import mirror_of
from bloomery.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_FOREIGN = (6, 7)  # f64 and f32 in Megatron, other types in an older fork, tokens in neither
_SMALL_VOCABULARY = 65_500
_CHECKED_AT_ONCE = 1 << 20
_COPY_BYTES = 1 << 24
_TOKENIZE_AGAIN = "Tokenise the source again, or copy the pair of files again from where they are whole."

Tokens = npt.NDArray[Any]  # Any: one of the integer types of the table above


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the token type for a vocabulary, as Megatron chooses it: u16 where it is safe, else i32."""
    return np.dtype("<u2" if vocabulary_size < _SMALL_VOCABULARY else "<i4")


def bin_path(prefix: Path) -> Path:
    """Return the path of a pair's token file."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of a pair's index."""
    return prefix.with_name(prefix.name + ".idx")


class IndexedWriter:
    """Writes one pair of files, which get their names only if the `with` block ends without an error."""

    def __init__(self, prefix: Path, *, dtype: npt.DTypeLike) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise ValueError(f"tokens cannot be stored as {self.dtype}")
        self.token_count = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._partial = bin_path(prefix).with_name(bin_path(prefix).name + ".partial")
        with refusals_named(self._partial):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")

    @property
    def document_count(self) -> int:
        """Number of documents added so far, including empty ones."""
        return len(self._documents) - 1

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document, including its end-of-document token; a document without tokens has no
        sequence.
        """
        values = np.asarray(tokens)
        self.add_documents(values, np.array([values.size], dtype=np.int64))

    def add_documents(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        """Append several documents.

        tokens: the tokens of all documents, one after another.
        lengths: number of tokens in each document.
        """
        if tokens.size:
            self._check(tokens, lengths)
            with refusals_named(self._partial):
                self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        whole = np.ascontiguousarray(lengths[lengths > 0], dtype=np.int32)
        ends = len(self._lengths) + np.cumsum(lengths > 0, dtype=np.int64)
        self._lengths.frombytes(whole.tobytes())
        self._documents.frombytes(ends.tobytes())
        self.token_count += int(tokens.size)

    def add_pair(self, pair: IndexedDataset) -> None:
        """Append all documents of a pair of the same token type; sequences keep their bounds."""
        pair.refuse_elsewhere()
        if pair.dtype != self.dtype:
            raise DataError(
                f"{pair.prefix} holds {pair.dtype.name} tokens, and {self.prefix} is {self.dtype.name}.",
                remedy="Join pairs of one token type: tokenise one side again with the other's tokenizer.",
            )
        tokens_told = int(pair.sequence_lengths.sum(dtype=np.int64))
        if tokens_told != pair.token_count:
            raise DataError(
                f"{idx_path(pair.prefix)} has sequences of {tokens_told:,} tokens in all, and its pointers "
                f"end at token {pair.token_count:,}: its sequences do not adjoin.",
                remedy=_TOKENIZE_AGAIN,
            )
        with refusals_named(self._partial), bin_path(pair.prefix).open("rb") as tokens:
            shutil.copyfileobj(tokens, self._file, _COPY_BYTES)
        before = len(self._lengths)
        self._lengths.frombytes(pair.sequence_lengths.tobytes())
        self._documents.frombytes((pair.document_indices[1:] + before).tobytes())
        self.token_count += pair.token_count

    def _check(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        limits = np.iinfo(self.dtype)
        if tokens.min() < limits.min or tokens.max() > limits.max:
            first = int(np.argmax((tokens < limits.min) | (tokens > limits.max)))
            number = self.document_count + int(np.searchsorted(np.cumsum(lengths), first, "right"))
            raise DataError(
                f"Document {number} of {self.prefix} has token ids from {tokens.min()} to "
                f"{tokens.max()}, which {self.dtype.name} cannot hold.",
                remedy="Use the vocabulary size of the tokenizer that made these ids.",
            )
        longest = int(np.argmax(lengths))
        if lengths[longest] > np.iinfo(np.int32).max:
            raise DataError(
                f"Document {self.document_count + longest} of {self.prefix} has {lengths[longest]:,} tokens; "
                "the layout allows 2,147,483,647.",
                remedy="Cut the document into several.",
            )

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            with suppress(OSError):  # a full disk was reported already, and closing tries to write once more
                self._file.close()
            self._partial.unlink(missing_ok=True)

    def _commit(self) -> None:
        """Put both files in place, `.idx` last, because a `.bin` without it is not a dataset."""
        target, index = bin_path(self.prefix), idx_path(self.prefix)
        partial_index = index.with_name(index.name + ".partial")
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        with refusals_named(target):
            self._file.flush()
            durable.sync_file(self._file.fileno())
        with refusals_named(index):
            try:
                partial_index.unlink(missing_ok=True)  # a writer that was killed may have left it
                with durable.open_new(partial_index) as file:
                    file.write(_HEADER.pack(MAGIC, 1, _CODES[self.dtype], len(lengths), len(self._documents)))
                    file.write(lengths.astype("<i4").tobytes())
                    file.write((ends - lengths * np.int64(self.dtype.itemsize)).astype("<i8").tobytes())
                    file.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8").tobytes())
                if index.exists():  # otherwise a kill would leave an old index on new tokens
                    index.unlink()
                    durable.sync_directory(index.parent)
                durable.replace(self._partial, target)
                durable.replace(partial_index, index)
            finally:
                partial_index.unlink(missing_ok=True)


class IndexedDataset:
    """A pair of files, memory-mapped for reading. Opening it reads the header and checks the sizes.

    mirror: fetches blocks of a remote pair; None for a local pair. Code that reads `flat` or the whole file
    of a remote pair must do so within `mirror.read`; `window` and its callers do it by themselves.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index, tokens = idx_path(prefix), bin_path(prefix)
        self._index = _mapped(index)
        code, self.sequence_count, entries = _checked_header(index, self._index)
        self.dtype, self.type_code = np.dtype(_DTYPES[code]), code
        self.document_count = entries - 1
        self._all_sequences, self._all_documents = self.sequence_count, self.document_count
        self._sequences, self._documents = slice(0, self.sequence_count), slice(0, self.document_count + 1)
        _check_documents(index, self.document_indices, self.sequence_count)
        self.mirror = mirror_of(prefix, tokens)
        self._tokens = _mapped(tokens)
        wanted = self._expected_bytes()
        if len(self._tokens) != wanted:
            what = "cut short" if len(self._tokens) < wanted else "longer than its index says"
            raise DataError(
                f"{tokens} is {what}: it ends at byte {len(self._tokens):,}, and {index.name} places the end "
                f"of the last document at byte {wanted:,}.",
                remedy=_TOKENIZE_AGAIN,
            )
        self.token_count = wanted // self.dtype.itemsize
        self._whole: Tokens = np.frombuffer(self._tokens, dtype=self.dtype)
        self._flat = self._whole
        self._first_token = 0

    def refuse_elsewhere(self) -> None:
        """Raise DataError for a remote pair. Code that reads whole files calls this first."""
        if self.mirror is not None:
            raise DataError(
                f"{self.prefix} is a window on {self.mirror.outline.address}, and not all of it is here.",
                remedy="Bring it here first: `bloomery data fetch`.",
            )

    def part(self, documents: range) -> IndexedDataset:
        """Return some neighbouring documents as a dataset of its own, over the same mapping."""
        if not 0 <= documents.start <= documents.stop <= self.document_count:
            raise IndexError(f"documents {documents.start} to {documents.stop} of {self.document_count}")
        part = copy.copy(self)
        part.__dict__.pop("document_starts", None)
        begin = self._documents.start + documents.start
        ends = self.document_indices[[documents.start, documents.stop]] + self._sequences.start
        first, last = ends.tolist()
        part._documents = slice(begin, begin + len(documents) + 1)
        part._sequences = slice(first, last)
        part.document_count, part.sequence_count = len(documents), last - first
        stop = int(self._tokens_before(last))
        part._first_token = int(self._tokens_before(first))
        part._flat = self._whole[part._first_token : stop]
        part.token_count = part._flat.size
        return part

    def window_count(self, sequence_length: int) -> int:
        """Return the number of whole samples: window k is tokens [k·L, k·L + L], so it shares one token with
        the next.
        """
        return max(0, (self.token_count - 1) // sequence_length)

    def window(self, start_token: int, count: int) -> Tokens:
        """Return `count` tokens from `start_token` on, as a read-only view of a local file or a copy from a
        remote one.
        """
        if start_token < 0 or count < 0 or start_token + count > self.token_count:
            raise IndexError(f"tokens {start_token} to {start_token + count} of {self.token_count}")
        if self.mirror is None or not count:
            return self._flat[start_token : start_token + count]
        most = max(1, self.mirror.capacity // 4 * self.mirror.outline.block_bytes // self.dtype.itemsize)
        copied = np.empty(count, dtype=self.dtype)
        for start in range(0, count, most):
            chunk = slice(start_token + start, start_token + min(count, start + most))
            begin = np.array([self.first_byte + chunk.start * self.dtype.itemsize])
            end = np.array([self.first_byte + chunk.stop * self.dtype.itemsize])
            copied[start : start + most] = self.mirror.read(begin, end, self._flat[chunk].copy)
        return copied

    @property
    def first_byte(self) -> int:
        """The byte of `.bin` at which the tokens of `flat` begin."""
        return self._first_token * self.dtype.itemsize

    def document(self, number: int) -> Tokens:
        """Return all tokens of one document, including its end-of-document token."""
        start, stop = self.document_starts[number : number + 2].tolist()
        return self.window(start, stop - start)

    @cached_property
    def document_starts(self) -> npt.NDArray[np.int64]:
        """The offset of each document's first token, and at the end the number of tokens; [documents + 1]."""
        first, end = self._tokens_before(self._sequences.start), self._tokens_before(self._sequences.stop)
        starts: npt.NDArray[np.int64] = np.append(self.pointers // self.dtype.itemsize, end) - first
        return starts[self.document_indices]

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens in each sequence, as an unaligned view of the index; [sequences]."""
        return np.frombuffer(self._index, "<i4", self._all_sequences, _HEADER.size)[self._sequences]

    @property
    def flat(self) -> Tokens:
        """All tokens, documents end to end, as a read-only view of the file."""
        return self._flat

    @property
    def file_and_pointers(self) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """The whole file's tokens, and the byte at which each sequence begins in it (an unaligned view)."""
        return self._whole, self.pointers

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """The byte of `.bin` at which each sequence begins, as an unaligned view of the index."""
        return self._all_pointers[self._sequences]

    def refuse_stray_sequences(self) -> None:
        """Raise DataError for a sequence that does not lie within `.bin`. Code that follows pointers calls
        this first.

        Opening a pair does not check each sequence, because most reading needs none of their pointers.
        """
        end = self._whole.size * self.dtype.itemsize
        for start in range(0, self.sequence_count, _CHECKED_AT_ONCE):
            pointers = self.pointers[start : start + _CHECKED_AT_ONCE]
            lengths = self.sequence_lengths[start : start + _CHECKED_AT_ONCE].astype(np.int64)
            longest = (end - pointers) // self.dtype.itemsize
            stray = np.flatnonzero((lengths < 0) | (pointers < 0) | (pointers > end) | (lengths > longest))
            if stray.size:
                first = int(stray[0])
                raise DataError(
                    f"{idx_path(self.prefix)}: sequence {start + first:,} has {lengths[first]:,} tokens from "
                    f"byte {pointers[first]:,} on, and {bin_path(self.prefix).name} ends at byte {end:,}.",
                    remedy=_TOKENIZE_AGAIN,
                )

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """The number of the sequence that each document begins with, and at the end the number of
        sequences.
        """
        offset = _HEADER.size + 12 * self._all_sequences
        indices = np.frombuffer(self._index, "<i8", self._all_documents + 1, offset)[self._documents]
        return indices - self._sequences.start if self._sequences.start else indices

    @property
    def _all_pointers(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._index, "<i8", self._all_sequences, _HEADER.size + 4 * self._all_sequences)

    def _tokens_before(self, sequence: int) -> int:
        """Return the token at which a sequence of the whole file begins; for the end, the number of
        tokens.
        """
        if sequence == self._all_sequences:
            return int(self._whole.size)
        return int(self._all_pointers[sequence]) // self.dtype.itemsize

    def _expected_bytes(self) -> int:
        if not self.sequence_count:
            return 0
        return int(self.pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize


def _mapped(path: Path) -> mmap.mmap | bytes:
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
    if hasattr(mapping, "madvise"):  # samples are read in random order, so reading ahead would be wasted
        mapping.madvise(mmap.MADV_RANDOM)
    return mapping


def _checked_header(path: Path, content: mmap.mmap | bytes) -> tuple[int, int, int]:
    """Return (dtype code, sequences, entries of the document array) of an index, after checking that it is
    whole.
    """
    if len(content) < _HEADER.size or content[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not an index of tokens: it does not begin (byte 0) with {MAGIC!r}.",
            remedy="Give the path of a Megatron .bin/.idx pair, without the ending.",
        )
    _, version, code, sequences, entries = _HEADER.unpack(content[: _HEADER.size])
    if version != 1:
        raise DataError(
            f"{path} has version {version} (byte 9); only version 1 is known.",
            remedy="Convert it with the program that wrote it, or tokenise again.",
        )
    if code not in _DTYPES:
        what = "floats, or other types in an older fork" if code in _FOREIGN else "unknown"
        raise DataError(
            f"{path} has token type {code} (byte 17): {what}, not token ids.",
            remedy="Tokenise again; ids are stored as integers (codes 1 to 5 and 8).",
        )
    wanted = _HEADER.size + 12 * sequences + 8 * entries
    if entries < 1 or len(content) != wanted:
        raise DataError(
            f"{path} is damaged: its header (bytes 18 to 33) tells of {sequences:,} sequences and "
            f"{entries - 1:,} documents, which take {wanted:,} bytes, and it has {len(content):,}.",
            remedy=_TOKENIZE_AGAIN,
        )
    return code, sequences, entries


def _check_documents(path: Path, indices: npt.NDArray[np.int64], sequences: int) -> None:
    if indices[0] != 0 or indices[-1] != sequences:
        raise DataError(
            f"{path} is damaged: its document indices (from byte {_HEADER.size + 12 * sequences:,}) run from "
            f"{indices[0]} to {indices[-1]}, not from 0 to {sequences}.",
            remedy=_TOKENIZE_AGAIN,
        )
