"""Reads and writes tokens in Megatron's indexed format: `PREFIX.bin`, and `PREFIX.idx` (pair_files.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery import durable
from bloomery.data.pair_files import (
    CODES,
    HEADER,
    MAGIC,
    TOKENIZE_AGAIN,
    IndexColumns,
    bin_path,
    idx_path,
    mapped,
    seal_path,
    will_be_read,
)
from bloomery.data.pair_index import PairIndex
from bloomery.data.seal import BLOCK_BYTES, SealFacts, read_seal, refuse_other_sizes, verified_pieces
from bloomery.data.sealing import PageCheck, SealWriter
from bloomery.data.storage import as_storage_error
from bloomery.data.streaming import block_cache_of
from bloomery.errors import DataError

_CHECKED_AT_ONCE = 1 << 20
_FETCHED_AHEAD = 1 << 16
"""Bytes of a window from which on its pages are asked for together: of what is mapped for random access the
system reads each page by itself."""

Tokens = npt.NDArray[Any]  # Any: one of the integer types of pair_files.DTYPES
Counts = npt.NDArray[np.int64]


class IndexedWriter:
    """Writes one pair of files; they get their names only when the `with` block ends without an error.

    seal: what the pair's seal says of the tokens; None seals nothing, and removes the seal of an older pair.
    """

    def __init__(
        self,
        prefix: Path,
        *,
        dtype: npt.DTypeLike,
        seal: SealFacts | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"tokens cannot be stored as {self.dtype}")
        self.token_count = 0
        self._partial = bin_path(prefix).with_name(bin_path(prefix).name + ".partial")
        with as_storage_error(self._partial):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")
            self._columns = IndexColumns(prefix.parent)
        self._seal = SealWriter(prefix, seal, block_bytes=block_bytes) if seal else None

    @property
    def document_count(self) -> int:
        """Number of documents added so far, including empty ones."""
        return self._columns.document_count

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document, including its end-of-document token; a document without tokens has no
        sequence.
        """
        values = np.asarray(tokens)
        self.add_documents(values, np.array([values.size], dtype=np.int64))

    def add_documents(self, tokens: Tokens, lengths: Counts, *, prompts: Counts | None = None) -> None:
        """Append several documents.

        tokens: the tokens of all documents, one after another.
        lengths: number of tokens in each document.
        prompts: how many of a document's first tokens are a sequence of their own; None: it is one sequence.
        """
        if tokens.size:
            self._check(tokens, lengths)
            self._write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        sequences = lengths if prompts is None else np.stack([prompts, lengths - prompts], axis=1).ravel()
        whole = np.ascontiguousarray(sequences[sequences > 0], dtype=np.int32)
        each = 1 if prompts is None else 2
        in_document = (sequences > 0).reshape(len(lengths), each).sum(axis=1)
        ends = self._columns.sequence_count + np.cumsum(in_document, dtype=np.int64)
        with as_storage_error(self._partial):
            self._columns.add_lengths(whole)
            self._columns.add_ends(ends)
        self.token_count += int(tokens.size)

    def add_pair(self, pair: IndexedDataset, copied: Callable[[int], None] = lambda size: None) -> None:
        """Append all documents of a pair of the same token type; sequences keep their bounds.

        copied: called with the bytes of tokens that were copied, some megabytes at a time.
        Raises DataError where the bytes differ from what the pair's seal says.
        """
        pair.refuse_elsewhere()
        if pair.dtype != self.dtype:
            raise DataError(
                f"{pair.prefix} holds {pair.dtype.name} tokens, and {self.prefix} is {self.dtype.name}.",
                remedy="Join pairs of one token type: tokenise one side again with the other's tokenizer.",
            )
        for _ in verified_pieces(idx_path(pair.prefix), pair.seal):
            pass
        tokens_told = int(pair.sequence_lengths.sum(dtype=np.int64))
        if tokens_told != pair.token_count:
            raise DataError(
                f"{idx_path(pair.prefix)} has sequences of {tokens_told:,} tokens in all, and its pointers "
                f"end at token {pair.token_count:,}: its sequences do not adjoin.",
                remedy=TOKENIZE_AGAIN,
            )
        for content in verified_pieces(bin_path(pair.prefix), pair.seal):
            self._write(content)
            copied(len(content))
        before = self._columns.sequence_count
        with as_storage_error(self._partial):
            for start in range(0, pair.sequence_count, _CHECKED_AT_ONCE):
                self._columns.add_lengths(pair.sequence_lengths[start : start + _CHECKED_AT_ONCE])
            for start in range(0, pair.document_count, _CHECKED_AT_ONCE):
                some = pair._document_indices(start, min(start + _CHECKED_AT_ONCE, pair.document_count))
                self._columns.add_ends(some[1:] + before)
        self.token_count += pair.token_count

    def _write(self, content: bytes | memoryview) -> None:
        with as_storage_error(self._partial):
            self._file.write(content)
        if self._seal:
            self._seal.tokens.update(content)

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
            self._columns.close()
            self._partial.unlink(missing_ok=True)
            if self._seal:
                self._seal.close()

    def _commit(self) -> None:
        """Put the files in place: `.bin`, then `.idx`, without which it is not a dataset, then the seal."""
        target, index = bin_path(self.prefix), idx_path(self.prefix)
        partial_index = index.with_name(index.name + ".partial")
        with as_storage_error(target):
            self._file.flush()
            durable.sync_file(self._file.fileno())
        with as_storage_error(index):
            try:
                partial_index.unlink(missing_ok=True)  # a writer that was killed may have left it
                with durable.open_new(partial_index) as file:
                    counts = (self._columns.sequence_count, self.document_count + 1)
                    header = memoryview(HEADER.pack(MAGIC, 1, CODES[self.dtype], *counts))
                    for content in chain([header], self._columns.pieces(self.dtype.itemsize)):
                        file.write(content)
                        if self._seal and len(content):
                            self._seal.index.update(content)
                seal_path(self.prefix).unlink(missing_ok=True)  # of an older pair
                if index.exists():  # or a kill would leave an old index on new tokens
                    index.unlink()
                    durable.sync_directory(index.parent)
                durable.replace(self._partial, target)
                durable.replace(partial_index, index)
            finally:
                partial_index.unlink(missing_ok=True)
        if self._seal:
            self._seal.commit()


class IndexedDataset:
    """A pair of files, memory-mapped for reading. Opening it reads the header and checks the sizes.

    is_checked: a page of a sealed pair is compared with its sum when `window` or the loader first reads it;
    `pages` does it, and is None for pairs that have no such sums or lie elsewhere.
    first_document: the number in the file of the first document; not 0 for some parts.
    mirror: fetches blocks of a remote pair; None for a local pair. Code that reads `flat` or the whole file
    of a remote pair must do so within `mirror.read`; `window` and its callers do it by themselves.
    """

    def __init__(self, prefix: Path, *, is_checked: bool = True) -> None:
        self.prefix = prefix
        self._index, tokens = PairIndex(prefix), bin_path(prefix)
        self.dtype, self.type_code = self._index.dtype, self._index.type_code
        self.sequence_count, self.document_count = self._index.sequence_count, self._index.document_count
        self.first_document = 0
        self._sequences, self._documents = slice(0, self.sequence_count), slice(0, self.document_count + 1)
        self.mirror = block_cache_of(prefix)
        self._tokens = mapped(tokens, at_random=True)
        wanted = self._index.end
        if len(self._tokens) != wanted:
            what = "cut short" if len(self._tokens) < wanted else "longer than its index says"
            raise DataError(
                f"{tokens} is {what}: it ends at byte {len(self._tokens):,}, and {prefix.name}.idx places "
                f"the end of the last document at byte {wanted:,}.",
                remedy=TOKENIZE_AGAIN,
            )
        self.token_count = wanted // self.dtype.itemsize
        self._whole: Tokens = np.frombuffer(self._tokens, dtype=self.dtype)
        self._flat, self._first_token = self._whole, 0
        self.seal = read_seal(prefix) if is_checked and self.mirror is None else None
        self.pages, self._index.pages = self._page_checks()

    def _page_checks(self) -> tuple[PageCheck | None, PageCheck | None]:
        """What checks the pages of `.bin` and of `.idx`."""
        if self.seal is None:
            return None, None
        refuse_other_sizes(self.prefix, self.seal)
        if self.seal.files[".bin"].page_sums is None:
            return None, None
        return (
            PageCheck(self.prefix, bin_path(self.prefix), self._tokens, self.seal),
            PageCheck(self.prefix, idx_path(self.prefix), self._index.content, self.seal),
        )

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
        for edge in (documents.start, documents.stop):
            self._index.refuse_wrong_edge(self._documents.start + edge)
        part = copy.copy(self)
        part.__dict__.pop("document_starts", None)
        begin = part.first_document = self._documents.start + documents.start
        indices, before = self.document_indices, self._sequences.start
        first, last = (int(indices[edge]) + before for edge in (documents.start, documents.stop))
        part._documents = slice(begin, begin + len(documents) + 1)
        part._sequences = slice(first, last)
        part.document_count, part.sequence_count = len(documents), last - first
        stop = int(self._tokens_before(last))
        part._first_token = int(self._tokens_before(first))
        part._flat = self._whole[part._first_token : stop]
        part.token_count = part._flat.size
        return part

    def window_count(self, sequence_length: int) -> int:
        """Return the number of whole samples: window k is tokens [k·L, k·L + L], one shared with the next."""
        return max(0, (self.token_count - 1) // sequence_length)

    def window(self, start_token: int, count: int) -> Tokens:
        """Return `count` tokens from `start_token` on, as a read-only view of a local file or a copy from a
        remote one.
        """
        if start_token < 0 or count < 0 or start_token + count > self.token_count:
            raise IndexError(f"tokens {start_token} to {start_token + count} of {self.token_count}")
        if self.mirror is None or not count:
            first = self.first_byte + start_token * self.dtype.itemsize
            stop = first + count * self.dtype.itemsize
            if stop - first > _FETCHED_AHEAD:
                will_be_read(self._tokens, first, stop)
            if self.pages is not None and count:
                self.pages.check(np.array([first]), np.array([stop]))
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
        """Token offset of each document's first token, and at the end the token count; [documents + 1]."""
        return self.starts_between(0, self.document_count)

    def starts_between(self, begin: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the token offset of each document in [begin, stop), then that of the end of the last one."""
        self.refuse_contradictions(begin, stop)
        first, end = self._tokens_before(self._sequences.start), self._tokens_before(self._sequences.stop)
        indices = self._document_indices(begin, stop)
        starts = np.full(len(indices), end - first, dtype=np.int64)
        within = indices < self.sequence_count  # the others are empty documents at the end, and the end
        low = int(indices.min())  # a slice first: picking from unaligned numbers copies all of them
        near = self.pointers[low : int(indices.max()) + 1].copy()
        starts[within] = near[indices[within] - low] // self.dtype.itemsize - first
        return starts

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence: a view of the index, unaligned; [sequences]."""
        return self._index.lengths[self._sequences]

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
        return self._index.pointers[self._sequences]

    def refuse_stray_sequences(self) -> None:
        """Raise DataError for a sequence that does not lie within `.bin`, before pointers are followed.

        Opening a pair does not check each sequence, because most reading needs none of their pointers.
        """
        self._index.refuse_strays(self._sequences)

    def refuse_contradictions(self, begin: int = 0, stop: int | None = None) -> None:
        """Raise DataError where the index cannot be right about the documents [begin, stop); None: all."""
        stop = self.document_count if stop is None else stop
        self._index.refuse_contradictions(self._documents.start + begin, self._documents.start + stop)

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """The sequence that each document begins with, and at the end the sequence count."""
        return self._document_indices(0, self.document_count)

    def _document_indices(self, begin: int, stop: int) -> npt.NDArray[np.int64]:
        some = self._index.documents[self._documents][begin : stop + 1]
        return some - self._sequences.start if self._sequences.start else some

    def _tokens_before(self, sequence: int) -> int:
        """Return the token at which a sequence of the whole file begins; for the end, the token count."""
        if sequence == self._index.sequence_count:
            return int(self._whole.size)
        return int(self._index.pointers[sequence]) // self.dtype.itemsize
