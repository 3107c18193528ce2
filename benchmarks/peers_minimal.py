"""A minimal GPT for comparison: what a good engineer writes in an afternoon, and nothing that slows it down.

Learned positions, LayerNorm without bias, one fused projection for queries, keys and values, the library's
attention kernel, GELU, an untied head, and the loss inside the compiled graph.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


class MinimalGPT(nn.Module):
    """Tokens and targets [b, s] → mean cross entropy."""

    def __init__(
        self, *, layers: int, hidden: int, heads: int, vocabulary: int, sequence_length: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence_length, hidden)
        self.blocks = nn.ModuleList(MinimalBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, bias=False)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("mixed.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class MinimalBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to x [b, s, h]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden, bias=False)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.mixed = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # [b, s, 3, heads, d]
        query, key, value = qkv.transpose(1, 3).unbind(2)  # each [b, heads, s, d]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))
