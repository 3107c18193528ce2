"""Removes documents that are equal or nearly equal (MinHash) to earlier ones, and writes the rest as a pair.

Keys of documents go to files by their value: the hash of all tokens and, for near duplicates, hashes of bands
of a MinHash signature (Broder 1997; Indyk & Motwani 1998). Documents of equal keys are candidates, and each
candidate is compared with the earlier one itself: nothing is removed because of a hash.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery import durable
from bloomery.data.duplicate_candidates import KeyFiles
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.ngrams import (
    HASHED_TOKENS,
    SomeDocuments,
    documents_in_turn,
    ngram_hashes,
    tokens_of_document,
)
from bloomery.data.pairs import agreed_facts, replace_pair
from bloomery.data.storage import as_storage_error, locked_directory
from bloomery.errors import DataError
from bloomery.events.records import ProgressCallback, ignore_progress

_HASHES, _SEED = 128, 1
_LIKE, _ROWS_OF_LIKE, _ROWS_OF_LESS = 0.8, 8, 4  # rows of a band from this similarity on, and below it
_JUST_BELOW_1 = 0.9999  # equal n-grams in another number or order
_COPIED_AT_ONCE, _TOKENS_AT_ONCE = 1 << 13, 1 << 22
DUPLICATES = "-duplicates.jsonl"
"""The ending of the list of the documents that were left out, after the pair's name."""


@dataclass(frozen=True, kw_only=True)
class Deduplicated:
    """The result: documents and tokens that are left, and those that were removed."""

    documents: int
    tokens: int
    removed_equal: int
    removed_near: int
    removed_tokens: int


@dataclass(frozen=True, kw_only=True)
class SimilarityThreshold:
    """From which similarity on documents count as duplicates.

    threshold: share of common n-grams (Jaccard) from which on a document is removed. 1: only equal ones.
    ngram: tokens of an n-gram.
    """

    threshold: float = 0.8
    ngram: int = 5

    @property
    def is_exact(self) -> bool:
        """Whether only equal documents are removed."""
        return self.threshold >= 1

    @property
    def rows(self) -> int:
        """The rows of a band: documents that are alike by s share one of b bands of r by 1 - (1 - s^r)^b."""
        return _ROWS_OF_LIKE if self.threshold >= _LIKE else _ROWS_OF_LESS


class _Pairs:
    """Several pairs whose documents are numbered through."""

    def __init__(self, prefixes: Sequence[Path]) -> None:
        self.pairs = [IndexedDataset(prefix) for prefix in prefixes]
        for pair in self.pairs:
            pair.refuse_elsewhere()
            if pair.dtype != self.pairs[0].dtype:
                raise DataError(
                    f"{pair.prefix} holds {pair.dtype.name} tokens, and {self.pairs[0].prefix} "
                    f"{self.pairs[0].dtype.name}.",
                    remedy="Compare pairs of one tokenizer.",
                )
        self.begins = np.cumsum([0, *(pair.document_count for pair in self.pairs)])
        self.count = int(self.begins[-1])

    def place(self, document: int) -> tuple[IndexedDataset, int]:
        number = int(np.searchsorted(self.begins, document, side="right")) - 1
        return self.pairs[number], document - int(self.begins[number])

    def tokens(self, document: int) -> npt.NDArray[Any]:
        pair, number = self.place(document)
        return tokens_of_document(pair, number)


def deduplicate(
    prefixes: Sequence[Path],
    out: Path,
    *,
    likeness: SimilarityThreshold,
    against: Sequence[Path] = (),
    progress: ProgressCallback = ignore_progress,
) -> Deduplicated:
    """Write the documents of some pairs to `out`, in their order, without those that an earlier one is equal
    to, or alike. The pairs stay; `OUT-duplicates.jsonl` lists what was left out, and because of what.
    Documents of several sequences are refused.

    against: pairs, such as held-out text, whose documents come before all others and are not written.
    Beside `out` it takes 16 bytes for each document and key (17 keys; 33 where the threshold is below 0.8; 1
    where only equal ones are removed), and 8 for each document that is removed.
    Each document that is removed has one that is kept and at least as much alike as `likeness` says. Of near
    duplicates some are missed: of 80% alike 5 in 100, of 90% alike 1 in 10⁴ (16 bands of 8); where the
    threshold is below 0.8, of 50% alike 13 in 100, of 60% alike 1 in 100 (32 bands of 4).
    """
    if any(prefix.resolve() == out.resolve() for prefix in (*prefixes, *against)):
        raise DataError(f"{out} is one of the pairs to read.", remedy="Write to another path.")
    documents = _Pairs([*against, *prefixes])
    _refuse_several_sequences(documents.pairs[len(against) :])
    first_written = int(documents.begins[len(against)])
    scratch = out.with_name(out.name + ".dedup")
    with locked_directory(scratch, name="lock"):
        try:
            with closing(KeyFiles(scratch)) as files:
                _add_keys(documents, files, likeness, progress=progress)
                candidates = files.candidates(documents.count, progress=progress)
            removed = _allocated(scratch / "removed", documents.count)
            equal = near = 0
            with (
                as_storage_error(scratch),
                closing(_Keepers(scratch / "keepers")) as keepers,
                durable.open_new(scratch / "listed") as listed,
            ):
                for entry in _duplicates(
                    documents, candidates, removed, keepers, likeness, first_written=first_written
                ):
                    equal, near = equal + (entry["alike"] == 1), near + (entry["alike"] < 1)
                    listed.write((json.dumps(entry) + "\n").encode())
            pairs, begins = documents.pairs[len(against) :], documents.begins[len(against) :].tolist()
            tokens = _write_kept(pairs, begins, removed, scratch / out.name, progress=progress)
            with as_storage_error(out):
                out.parent.mkdir(parents=True, exist_ok=True)
                replace_pair(scratch / out.name, out)
                durable.replace(scratch / "listed", out.with_name(out.name + DUPLICATES))
            left = IndexedDataset(out)
            return Deduplicated(
                documents=left.document_count,
                tokens=left.token_count,
                removed_equal=equal,
                removed_near=near,
                removed_tokens=tokens,
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _refuse_several_sequences(pairs: Sequence[IndexedDataset]) -> None:
    """Raise DataError for documents of several sequences, which would be joined: prompts with answers."""
    for pair in pairs:
        if pair.sequence_count > pair.document_count:
            raise DataError(
                f"{pair.prefix} has {pair.sequence_count:,} sequences in {pair.document_count:,} documents, "
                "as prompts with answers have; here each document would become one sequence.",
                remedy="Remove duplicates from the text, and tokenise it again.",
            )


def _allocated(path: Path, count: int) -> npt.NDArray[np.bool_]:
    """Return so many values of False in a file, whose space is taken now: a map of a full disk would kill."""
    with as_storage_error(path), path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(count, 1))
    return np.memmap(path, dtype=np.bool_, mode="r+", shape=(max(count, 1),))


def _add_keys(
    documents: _Pairs, files: KeyFiles, likeness: SimilarityThreshold, *, progress: ProgressCallback
) -> None:
    """Add the keys of each document: of its tokens and, for near duplicates, of bands of its signature."""
    for begin, pair in zip(documents.begins.tolist(), documents.pairs, strict=False):
        for some in documents_in_turn(pair):
            numbers = np.arange(some.lengths.size) + begin + some.first
            keys = [equal_keys(some)]
            if not likeness.is_exact:
                keys += _band_keys(some, likeness)
            files.add(np.concatenate(keys), np.tile(numbers, len(keys)))
            progress("comparing", int(numbers[-1]) + 1, documents.count, "documents")


def equal_keys(some: SomeDocuments) -> npt.NDArray[np.uint64]:
    """Return the xxh3-64 of each document's tokens, as int64: pairs of u16 and of i32 may hold equal ones."""
    tokens = np.ascontiguousarray(some.tokens, dtype=np.int64)
    edges = [0, *np.cumsum(some.lengths).tolist()]
    return np.array(
        [xxhash.xxh3_64_intdigest(tokens[edges[n] : edges[n + 1]].data) for n in range(some.lengths.size)],
        dtype=np.uint64,
    )


def _band_keys(some: SomeDocuments, likeness: SimilarityThreshold) -> list[npt.NDArray[np.uint64]]:
    from rensa import RMinHash

    rows, count = likeness.rows, _HASHES // likeness.rows
    hashes, counts = ngram_hashes(some.tokens, some.lengths, likeness.ngram)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, _HASHES, _SEED)
    signatures = np.array(matrix.to_rows(), dtype=np.int64).reshape(-1, rows)  # a row for each band
    bands, _ = ngram_hashes(signatures.reshape(-1), np.full(len(signatures), rows), rows)
    salt = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    return [bands.reshape(-1, count)[:, band] ^ salt[band] for band in range(count)]


class _Keepers:
    """For each removed document the kept one that it is like, in a file: there may be half a billion."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)

    def put(self, document: int, kept: int) -> None:
        os.pwrite(self._file.fileno(), kept.to_bytes(8, "little"), 8 * document)

    def of(self, document: int) -> int:
        return int.from_bytes(os.pread(self._file.fileno(), 8, 8 * document), "little")

    def close(self) -> None:
        self._file.close()


def _duplicates(
    documents: _Pairs,
    candidates: Iterator[tuple[int, int]],
    removed: npt.NDArray[np.bool_],
    keepers: _Keepers,
    likeness: SimilarityThreshold,
    *,
    first_written: int,
) -> Iterator[dict[str, Any]]:
    """Mark and yield the documents that are like an earlier one that is kept, in their order.

    In the place of an earlier one that was removed, the one that was kept for it is compared: a document that
    is equal to the removed one shares no key with the kept one by chance.
    """
    last, compared = -1, set[int]()
    for document, candidate in candidates:
        if document < first_written or removed[document]:
            continue
        if document != last:
            last, compared = document, set()
        earlier = keepers.of(candidate) if removed[candidate] else candidate
        if earlier in compared:
            continue
        compared.add(earlier)
        alike = _similarity(documents.tokens(document), documents.tokens(earlier), likeness)
        if alike >= likeness.threshold:
            removed[document] = True
            keepers.put(document, earlier)
            (pair, place), (of_pair, of_place) = documents.place(document), documents.place(earlier)
            yield {
                "pair": str(pair.prefix),
                "document": place,
                "like_pair": str(of_pair.prefix),
                "like_document": of_place,
                "alike": round(alike, 4),
            }


def are_equal(tokens: npt.NDArray[Any], others: npt.NDArray[Any]) -> bool:
    """Whether two documents have the same tokens; a few million are compared at a time."""
    return tokens.size == others.size and all(
        np.array_equal(tokens[start : start + _TOKENS_AT_ONCE], others[start : start + _TOKENS_AT_ONCE])
        for start in range(0, tokens.size, _TOKENS_AT_ONCE)
    )


def _similarity(tokens: npt.NDArray[Any], earlier: npt.NDArray[Any], likeness: SimilarityThreshold) -> float:
    """Return 1 for equal documents, else the share of their n-grams that both have, below 1."""
    if are_equal(tokens, earlier):
        return 1.0
    if likeness.is_exact:
        return 0.0
    ours, theirs = (
        np.unique(
            ngram_hashes(text[:HASHED_TOKENS], np.array([min(text.size, HASHED_TOKENS)]), likeness.ngram)[0]
        )
        for text in (tokens, earlier)
    )
    common = np.intersect1d(ours, theirs, assume_unique=True).size
    return min(common / max(ours.size + theirs.size - common, 1), _JUST_BELOW_1)


def _write_kept(
    pairs: Sequence[IndexedDataset],
    begins: Sequence[int],
    removed: npt.NDArray[np.bool_],
    staged: Path,
    *,
    progress: ProgressCallback,
) -> int:
    """Write the documents that are kept, and return how many tokens the others have."""
    gone_tokens = 0
    with IndexedWriter(staged, dtype=pairs[0].dtype, seal=agreed_facts(pairs)) as writer:
        for begin, pair in zip(begins, pairs, strict=False):
            for start in range(0, pair.document_count, _COPIED_AT_ONCE):
                stop = min(start + _COPIED_AT_ONCE, pair.document_count)
                starts = pair.starts_between(start, stop)
                kept = ~removed[begin + start : begin + stop]
                gone_tokens += int(np.diff(starts)[~kept].sum())
                for low, high in _runs(kept):
                    _copy(pair, starts[low : high + 1], writer)
                progress("writing", begin + stop - begins[0], removed.size - begins[0], "documents")
    return gone_tokens


def _runs(kept: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return [low, high) of the runs of documents that are kept."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


def _copy(pair: IndexedDataset, starts: npt.NDArray[np.int64], writer: IndexedWriter) -> None:
    """Copy neighbouring documents, a few million tokens at a time."""
    at = 0
    while at < starts.size - 1:
        end = int(np.searchsorted(starts, starts[at] + _TOKENS_AT_ONCE, side="right")) - 1
        end = min(max(end, at + 1), starts.size - 1)
        tokens = pair.window(int(starts[at]), int(starts[end] - starts[at]))
        writer.add_documents(tokens, np.diff(starts[at : end + 1]))
        at = end
