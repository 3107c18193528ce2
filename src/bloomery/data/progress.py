"""Batches of documents for a tokenizer, and the callback that reports progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from bloomery.data.documents import Document

_BATCH_BYTES = 1 << 20


class ProgressCallback(Protocol):
    """Told how far a piece of work is, so that somebody may draw a bar."""

    def __call__(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """`done` of `total` units; a total of 0 is not known. `note`: a word more, as tokens a second."""


def silent(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
    """The progress nobody watches."""


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents by the mebibyte of text, which is what engines take at once."""
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
