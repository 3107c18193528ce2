"""Encodes documents of a prompt and an answer, and finds the answer tokens, which alone count in the loss.

The pair needs no further file: the index says where each sequence begins, and every second one is an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bloomery.data.documents import Document
from bloomery.data.indexed import IndexedDataset
from bloomery.data.pair_files import TOKENIZE_AGAIN
from bloomery.data.tokenizer import Tokenizer
from bloomery.data.tokenizer_engines import Encoded
from bloomery.errors import DataError


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> Encoded:
    """Return the ids of documents, an end-of-document token last in each.

    A prompt and its answer are encoded apart, so that a prompt has the ids that it will have without its
    answer. Either all documents have a prompt or none has.
    """
    if not any(document.prompt for document in documents):
        return tokenizer.encode_batch([document.text for document in documents])
    parts = [
        part
        for document in documents
        for part in (document.text[: document.prompt], document.text[document.prompt :])
    ]
    encoded = tokenizer.encode_batch(parts)
    is_end_of_prompt = np.zeros(encoded.ids.size, dtype=bool)
    is_end_of_prompt[np.cumsum(encoded.lengths)[0::2] - 1] = True
    prompts = encoded.lengths[0::2] - 1
    return Encoded(
        ids=encoded.ids[~is_end_of_prompt], lengths=prompts + encoded.lengths[1::2], prompts=prompts
    )


class AnswerTokens:
    """Says which tokens of a dataset belong to answers. It holds 16 bytes a sequence.

    Raises DataError for a dataset whose documents are not a prompt and an answer each.
    """

    def __init__(self, dataset: IndexedDataset) -> None:
        dataset.refuse_contradictions()
        if dataset.sequence_count != 2 * dataset.document_count:
            raise DataError(
                f"{dataset.prefix} has {dataset.sequence_count:,} sequences in {dataset.document_count:,} "
                "documents; prompts with answers have two each.",
                remedy=TOKENIZE_AGAIN,
            )
        starts = (dataset.pointers.copy() - dataset.first_byte) // dataset.dtype.itemsize
        self._edges = np.append(starts, dataset.token_count)  # [sequences + 1]
        lengths = np.diff(self._edges)
        lengths[0::2] = 0
        self._before = np.concatenate([[0], np.cumsum(lengths)])  # answers' tokens before each sequence

    def count(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> int:
        """Return how many of the tokens [start, start + length) of all pieces belong to answers."""
        return int((self._up_to(starts + lengths) - self._up_to(starts)).sum())

    def mask(self, start: int, length: int) -> npt.NDArray[np.bool_]:
        """Return whether each of the tokens [start, start + length) belongs to an answer; [length]."""
        first = int(np.searchsorted(self._edges, start, "right")) - 1
        stop = int(np.searchsorted(self._edges, start + length, "left"))
        edges = self._edges[first : stop + 1].clip(start, start + length)
        return np.repeat(np.arange(first, stop) % 2 == 1, np.diff(edges))

    def _up_to(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many tokens before each place belong to answers."""
        sequence = np.searchsorted(self._edges, places, "right") - 1
        within = np.where(sequence % 2 == 1, places - self._edges[sequence], 0)
        return self._before[sequence] + within
