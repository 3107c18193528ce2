"""Keys and values of the tokens already seen, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """Room for `capacity` tokens, allocated once. Not for training: it is written in place."""

    def __init__(
        self,
        *,
        blocks: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (blocks, batch, capacity, kv_heads, head_dim)
        self._keys = torch.empty(shape, device=device, dtype=dtype)
        self._values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self._keys.shape[2]

    def extended(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of `block` so far, the given ones [b, s, kv_heads, d] at the end."""
        end = self.length + key.shape[1]
        if end > self.capacity:
            raise ValueError(f"a cache of {self.capacity} tokens was given {end}")
        self._keys[block, :, self.length : end] = key
        self._values[block, :, self.length : end] = value
        return self._keys[block, :, :end], self._values[block, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` as seen: called once all blocks have extended."""
        self.length += tokens
