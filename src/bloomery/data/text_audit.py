"""Audits training text: the n-grams that it shares with other texts, and those that a document repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloomery.data.indexed import IndexedDataset
from bloomery.data.ngrams import HashSet, SomeDocuments, documents_in_turn, ngram_hashes
from bloomery.events.records import ProgressCallback, ignore_progress

BINS = 20
"""The bins of the histogram of repeated n-grams."""
_STRETCHES = 256  # of a dataset that is not read whole
_SHOWN = 20
_MOST_NGRAMS = 40_000_000  # of one text to compare with: 320 MB
_SALT = np.uint64(0xD1B54A32D192ED03)


@dataclass(frozen=True, kw_only=True)
class SharedNgrams:
    """How much of one text's n-grams the training text has.

    ngrams: how many different ones it has, at most 40 million of its beginning, and none of the ends of
    documents of more than 16,777,216 tokens.
    is_whole: whether these are all.
    found: how many of them are in the training text that was read.
    documents: training documents with one of them or more.
    examples: (dataset, document, its n-grams that are shared), the first of them.
    """

    ngrams: int
    is_whole: bool
    found: int
    documents: int
    examples: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class RepeatedNgrams:
    """How much documents of one dataset repeat themselves.

    documents, tokens: how many were read. histogram: documents by the share of their n-grams that occurred
    in them before, in BINS equal steps from 0 to 1. share: of all n-grams. most: (document, share, tokens).
    """

    documents: int
    tokens: int
    histogram: tuple[int, ...]
    share: float
    most: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True, kw_only=True)
class TextAudit:
    """What was found.

    is_exact: whether all of the training text was read. Otherwise stretches of it were, or documents of more
    than 16,777,216 tokens without their ends.
    left_out: tokens of these ends.
    """

    is_exact: bool
    tokens_read: int
    left_out: int
    shared: dict[str, SharedNgrams]
    repeated: dict[str, RepeatedNgrams]


class Ngrams:
    """The n-grams of a text that training text is compared with."""

    def __init__(self, parts: Iterator[tuple[npt.NDArray[np.uint64], bool]]) -> None:
        """parts: hashes of n-grams, and whether they are all of their text."""
        held, total, self.is_whole = list[npt.NDArray[np.uint64]](), 0, True
        for part, is_whole in parts:
            self.is_whole &= is_whole
            if total + part.size > _MOST_NGRAMS:
                self.is_whole = False
                break
            held.append(part)
            total += part.size
        self.set = HashSet(np.concatenate([np.empty(0, np.uint64), *held]))
        self._seen = np.zeros(len(self.set), dtype=bool)
        self._documents = 0
        self._examples: list[tuple[str, int, int]] = []

    @classmethod
    def of_dataset(cls, dataset: IndexedDataset, size: int) -> Ngrams:
        """Return those of the documents of a dataset that have at least `size` tokens."""
        return cls(
            (whole_ngrams(some.tokens, some.lengths, size)[0], not some.left_out)
            for some in documents_in_turn(dataset)
        )

    @classmethod
    def of_texts(cls, texts: Iterator[npt.NDArray[np.int64]], size: int) -> Ngrams:
        """Return those of texts that were tokenised."""
        return cls((whole_ngrams(tokens, np.array([tokens.size]), size)[0], True) for tokens in texts)

    def compare(
        self, name: str, some: SomeDocuments, hashes: npt.NDArray[np.uint64], document: npt.NDArray[np.int64]
    ) -> None:
        """Note which of the n-grams of some training documents are among them."""
        found = np.flatnonzero(self.set.holds(hashes))
        if not found.size:
            return
        self._seen[np.searchsorted(self.set.hashes, hashes[found])] = True
        inside, counts = np.unique(document[found], return_counts=True)
        self._documents += inside.size
        for number, count in zip(inside.tolist(), counts.tolist(), strict=True):
            if len(self._examples) < _SHOWN:
                self._examples.append((name, some.first + number, count))

    def result(self) -> SharedNgrams:
        """Return what was found."""
        return SharedNgrams(
            ngrams=len(self.set),
            is_whole=self.is_whole,
            found=int(self._seen.sum()),
            documents=self._documents,
            examples=tuple(self._examples),
        )


def audit_text(
    training: Mapping[str, IndexedDataset],
    others: Mapping[str, Ngrams],
    *,
    size: int,
    at_most_tokens: int,
    progress: ProgressCallback = ignore_progress,
) -> TextAudit:
    """Read training text once, and compare its n-grams of `size` tokens with others and with themselves.

    at_most_tokens: of more text, stretches of documents at even distances are read. Memory: 8 bytes for each
    n-gram of the others, and that of a million tokens.
    """
    total = sum(dataset.token_count for dataset in training.values())
    share = min(1.0, at_most_tokens / max(total, 1))
    read, left_out, repeated = 0, 0, {}
    for name, dataset in training.items():
        repeats = _Repeats()
        for some in _stretches(dataset, share):
            hashes, document = whole_ngrams(some.tokens, some.lengths, size)
            for other in others.values():
                other.compare(name, some, hashes, document)
            repeats.add(some, hashes, document)
            read, left_out = read + int(some.tokens.size), left_out + some.left_out
            progress("reading documents", read, round(total * share), "tokens")
        repeated[name] = repeats.result()
    return TextAudit(
        is_exact=share >= 1 and not left_out,
        tokens_read=read,
        left_out=left_out,
        shared={name: other.result() for name, other in others.items()},
        repeated=repeated,
    )


def whole_ngrams(
    tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return the n-grams of whole `size`, and the document that each is in; shorter documents have none."""
    hashes, counts = ngram_hashes(tokens, lengths, size)
    document = np.repeat(np.arange(lengths.size), counts)
    whole = (lengths >= size)[document]
    return hashes[whole], document[whole]


def _stretches(dataset: IndexedDataset, share: float) -> Iterator[SomeDocuments]:
    if share >= 1:
        yield from documents_in_turn(dataset)
        return
    count = min(_STRETCHES, max(1, round(dataset.document_count * share)))
    for number in range(count):
        begin = number * dataset.document_count // count
        stop = (number + 1) * dataset.document_count // count
        wanted = max(1, round((stop - begin) * share))
        yield from documents_in_turn(dataset, begin=begin, stop=begin + wanted)


class _Repeats:
    def __init__(self) -> None:
        self._histogram = np.zeros(BINS, dtype=np.int64)
        self._documents = self._tokens = self._ngrams = self._again = 0
        self._most: list[tuple[float, int, int]] = []

    def add(
        self, some: SomeDocuments, hashes: npt.NDArray[np.uint64], document: npt.NDArray[np.int64]
    ) -> None:
        apart = hashes ^ (document.astype(np.uint64) + np.uint64(1)) * _SALT
        _, first = np.unique(apart, return_index=True)
        counts = np.bincount(document, minlength=some.lengths.size)
        again = counts - np.bincount(document[first], minlength=some.lengths.size)
        shares = again / np.maximum(counts, 1)
        self._histogram += np.bincount(np.minimum((shares * BINS).astype(int), BINS - 1), minlength=BINS)
        self._documents += some.lengths.size
        self._tokens += int(some.lengths.sum())
        self._ngrams, self._again = self._ngrams + int(counts.sum()), self._again + int(again.sum())
        for place in np.argsort(-again)[:_SHOWN].tolist():
            if again[place]:
                self._most.append((float(shares[place]), some.first + place, int(some.lengths[place])))
        self._most = sorted(self._most, reverse=True)[:_SHOWN]

    def result(self) -> RepeatedNgrams:
        return RepeatedNgrams(
            documents=self._documents,
            tokens=self._tokens,
            histogram=tuple(self._histogram.tolist()),
            share=self._again / max(self._ngrams, 1),
            most=tuple((number, share, tokens) for share, number, tokens in self._most),
        )
