"""Counter-based dropout: the mask is a hash of seed, step, sample and position, not a generator's state.

An element is dropped or kept by a hash of (seed, site, step, sample, position, channel), or for attention
weights of (seed, site, step, sample, head, query, key). So the mask does not depend on how samples are
batched, on what is recomputed, or on which rank holds the element.

A row and a column have a 32-bit key each, hashed with care; an element hashes the two keys together in two
products, which is all that is done for each element, and which Triton's kernels
(`kernels/triton_attention.py`) do as well. The arithmetic is that of 32-bit integers held in 64 bits, and
never overflows, because what compilers make of an overflow in C++ is undefined. What depends on sample and
position alone is hashed by `dropout_address`, eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bloomery.kernels.rules import FIRST_FACTOR, SECOND_FACTOR

SITE_EMBEDDING = 0
_SITES_PER_BLOCK = 3
_WORD = 0xFFFFFFFF
_HALF_WORD = 0x7FFFFFFF
_MULTIPLIERS = (0x3FEB352D, 0x26CA68B3, 0x2C8E9CF5)  # odd, of 30 bits
_ADDEND = 0x3C6EF372FE94F82B  # keeps small numbers from a small square; of 62 bits: sums stay below 2**63
_COLUMNS = 0x5851F42D  # so that a column's key is not that of a row
_ELEMENTS_AT_ONCE = 1 << 18  # 6 MB while they are hashed: what a core's cache may hold


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


@dataclass(frozen=True)
class ElementKeys:
    """The keys of a tensor's rows, int32 [...], and of its last dimension, int32 [n]."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class BlockDropout:
    """What a block needs for its dropout; None where nothing is dropped.

    They are tensors, so that compiled blocks, which differ only in them, share their code.
    weights: of attention weights, rows [b, heads, s]. attention_output, mlp_output: rows [b, positions held
    here].
    """

    weights: ElementKeys | None
    attention_output: ElementKeys | None
    mlp_output: ElementKeys | None


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


def block_dropout(
    address: DropoutAddress, block: int, *, heads: int, hidden: int, held: int, weights: bool, outputs: bool
) -> BlockDropout:
    """Return the keys of a block's three sites.

    heads: those held here. hidden: channels of the residual stream. held: positions of it that are held here.
    weights, outputs: whether attention weights, and what attention and MLP return, are dropped.
    """
    first = 1 + _SITES_PER_BLOCK * block

    def of_output(site: int) -> ElementKeys | None:
        return hidden_keys(address, site=site, width=hidden, held=held) if outputs else None

    return BlockDropout(
        weights=weight_keys(address, site=first + 2, heads=heads) if weights else None,
        attention_output=of_output(first),
        mlp_output=of_output(first + 1),
    )


def hidden_keys(address: DropoutAddress, *, site: int, width: int, held: int) -> ElementKeys:
    """Return the keys of the residual stream: rows [b, held], of the positions from `address.first_position`
    on.
    """
    first = address.first_position
    rows = _keys_at(site, address)[:, first : first + held]
    return ElementKeys(_as_int32(rows), _column_keys(width, rows.device))


def weight_keys(address: DropoutAddress, *, site: int, heads: int) -> ElementKeys:
    """Return the dropout keys of attention weights [b, heads, s, s]: rows [b, heads, s], columns [s]."""
    head = torch.arange(heads, device=address.rows.device) + address.first_head
    rows = _mix((_keys_at(site, address)[:, None, :] + head[:, None]) & _WORD)  # [b, heads, s]
    return ElementKeys(_as_int32(rows), _column_keys(address.rows.shape[1], rows.device))


def drop(x: Tensor, rate: float, keys: ElementKeys) -> Tensor:
    """Apply inverted dropout to x [..., n], whose rows [...] and columns [n] have these keys."""
    return torch.where(keeps(keys, rate), x * (1.0 / (1.0 - rate)), 0.0)


def keeps(keys: ElementKeys, rate: float) -> Tensor:
    """Return which elements are kept, boolean [..., n].

    Compiled code hashes each element where it is needed. Eager code would hold 24 bytes for each, so it takes
    some rows at a time.
    """
    rows, columns = keys.rows, keys.columns
    at_once = max(1, _ELEMENTS_AT_ONCE // columns.shape[0])
    if torch.compiler.is_compiling() or rows.numel() <= at_once:
        return _are_kept(rows, columns, rate)
    parts = [_are_kept(some, columns, rate) for some in rows.reshape(-1).split(at_once)]
    return torch.cat(parts).view(*rows.shape, columns.shape[0])


def _are_kept(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    mixed = (rows.long()[..., None] ^ columns.long()) & _WORD
    mixed = (mixed * FIRST_FACTOR) & _WORD
    mixed = ((mixed ^ (mixed >> 15)) * SECOND_FACTOR) & _WORD
    return mixed >= round(rate * 2**32)


def _column_keys(columns: int, device: torch.device) -> Tensor:
    return _as_int32(_mix((torch.arange(columns, device=device) + _COLUMNS) & _WORD))


def _as_int32(word: Tensor) -> Tensor:
    """Return 32 bits held in int64 as int32, whose numbers from 2**31 on are negative."""
    return ((word ^ 0x80000000) - 0x80000000).to(torch.int32)


def _keys_at(site: int, address: DropoutAddress) -> Tensor:
    """Return a new 32-bit key for each row: its hash times an odd number of this site's own."""
    return (address.rows * (_mix_int(site + 1) >> 1 | 1)) & _WORD


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
