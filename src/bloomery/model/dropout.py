"""Dropout whose mask is a function of an address, not of a generator's state.

An element is dropped or kept by a 32-bit hash of (seed, site, step, sample, position, channel), or for
attention weights of (seed, site, step, sample, head, query, key). So the mask does not depend on how samples
are batched, on what is recomputed, or on which rank holds the element.

All arithmetic is int32 with wrap-around, which eager CPU, GPU and compiled code agree on. What depends on the
sample and the position alone is hashed once, by `dropout_address`, outside the compiled model: the compiler
inlines each use of a value, so a chain of mixes would take it minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SITE_EMBEDDING = 0
_SITES_PER_BLOCK = 3
_GOLDEN = -1640531527  # 0x9E3779B9: spreads consecutive indices over all bits
_SILVER = -2048144789  # 0x85EBCA6B: another odd number, for a second index
_RESOLUTION_BITS = 24


@dataclass(frozen=True)
class DropoutAddress:
    """Where in the run a forward pass stands.

    rows: int32 [b, s], a hash of (seed, step, sample, position). first_head: of a rank that holds only some.
    """

    rows: Tensor
    first_head: int = 0


def dropout_address(
    *, seed: int, step: int, samples: Tensor, positions: range, first_head: int = 0
) -> DropoutAddress:
    """The address of one micro-batch. Call it outside of compiled code.

    samples: int64 [b], each sample's place in the data; positions: those of the sequence held here.
    """
    position = torch.arange(positions.start, positions.stop, device=samples.device, dtype=torch.int32)
    root = _mix_int(_mix_int(_mix_int(seed) ^ (seed >> 32)) + _mix_int(step * 0x9E3779B9 + (step >> 32)))
    keys = _mix(_low_word(samples) * _GOLDEN + _signed(root))
    keys = _mix(keys + _low_word(samples >> 32))
    return DropoutAddress(rows=_mix(keys[:, None] + position * _GOLDEN), first_head=first_head)


def attention_output_site(block: int) -> int:
    """The address of a block's dropout after attention."""
    return 1 + _SITES_PER_BLOCK * block


def mlp_output_site(block: int) -> int:
    """The address of a block's dropout after the MLP."""
    return 2 + _SITES_PER_BLOCK * block


def attention_weights_site(block: int) -> int:
    """The address of a block's dropout on attention weights."""
    return 3 + _SITES_PER_BLOCK * block


def drop_hidden(x: Tensor, rate: float, address: DropoutAddress, *, site: int) -> Tensor:
    """Inverted dropout on x [b, s, h]."""
    rows = address.rows * _site_factor(site)
    return _drop(x, rate, _mix(rows[:, :, None] + _index(x.shape[2], x) * _GOLDEN))


def drop_attention(weights: Tensor, rate: float, address: DropoutAddress, *, site: int) -> Tensor:
    """Inverted dropout on attention weights [b, heads, s, t]."""
    heads = (_index(weights.shape[1], weights) + address.first_head) * _SILVER
    keys = _mix((address.rows * _site_factor(site))[:, None, :] + heads[:, None])  # [b, heads, s]
    return _drop(weights, rate, _mix(keys[..., None] + _index(weights.shape[3], weights) * _GOLDEN))


def _site_factor(site: int) -> int:
    """An odd number of 32 bits for each site: rows times it are a new, unrelated hash."""
    return _signed(_mix_int(site + 1) | 1)


def _index(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device, dtype=torch.int32)


def _low_word(value: Tensor) -> Tensor:
    """The lower 32 bits of an int64, as an int32 of the same bits."""
    return (((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which each input bit flips each output bit half of the time (lowbias32)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _mix_int(x: int) -> int:
    """`_mix` of the lower 32 bits of a Python integer."""
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _drop(x: Tensor, rate: float, hashed: Tensor) -> Tensor:
    threshold = round(rate * 2**_RESOLUTION_BITS)
    keep = (hashed & (2**_RESOLUTION_BITS - 1)) >= threshold
    return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)
