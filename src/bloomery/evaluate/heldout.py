"""Loss on text that was not trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from bloomery.data.batches import MicroBatch
from bloomery.model.decoder import Decoder
from bloomery.model.loss import IGNORED


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """Summed −ln p of the targets, in nats, and how many targets there were."""

    nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Mean held-out loss."""
        return self.nats / self.tokens


@torch.no_grad()
def entropy(decoder: Decoder, batches: Iterable[MicroBatch], *, chunk: int = 1024) -> Entropy:
    """The entropy of `batches` under `decoder`, nothing dropped. Sums are kept in fp64.

    chunk: tokens whose logits exist at the same time.
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
