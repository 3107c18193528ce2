"""Causal self-attention with grouped key/value heads.

Legend: b batch, s queries, t keys, h hidden, d head width; heads and kv_heads are those this module holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.model.cache import Cache
from bloomery.model.dropout import DropoutAddress, attention_weights_site, drop_attention
from bloomery.model.kernels import attends, causal_attention, has_units
from bloomery.model.linear import Linear, Products, products_for
from bloomery.model.position import rotate
from bloomery.model.resolve import ResolvedModel


@dataclass(frozen=True)
class Sight:
    """What every block's attention shares in one forward pass.

    mask: None where plain causal attention is meant; else boolean (may see) or float (added to the scores),
    broadcastable to [b, heads, s, t]. rotary: cosines and sines [s, d/2].
    """

    mask: Tensor | None
    is_causal: bool
    rotary: tuple[Tensor, Tensor] | None
    address: DropoutAddress | None


class Attention(nn.Module):
    """Query, key and value share one stored matrix, in that order of rows."""

    def __init__(self, model: ResolvedModel, *, block: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.block = block
        self.dropout = model.section.attention_dropout
        self.products: Products = products_for(device, dtype)
        self.has_units = has_units()  # asked here, since compiled code cannot ask
        heads, hidden, bias = model.section.heads, model.section.hidden, model.section.bias
        rows = (heads + 2 * model.kv_heads) * self.head_dim
        self.qkv = Linear(rows, hidden, bias=bias, device=device, dtype=dtype)
        self.output = Linear(hidden, heads * self.head_dim, bias=bias, device=device, dtype=dtype)

    @property
    def heads(self) -> int:
        """Query heads held here."""
        return self.output.weight.shape[1] // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key/value heads held here."""
        return (self.qkv.weight.shape[0] // self.head_dim - self.heads) // 2

    def forward(self, x: Tensor, sight: Sight, cache: Cache | None = None) -> Tensor:
        """[b, s, h] → [b, s, h], the output's bias not yet added (see `Linear.product`)."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [b, s, heads + 2·kv_heads, d]
        if self.has_units and sight.is_causal and cache is None and attends(qkv):
            # It keeps no scores, so there is nothing for `attend` to compute again.
            mixed = causal_attention(qkv, heads=heads, rotary=sight.rotary)
            return self.output.product(mixed.flatten(2))
        turning, value = qkv.split((heads + kv_heads, kv_heads), dim=2)
        if sight.rotary is not None:
            turning = rotate(turning, sight.rotary)
        query, key = turning.split((heads, kv_heads), dim=2)
        if cache is not None:
            key, value = cache.extended(self.block, key, value)
        mixed = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), sight)
        return self.output.product(mixed.transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        """Query [b, heads, s, d], key and value [b, kv_heads, t, d] → [b, heads, s, d]."""
        dtype = query.dtype
        if self.products == "fp32":
            query, key, value = query.float(), key.float(), value.float()
        if self.dropout > 0.0 and sight.address is not None:
            mixed = self._attend_with_dropout(query, key, value, sight.mask, sight.address)
        else:
            mask = sight.mask
            if mask is not None and mask.is_floating_point():
                mask = mask.to(query.dtype)
            mixed = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=sight.is_causal, enable_gqa=self.heads != self.kv_heads
            )
        return mixed.to(dtype)

    def _attend_with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, address: DropoutAddress
    ) -> Tensor:
        """Attention with its weights written out, since a fused kernel's own generator has no address."""
        assert mask is not None, "the decoder gives an explicit mask where weights are dropped"
        group = self.heads // self.kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = (query @ key.transpose(-1, -2)).float() * self.head_dim**-0.5
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(-1)
        weights = drop_attention(weights, self.dropout, address, site=attention_weights_site(self.block))
        return weights.to(value.dtype) @ value
