"""Dropout whose mask is a function of an address, not of a generator's state.

An element is dropped or kept by a 32-bit hash of (seed, site, step, sample, position, channel), or for
attention weights of (seed, site, step, sample, head, query, key). So the mask does not depend on how samples
are batched, on what is recomputed, or on which rank holds the element.

The hash is written for compilers. It uses each value once (x ^ x >> k uses x twice, and inductor inlines both
uses, so that a chain of those takes minutes to compile) and never overflows (which is undefined in the C++
that inductor writes). What depends on sample and position alone is hashed by `dropout_address`, eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SITE_EMBEDDING = 0
_SITES_PER_BLOCK = 3
_WORD = 0xFFFFFFFF
_HALF_WORD = 0x7FFFFFFF
_MULTIPLIERS = (0x3FEB352D, 0x26CA68B3, 0x2C8E9CF5)  # odd, of 30 bits
_ADDEND = 0x3C6EF372FE94F82B  # keeps small numbers from a small square; of 62 bits: sums stay below 2**63
_RESOLUTION_BITS = 24


@dataclass(frozen=True)
class DropoutAddress:
    """Where in the run a forward pass stands.

    rows: int64 [b, s], a 32-bit hash of (seed, step, sample, position), for the whole sequence.
    first_head: the first of the heads that this rank holds.
    first_position: the first position of the residual stream that this rank holds.
    """

    rows: Tensor
    first_head: int = 0
    first_position: int = 0


def dropout_address(
    *, seed: int, step: int, samples: Tensor, positions: range, first_head: int = 0
) -> DropoutAddress:
    """Return the address of one micro-batch. Call it outside of compiled code.

    samples: int64 [b], each sample's place in the data.
    positions: the positions of the sequence that are held here.
    """
    root = _mix_int(_mix_int(_mix_int(seed) + (seed >> 32)) + _mix_int(step) + (step >> 32))
    keys = _mix((_mix(samples & _WORD) + (samples >> 32) + root) & _WORD)  # [b]
    position = torch.arange(positions.start, positions.stop, device=samples.device)
    return DropoutAddress(rows=_mix((keys[:, None] + position) & _WORD), first_head=first_head)


def attention_output_site(block: int) -> int:
    """Return the address of a block's dropout after attention."""
    return 1 + _SITES_PER_BLOCK * block


def mlp_output_site(block: int) -> int:
    """Return the address of a block's dropout after the MLP."""
    return 2 + _SITES_PER_BLOCK * block


def attention_weights_site(block: int) -> int:
    """Return the address of a block's dropout on attention weights."""
    return 3 + _SITES_PER_BLOCK * block


def drop_hidden(x: Tensor, rate: float, address: DropoutAddress, *, site: int) -> Tensor:
    """Apply inverted dropout to x [b, s, h], the positions from `address.first_position` on."""
    positions = slice(address.first_position, address.first_position + x.shape[1])
    keys = _keys_at(site, address)[:, positions, None]
    return _drop(x, rate, keys + torch.arange(x.shape[2], device=x.device))


def drop_attention(weights: Tensor, rate: float, address: DropoutAddress, *, site: int) -> Tensor:
    """Inverted dropout on attention weights [b, heads, s, t]."""
    heads = torch.arange(weights.shape[1], device=weights.device) + address.first_head
    keys = _mix((_keys_at(site, address)[:, None, :] + heads[:, None]) & _WORD)[..., None]  # [b, heads, s, 1]
    return _drop(weights, rate, keys + torch.arange(weights.shape[3], device=weights.device))


def _keys_at(site: int, address: DropoutAddress) -> Tensor:
    """Return a new 32-bit key for each row: its hash times an odd number of this site's own."""
    return (address.rows * (_mix_int(site + 1) >> 1 | 1)) & _WORD


def _drop(x: Tensor, rate: float, address: Tensor) -> Tensor:
    hashed = _mix(address & _WORD) & (2**_RESOLUTION_BITS - 1)
    keep = hashed >= round(rate * 2**_RESOLUTION_BITS)
    return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)


def _mix(x: Tensor) -> Tensor:
    """Return a 32-bit hash of 32 bits held in int64: three times the middle of a product, then of a
    square.
    """
    for multiplier in _MULTIPLIERS:
        x = (x * multiplier + _ADDEND >> 24) & _HALF_WORD
        x = (x.square() >> 14) & _WORD
    return x


def _mix_int(x: int) -> int:
    """Return `_mix` of a Python integer's lower 32 bits."""
    x &= _WORD
    for multiplier in _MULTIPLIERS:
        x = (x * multiplier + _ADDEND >> 24) & _HALF_WORD
        x = (x * x >> 14) & _WORD
    return x
