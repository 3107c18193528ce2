"""Computes the loss on held-out text, and bits per byte beside xz.

`compress` gives the model's bits per byte, and `xz_bits_per_byte` those of xz for the same documents.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from bloomery.data_loader.batches import MicroBatch
from bloomery.model.decoder import Decoder
from bloomery.model.loss import IGNORED


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """The entropy of some targets.

    nats: the sum of −ln p of the targets.
    tokens: number of targets.
    """

    nats: float
    tokens: int


@torch.no_grad()
def entropy(decoder: Decoder, batches: Iterable[MicroBatch], *, chunk: int = 1024) -> Entropy:
    """Return the entropy of `batches` under `decoder`, without dropout. Sums are kept in fp64.

    chunk: number of tokens whose logits exist at the same time.
    """
    device = decoder.head_weight.device
    nats = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for cpu_batch in batches:
        batch = cpu_batch.to(device)
        hidden = decoder(batch.tokens, documents=batch.documents)
        sums = decoder.loss(hidden, batch.targets, chunk=chunk)
        nats += sums.cross_entropy.double().cpu()
        tokens += int((cpu_batch.targets != IGNORED).sum())
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
