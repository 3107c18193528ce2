"""Batches of documents for a tokenizer, and the callback that reports progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # commands that only report progress need not load what reads documents
    from bloomery.data.documents import Document

_BATCH_BYTES = 1 << 20


class ProgressCallback(Protocol):
    """Is called with the progress of some work, so that a bar can be drawn."""

    def __call__(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """Report that `done` of `total` units are done.

        total: 0 if not known.
        note: more to show, such as tokens per second.
        """


def silent(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
    """Report progress to nobody."""


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in batches of a mebibyte of text, which is what engines take at once."""
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
