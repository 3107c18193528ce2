"""Documents to indexed files: batches of text through the tokenizer, in order, one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bloomery.data.sources import Document
from bloomery.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20


class Progress(Protocol):
    """Told how far a piece of work is, so that somebody may draw a bar."""

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        """`done` of `total` units; a total of 0 is not known."""


def silent(stage: str, done: int, total: int, unit: str) -> None:
    """The progress nobody watches."""


def encode_all(
    documents: Iterable[Document], tokenizer: Tokenizer, *, progress: Progress = silent, total_bytes: int = 0
) -> Iterator[tuple[Document, npt.NDArray[np.int32]]]:
    """Each document with its ids, the end-of-document token last, in the order given."""
    done = 0
    for batch in _batches(documents):
        encoded = tokenizer.encode_documents([document.text for document in batch])
        done += sum(document.size_bytes for document in batch)
        yield from zip(batch, encoded, strict=True)
        progress("tokenising", min(done, total_bytes) if total_bytes else done, total_bytes, "bytes")


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
