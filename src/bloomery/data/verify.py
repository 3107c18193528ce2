"""Whether a pair of indexed files is what was written, and holds only ids of its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bloomery.data.indexed import IndexedDataset, bin_path, idx_path
from bloomery.data.seal import differences, sealed
from bloomery.data.tokenize import Progress, silent

_CHUNK_TOKENS = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Verified:
    """findings: a sentence for each thing that is wrong. skipped: what was not looked at, and why."""

    documents: int
    tokens: int
    vocabulary_size: int | None
    findings: tuple[str, ...]
    skipped: tuple[str, ...]


def verify_pair(prefix: Path, *, vocabulary_size: int | None = None, progress: Progress = silent) -> Verified:
    """Read all of a pair and compare it with its seal and its vocabulary.

    vocabulary_size: None takes the seal's. Raises DataError where the pair cannot be read at all.
    """
    dataset = IndexedDataset(prefix)
    dataset.refuse_elsewhere()
    content = sealed(prefix)
    findings = [*_index_findings(dataset)]
    skipped = []
    if content is None:
        skipped.append("checksums: there is no seal beside it (`data tokenize` and `data merge` write one)")
    else:
        findings += differences(prefix, content)
        vocabulary_size = vocabulary_size or content["vocabulary_size"]
    if vocabulary_size is None:
        skipped.append("ids: no vocabulary is known (give --tokenizer or --vocabulary)")
    else:
        findings += _strange_ids(dataset, vocabulary_size, progress=progress)
    return Verified(
        documents=dataset.document_count,
        tokens=dataset.token_count,
        vocabulary_size=vocabulary_size,
        findings=tuple(findings),
        skipped=tuple(skipped),
    )


def _index_findings(dataset: IndexedDataset) -> Iterator[str]:
    index = idx_path(dataset.prefix)
    lengths = dataset.sequence_lengths.astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
    apart = np.flatnonzero(dataset.pointers != starts * dataset.dtype.itemsize)
    if len(apart):
        first = int(apart[0])
        yield (
            f"{index}: sequence {first:,} begins at byte {dataset.pointers[first]:,} and not where the one "
            f"before it ends, byte {starts[first] * dataset.dtype.itemsize:,}."
        )
    if len(lengths) and lengths.min() < 1:
        yield f"{index}: sequence {int(np.argmin(lengths)):,} has {lengths.min()} tokens."
    back = np.flatnonzero(np.diff(dataset.document_indices) < 0)
    if len(back):
        yield f"{index}: document {int(back[0]) + 1:,} begins before the one before it."


def _strange_ids(dataset: IndexedDataset, vocabulary_size: int, *, progress: Progress) -> Iterator[str]:
    """The first id that is not of the vocabulary, if there is one."""
    for start in range(0, dataset.token_count, _CHUNK_TOKENS):
        count = min(_CHUNK_TOKENS, dataset.token_count - start)
        tokens = dataset.window(start, count)
        strange = np.flatnonzero((tokens >= vocabulary_size) | (tokens < 0))
        if len(strange):
            place = start + int(strange[0])
            document = int(np.searchsorted(dataset.document_starts, place, "right")) - 1
            yield (
                f"{bin_path(dataset.prefix)}: token {place:,} (byte {place * dataset.dtype.itemsize:,}, "
                f"document {document:,}) has id {tokens[strange[0]]:,}; the vocabulary has "
                f"{vocabulary_size:,}."
            )
            return
        progress("looking at ids", start + count, dataset.token_count, "tokens")
