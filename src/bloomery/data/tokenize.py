"""Documents to ids in batches, in order, and how progress is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from bloomery.data.documents import Document

_BATCH_BYTES = 1 << 20
_PROOF_TEXTS, _PROOF_CHARACTERS = 8, 4096


class Progress(Protocol):
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


def proof_texts(texts: Sequence[str]) -> list[str]:
    """A few beginnings of texts, spread evenly: what a fast engine is compared on."""
    return [text[:_PROOF_CHARACTERS] for text in texts[:: max(1, len(texts) // _PROOF_TEXTS)][:_PROOF_TEXTS]]
