"""Floating-point operations of training, counted by matrix products.

A weight in a linear layer costs 2 operations a token forward and 4 backward. Attention multiplies queries
with keys and weights with values: 4·s·h forward for each token and layer, counted over the whole square (as
the published figures do, though a causal kernel needs about half). Lookups, norms, activations and the
optimizer are not counted.

Legend: h hidden, l layers, s sequence length, v vocabulary, B global batch, t seconds a step, n accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.model import ModelSection
from bloomery.plan.shapes import count_parameters


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """Operations to train on one token.

    model: what the mathematics needs, 6 a weight: for the GPT shape 72·l·h²·(1 + s/(6h) + v/(12·l·h)).
    hardware: with what recomputation repeats: 96·l·h²·(1 + s/(6h) + v/(16·l·h)) when all blocks are computed
    again; the head is not.
    """

    model: int
    hardware: int


def token_cost(
    model: ModelSection, *, vocabulary: int, sequence_length: int, recompute: str = "none"
) -> TokenCost:
    """Operations per trained token, forward and backward, without and with what `recompute` repeats."""
    weights = count_parameters(model, vocabulary=vocabulary, sequence_length=sequence_length)
    blocks = 2 * model.layers * weights.block.matrices
    attention = 4 * model.layers * sequence_length * model.hidden
    head = 2 * vocabulary * model.hidden
    needed = 3 * (blocks + attention + head)
    repeated = {"none": 0, "selective": attention, "full": blocks + attention}[recompute]
    return TokenCost(model=needed, hardware=needed + repeated)


def forward_cost(model: ModelSection, *, vocabulary: int, sequence_length: int) -> int:
    """Operations per token of a forward pass alone: evaluation."""
    return token_cost(model, vocabulary=vocabulary, sequence_length=sequence_length).model // 3


def teraflops(operations_per_token: int, *, tokens: int, seconds: float, accelerators: int = 1) -> float:
    """10¹² operations a second of each accelerator that trained `tokens` in `seconds`."""
    return operations_per_token * tokens / (seconds * accelerators * 1e12)


def utilisation(achieved_teraflops: float, *, peak_teraflops: float) -> float:
    """MFU from the model's operations, HFU from the hardware's: the share of the peak that was used."""
    return achieved_teraflops / peak_teraflops
