"""Audits the training data: how well its order is shuffled, and n-grams that it shares or repeats.

Do neighbours in the stream lie near each other in the files, and how often is each sample taken? Which
n-grams does the text share with other texts, and which does a document repeat?
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import DocumentRow, MegatronOrder
from bloomery.data.ngrams import HashSet, SomeDocuments, documents_in_turn, ngram_hashes
from bloomery.data.order import Order
from bloomery.events.records import ProgressCallback, ignore_progress

LAGS = 32
"""The distances 1, 2, … in the order at which the places of samples are correlated."""
COUNTED = 1 << 22
"""The samples up to which all are read; of more, stretches of STRETCH at even distances."""
STRETCH = 1 << 16
"""The samples of one stretch."""
_NEAR = 0.01
_ALARM = 5.0  # standard deviations: by chance once in a million tests


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """How samples of one dataset that follow each other in the stream lie in it.

    looked_at: the number of pairs of neighbours that were compared. is_exact: whether all samples were.
    correlations: of the places of samples 1, 2, … apart; by chance each is within ± 1/√looked_at or so.
    near: share of neighbours whose places are within 1% of the dataset; near_by_chance: as expected.
    alarms: sentences about what chance does not explain.
    """

    looked_at: int
    is_exact: bool
    correlations: tuple[float, ...]
    near: float
    near_by_chance: float
    alarms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """How often the samples of one dataset are taken over the run.

    epochs: samples taken in its first, second, … epoch; of more than 1,000, the first ones.
    least, most: how often a sample is taken, counted sample by sample; None where they are too many, and
    where each epoch is cut into other samples (Megatron's order).
    """

    samples: int
    taken: int
    epochs: tuple[int, ...]
    least: int | None
    most: int | None


def neighbours_of(
    order: Order | MegatronOrder,
    sizes: Sequence[int],
    *,
    samples: int,
    datasets: Sequence[IndexedDataset] = (),
    progress: ProgressCallback = ignore_progress,
) -> list[Neighbours]:
    """Return for each dataset how its neighbours in the stream lie.

    sizes: samples that each dataset has.
    datasets: for a MegatronOrder, whose samples are cut from shuffled documents, the files of these.
    """
    is_exact = samples <= COUNTED
    count = 1 if is_exact else COUNTED // STRETCH
    length = samples if is_exact else STRETCH
    sums = [_Sums() for _ in sizes]
    for number in range(count):
        begin = number * (samples - length) // max(count - 1, 1)
        which, windows = order.locate_samples(np.arange(begin, begin + length, dtype=np.int64))
        for dataset in np.unique(which).tolist():
            own = windows[which == dataset]
            if isinstance(order, MegatronOrder):
                sums[dataset].add(_places_in_file(order.rows[dataset], own, datasets[dataset]))
            else:
                sums[dataset].add((own + 0.5) / sizes[dataset])
        progress("checking the order", (number + 1) * length, count * length, "samples")
    return [found.result(is_exact=is_exact) for found in sums]


def _places_in_file(
    row: DocumentRow, samples: npt.NDArray[np.int64], dataset: IndexedDataset
) -> npt.NDArray[np.float64]:
    """Return where in a file, from 0 to 1, samples of a row of its shuffled documents begin."""
    documents, inside = row.first_tokens(samples)
    tokens = (dataset.pointers[documents] - dataset.first_byte) // dataset.dtype.itemsize + inside
    places: npt.NDArray[np.float64] = (tokens + 0.5) / dataset.token_count
    return places


class _Sums:
    """Sums over pairs of places, each from 0 to 1, evenly spread by chance."""

    def __init__(self) -> None:
        self._products, self._pairs = np.zeros(LAGS), np.zeros(LAGS, dtype=np.int64)
        self._near = 0

    def add(self, places: npt.NDArray[np.float64]) -> None:
        centred = (places - 0.5) * math.sqrt(12)  # mean 0 and variance 1 where they are even
        for lag in range(1, min(LAGS, places.size - 1) + 1):
            self._products[lag - 1] += float(centred[:-lag] @ centred[lag:])
            self._pairs[lag - 1] += places.size - lag
        self._near += int((np.abs(np.diff(places)) <= _NEAR).sum())

    def result(self, *, is_exact: bool) -> Neighbours:
        pairs = int(self._pairs[0])
        correlations = self._products / np.maximum(self._pairs, 1)
        by_chance = 2 * _NEAR - _NEAR**2
        near = self._near / max(pairs, 1)
        alarms = []
        if pairs:
            strange = np.abs(correlations) * np.sqrt(self._pairs)
            worst = int(np.argmax(strange))
            if strange[worst] > _ALARM:
                alarms.append(
                    f"samples {worst + 1} apart have places that correlate by {correlations[worst]:+.4f}, "
                    f"{strange[worst]:.0f} standard deviations from chance"
                )
            spread = math.sqrt(by_chance * (1 - by_chance) / pairs)
            if abs(near - by_chance) > _ALARM * spread:
                alarms.append(
                    f"{near:.2%} of neighbours lie within {_NEAR:.0%} of the dataset from each other, and "
                    f"{by_chance:.2%} would by chance"
                )
        return Neighbours(
            looked_at=pairs,
            is_exact=is_exact,
            correlations=tuple(correlations.tolist()),
            near=near,
            near_by_chance=by_chance,
            alarms=tuple(alarms),
        )


def sample_counts_of(
    order: Order | MegatronOrder, sizes: Sequence[int], *, samples: int
) -> list[SampleCounts]:
    """Return for each dataset how often its samples are taken in the first `samples` of the stream."""
    counts = order.given_before(samples).tolist()
    extremes: list[tuple[int | None, int | None]] = [(None, None)] * len(sizes)
    if samples <= COUNTED and sum(sizes) <= 1 << 28:
        which, windows = order.locate_samples(np.arange(samples, dtype=np.int64))
        for dataset, size in enumerate(sizes):
            if isinstance(order, MegatronOrder) and order.rows[dataset].epochs > 1:
                continue
            times = np.bincount(windows[which == dataset], minlength=size)
            extremes[dataset] = int(times.min()), int(times.max())
    return [
        SampleCounts(samples=size, taken=taken, epochs=_epochs(taken, size), least=least, most=most)
        for taken, size, (least, most) in zip(counts, sizes, extremes, strict=True)
    ]


def _epochs(taken: int, size: int) -> tuple[int, ...]:
    whole, rest = divmod(taken, size)
    return (*[size] * min(whole, 1000), *([rest] if rest and whole < 1000 else []))


BINS = 20
"""The bins of the histogram of repeated n-grams."""
_STRETCHES = 256  # of a dataset that is not read whole
_SHOWN = 20
_MOST_NGRAMS = 40_000_000  # of one text to compare with: 320 MB
_SALT = np.uint64(0xD1B54A32D192ED03)


@dataclass(frozen=True, kw_only=True)
class SharedNgrams:
    """How much of one text's n-grams the training text has.

    ngrams: how many different ones it has, at most 40 million of its beginning. is_whole: whether these are
    all. found: how many of them are in the training text that was read. documents: training documents with
    one of them or more. examples: (dataset, document, its n-grams that are shared), the first of them.
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
    """What was found. is_exact: whether all of the training text was read, and not stretches of it."""

    is_exact: bool
    tokens_read: int
    shared: dict[str, SharedNgrams]
    repeated: dict[str, RepeatedNgrams]


class Ngrams:
    """The n-grams of a text that training text is compared with."""

    def __init__(self, parts: Iterator[npt.NDArray[np.uint64]]) -> None:
        held, total, self.is_whole = list[npt.NDArray[np.uint64]](), 0, True
        for part in parts:
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
        return cls(whole_ngrams(some.tokens, some.lengths, size)[0] for some in documents_in_turn(dataset))

    @classmethod
    def of_texts(cls, texts: Iterator[npt.NDArray[np.int64]], size: int) -> Ngrams:
        """Return those of texts that were tokenised."""
        return cls(whole_ngrams(tokens, np.array([tokens.size]), size)[0] for tokens in texts)

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
    read, repeated = 0, {}
    for name, dataset in training.items():
        repeats = _Repeats()
        for some in _stretches(dataset, share):
            hashes, document = whole_ngrams(some.tokens, some.lengths, size)
            for other in others.values():
                other.compare(name, some, hashes, document)
            repeats.add(some, hashes, document)
            read += int(some.tokens.size)
            progress("reading documents", read, round(total * share), "tokens")
        repeated[name] = repeats.result()
    return TextAudit(
        is_exact=share >= 1,
        tokens_read=read,
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
