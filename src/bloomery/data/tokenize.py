"""Documents to ids in batches, in order, and how progress is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bloomery.data.documents import Document
from bloomery.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20
_PROOF_TEXTS, _PROOF_CHARACTERS = 8, 4096


class Progress(Protocol):
    """Told how far a piece of work is, so that somebody may draw a bar."""

    def __call__(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """`done` of `total` units; a total of 0 is not known. `note`: a word more, as tokens a second."""


def silent(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
    """The progress nobody watches."""


def encode_all(
    documents: Iterable[Document], tokenizer: Tokenizer, *, progress: Progress = silent, total_bytes: int = 0
) -> Iterator[tuple[Document, npt.NDArray[np.uint32]]]:
    """Each document with its ids, the end-of-document token last, in the order given."""
    done = 0
    for number, batch in enumerate(batches(documents)):
        texts = [document.text for document in batch]
        if number == 0:
            tokenizer.prove(proof_texts(texts))
        encoded = tokenizer.encode_documents(texts)
        done += sum(document.size_bytes for document in batch)
        yield from zip(batch, encoded, strict=True)
        progress("tokenising", min(done, total_bytes) if total_bytes else done, total_bytes, "bytes")


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
