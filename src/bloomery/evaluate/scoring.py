"""Scores texts under a model: loss, bits per byte beside xz, and the log-probability of each token.

`compress` gives the model's bits per byte, and `xz_bits_per_byte` those of xz for the same documents.

Legend: b rows of a batch, s positions of a row, h hidden, v vocabulary.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.data_loader.batches import MicroBatch
from bloomery.model.decoder import Decoder
from bloomery.model.loss import IGNORED


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """The cross entropy of some targets.

    nats: the sum of −ln p over the targets, p being the probability that the model gave each.
    tokens: the number of targets.
    """

    nats: float
    tokens: int


@torch.no_grad()
def entropy(
    decoder: Decoder,
    batches: Iterable[MicroBatch],
    *,
    chunk: int = 1024,
    report_progress: Callable[[], None] = lambda: None,
    wait_for_device: Callable[[], None] = lambda: None,
) -> Entropy:
    """Return the entropy of `batches` under `decoder`, without dropout. Sums are kept in fp64.

    chunk: number of tokens whose logits exist at the same time.
    report_progress: called after each batch.
    wait_for_device: called before each batch's sum is read, for devices that may wait for other ranks.
    """
    device = decoder.head_weight.device
    nats = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for cpu_batch in batches:
        batch = cpu_batch.to(device)
        hidden = decoder(batch.tokens, documents=batch.documents)
        sums = decoder.loss(hidden, batch.targets, chunk=chunk)
        wait_for_device()
        nats += sums.cross_entropy.double().cpu()
        tokens += int((cpu_batch.targets != IGNORED).sum())
        report_progress()
    return Entropy(nats=float(nats), tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """The size of a text that a model would compress.

    tokens: number of its tokens, including end-of-document tokens.
    """

    bits: float
    bytes: int
    tokens: int

    @property
    def bits_per_byte(self) -> float:
        """The bits of the code for each byte of the text."""
        return self.bits / self.bytes


def compress(
    decoder: Decoder, batches: Iterable[MicroBatch], *, text_bytes: int, chunk: int = 1024
) -> Compressed:
    """Sum −log2 p over every target of `batches`, for a text of `text_bytes` bytes.

    Make the batches with `held_out_batches`, so that every token of the text is a target exactly once.
    """
    total = entropy(decoder, batches, chunk=chunk)
    return Compressed(bits=total.nats / math.log(2.0), bytes=text_bytes, tokens=total.tokens)


def xz_bits_per_byte(documents: Sequence[bytes]) -> float:
    """Return the bits per byte of `xz -9e` on one concatenation of `documents`, in the order given."""
    text = b"".join(documents)
    # The xz command uses this format, preset and check, so its files have the same size.
    packed = lzma.compress(
        text, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=9 | lzma.PRESET_EXTREME
    )
    return 8.0 * len(packed) / len(text)


@dataclass(frozen=True, kw_only=True)
class ScoredTokens:
    """Each target of a batch under the model, on the CPU; 0 and False where the target does not count.

    log_probabilities: fp32 [b, s], natural logarithms.
    are_likeliest: bool [b, s], whether no other token is likelier.
    """

    log_probabilities: Tensor
    are_likeliest: Tensor


@torch.inference_mode()
def score_tokens(decoder: Decoder, tokens: Tensor, targets: Tensor, *, chunk: int = 1024) -> ScoredTokens:
    """Return how likely each target is after the tokens up to its position.

    tokens, targets: int64 [b, s]; targets that are IGNORED do not count.
    chunk: number of positions whose logits exist at one time.
    """
    device = decoder.head_weight.device
    hidden = decoder(tokens.to(device)).reshape(-1, decoder.model.section.hidden)
    flat = targets.reshape(-1).to(device)
    scores = torch.zeros(flat.shape, device=device)
    likeliest = torch.zeros(flat.shape, dtype=torch.bool, device=device)
    (places,) = torch.nonzero(flat != IGNORED, as_tuple=True)
    for some in places.split(chunk):
        logits = decoder.logits(hidden[some]).float()
        wanted = flat[some]
        scores[some] = logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
        likeliest[some] = logits.argmax(-1) == wanted
    return ScoredTokens(
        log_probabilities=scores.view(targets.shape).cpu(), are_likeliest=likeliest.view(targets.shape).cpu()
    )


@dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """The loss of one document, or of several together.

    nats: the cross entropy summed over the tokens.
    tokens: the number of targets, with one end-of-document token a document.
    bytes: of the text in UTF-8.
    """

    name: str
    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Return the mean nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Return the bits of the text's code for each byte; NaN for a text without bytes."""
        return self.nats / math.log(2.0) / self.bytes if self.bytes else math.nan


class TokenizedDocument(NamedTuple):
    """A text as token ids, without those that open or end it. size: bytes of the text in UTF-8."""

    name: str
    tokens: Sequence[int]
    size: int


def score_documents(
    decoder: Decoder,
    documents: Iterable[TokenizedDocument],
    *,
    opening: Sequence[int],
    end: int,
    sequence_length: int,
    rows: int = 8,
) -> Iterator[DocumentScore]:
    """Yield the score of each document in order. Every token is a target once, and so is the end.

    opening: the ids that open a text, at least one. end: the id that ends a document.
    sequence_length: tokens of a window; windows do not overlap, and nothing is seen across documents.
    rows: windows that are computed together.
    """
    waiting: list[tuple[int, list[int], list[int]]] = []  # (document, inputs, targets)
    pending: dict[int, TokenizedDocument] = {}
    sums: dict[int, tuple[float, int]] = {}
    next_done = 0
    for number, document in enumerate(documents):
        pending[number] = document
        inputs = [*opening, *document.tokens]
        targets = [*[IGNORED] * (len(opening) - 1), *document.tokens, end]
        sums[number] = (0.0, len(document.tokens) + 1)
        for start in range(0, len(targets), sequence_length):
            stop = start + sequence_length
            waiting.append((number, inputs[start:stop], targets[start:stop]))
        while len(waiting) >= rows:
            _add(decoder, waiting[:rows], sums)
            del waiting[:rows]
        done = waiting[0][0] if waiting else number + 1
        while next_done < done:
            yield _score(pending.pop(next_done), *sums.pop(next_done))
            next_done += 1
    if waiting:
        _add(decoder, waiting, sums)
    for number in list(pending):
        yield _score(pending.pop(number), *sums.pop(number))


def total_score(scores: Sequence[DocumentScore], *, name: str) -> DocumentScore:
    """Return the score of several documents together, at least one."""
    return DocumentScore(
        name=name,
        nats=math.fsum(score.nats for score in scores),
        tokens=sum(score.tokens for score in scores),
        bytes=sum(score.bytes for score in scores),
    )


def _add(
    decoder: Decoder, windows: Sequence[tuple[int, list[int], list[int]]], sums: dict[int, tuple[float, int]]
) -> None:
    """Score some windows and add each one's nats to those of its document."""
    width = max(len(inputs) for _, inputs, _ in windows)
    tokens = torch.zeros(len(windows), width, dtype=torch.int64)
    targets = torch.full((len(windows), width), IGNORED)
    for row, (_, inputs, wanted) in enumerate(windows):
        tokens[row, : len(inputs)] = torch.tensor(inputs)
        targets[row, : len(wanted)] = torch.tensor(wanted)
    scored = score_tokens(decoder, tokens, targets)
    nats = -scored.log_probabilities.double().sum(dim=1)
    for (number, _, _), own in zip(windows, nats.tolist(), strict=True):
        before, count = sums[number]
        sums[number] = (before + own, count)


def _score(document: TokenizedDocument, nats: float, tokens: int) -> DocumentScore:
    return DocumentScore(name=document.name, nats=nats, tokens=tokens, bytes=document.size)
