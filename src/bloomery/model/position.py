"""How positions enter: rotary tables, ALiBi's slopes, and the mask of what a query may see.

Legend: b batch, s queries, t keys, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def positions_within(documents: Tensor) -> Tensor:
    """Positions that start at 0 with each document. documents: int [b, s], counted up; int64 [b, s]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    opens = torch.ones_like(documents, dtype=torch.bool)
    opens[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(opens, index, 0).cummax(dim=1).values


def rotary_table(
    positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, d/2] of each position's angles: computed in fp32, given in `dtype`."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each head's two halves against each other (Llama's convention). x: [b, s, heads, d]."""
    cosine, sine = (part[:, None, :] for part in table)  # [s, 1, d/2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def alibi_slopes(heads: int, *, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [heads], ALiBi's slopes. Where `heads` is no power of two, the rest interleave the next power's.

    Computed where they are used: a list of numbers brought to a GPU would have the host wait for it.
    """
    power = 2 ** math.floor(math.log2(heads))
    head = torch.arange(heads, device=device, dtype=torch.float64)
    steps = torch.where(head < power, head + 1, head - power + 0.5)
    return torch.exp2(steps * (-8.0 / power)).float()


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """fp32 [heads, s, t]: minus slope times distance, so that it is exact near the diagonal."""
    distance = (queries[:, None] - keys[None, :]).float()
    return -slopes.float()[:, None, None] * distance


def visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Boolean [1 or b, 1, s, t]: causal, and within a document where `documents` [b, s] are given."""
    causal = (keys[None, :] <= queries[:, None])[None, None]
    if documents is None:
        return causal
    return causal & (documents[:, None, :, None] == documents[:, None, None, :])
