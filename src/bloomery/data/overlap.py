"""Finds held-out documents that the training data contains too, compared token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bloomery.data.duplicates import are_equal, equal_keys
from bloomery.data.indexed import IndexedDataset
from bloomery.data.ngrams import documents_in_turn, tokens_of_document
from bloomery.events.records import ProgressCallback, ignore_progress

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class SharedDocument:
    """A held-out document and the first equal one of a training dataset, by their numbers in the files."""

    held_out: str
    held_out_document: int
    training: str
    training_document: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The held-out documents that are in a training dataset too. Every document with tokens was compared.

    documents: number of held-out documents by dataset. shared: how many of them are in any training dataset.
    by_training: held-out documents that are in each training dataset. examples: the first of them.
    """

    documents: dict[str, int]
    shared: dict[str, int]
    by_training: dict[str, int]
    examples: tuple[SharedDocument, ...]


def overlap_of(
    training: Mapping[str, IndexedDataset],
    held_out: Mapping[str, IndexedDataset],
    *,
    progress: ProgressCallback = ignore_progress,
) -> Overlap:
    """Compare all documents of both sides. Memory: 24 bytes for each held-out document.

    Documents without tokens are left out.
    """
    names = list(held_out)
    keys, sources, numbers = _keys_of(held_out)
    order = np.argsort(keys, kind="stable")
    keys, sources, numbers = keys[order], sources[order], numbers[order]
    is_shared = np.zeros(keys.size, dtype=bool)
    by_training: dict[str, int] = {}
    examples: list[SharedDocument] = []
    for name, dataset in training.items():
        in_this = np.zeros(keys.size, dtype=bool)
        all_found = set[int]()  # where the held-out documents of a key begin: equal ones may be millions
        for some in documents_in_turn(dataset):
            found = equal_keys(some)
            low, high = np.searchsorted(keys, found, "left"), np.searchsorted(keys, found, "right")
            for inside in np.flatnonzero((low < high) & (some.lengths > 0)).tolist():
                number, key_begins = some.first + inside, int(low[inside])
                if key_begins in all_found:
                    continue
                for place in range(key_begins, int(high[inside])):
                    held = names[sources[place]]
                    ours = tokens_of_document(held_out[held], int(numbers[place]))
                    if in_this[place] or not are_equal(tokens_of_document(dataset, number), ours):
                        continue
                    in_this[place] = True
                    if len(examples) < _SHOWN:
                        shared = SharedDocument(
                            held_out=held,
                            held_out_document=held_out[held].first_document + int(numbers[place]),
                            training=name,
                            training_document=dataset.first_document + number,
                            tokens=int(ours.size),
                        )
                        examples.append(shared)
                if in_this[key_begins : high[inside]].all():
                    all_found.add(key_begins)
            progress(f"reading {name}", some.first + some.lengths.size, dataset.document_count, "documents")
        by_training[name] = int(in_this.sum())
        is_shared |= in_this
    counts = np.bincount(sources[is_shared], minlength=len(names)).tolist()
    return Overlap(
        documents={name: dataset.document_count for name, dataset in held_out.items()},
        shared=dict(zip(names, counts, strict=True)),
        by_training=by_training,
        examples=tuple(examples),
    )


def _keys_of(
    held_out: Mapping[str, IndexedDataset],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], ...]:
    keys, sources, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for source, dataset in enumerate(held_out.values()):
        for some in documents_in_turn(dataset):
            keys.append(equal_keys(some))
            sources.append(np.full(some.lengths.size, source))
            numbers.append(np.arange(some.lengths.size) + some.first)
    return tuple(np.concatenate(parts) for parts in (keys, sources, numbers))
