"""What the Triton attention kernels share: loading tiles, mask rules, and the dropout hash.

Legend: b batch, s positions, heads query heads, kv_heads key/value heads, d head width. Scores are kept times
log2(e), because the chip computes powers of two. Import this module only where `available.has_triton()`.
"""

# No `from __future__ import annotations`: Triton reads the annotations of its kernels.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bloomery.kernels import rules as shared
from bloomery.kernels.rules import Rules, Tiles

LOG2_E = tl.constexpr(1.4426950408889634)
HIDDEN_SCORE = tl.constexpr(-1.0e30)  # not -inf, whose difference from itself is not a number
FIRST_FACTOR = tl.constexpr(shared.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(shared.SECOND_FACTOR)


def rule_tensors(rules: Rules, unused: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of the rules; `unused` stands where one is missing, and no kernel reads it."""
    tensors = (rules.starts, rules.ends, rules.slopes, rules.row_keys, rules.column_keys)
    return tuple(unused if tensor is None else tensor for tensor in tensors)


def strides(heads: Tensor) -> tuple[int, int, int]:
    """Return the steps from one sample, row and head to the next; those of a width are side by side."""
    return heads.stride(0), heads.stride(1), heads.stride(2)


def constants(query: Tensor, key: Tensor, rules: Rules) -> dict[str, Any]:
    """Return the numbers that all kernels of attention get, most of which are compiled into them."""
    width = query.shape[3]
    return {
        "scale": width**-0.5,
        "threshold": round(rules.rate * 2**32) - 2**31,
        "kept": 1.0 / (1.0 - rules.rate),
        "LENGTH": query.shape[1],
        "HEADS": query.shape[2],
        "KV_HEADS": key.shape[2],
        "WIDTH": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "HAS_DOCUMENTS": rules.starts is not None,
        "HAS_SLOPES": rules.slopes is not None,
        "DROPS": rules.row_keys is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def launch(tiles: Tiles) -> dict[str, int]:
    """Return a kernel's tiles as its arguments."""
    return {
        "QUERIES": tiles.queries, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


@triton.jit
def tile(
    base, first, within, columns, row_stride, LENGTH: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows `first` + `within` of one head [rows, d]; rows and columns that do not exist are zeros."""
    at = places(base, first, within, columns, row_stride)
    if MASKED or columns.shape[0] != WIDTH:
        return tl.load(at, mask=(first + within[:, None] < LENGTH) & (columns[None, :] < WIDTH), other=0.0)
    return tl.load(at)


@triton.jit
def places(base, first, within, columns, row_stride):
    """Return pointers to the rows `first` + `within` of one head [rows, d].

    The first row's offset has 64 bits, because a long sample has more than 2**31 numbers. The others' offsets
    from it have 32 bits, which take fewer registers (`fused_attention.MOST_ROW_STRIDE`).
    """
    return base + tl.cast(first, tl.int64) * row_stride + (within[:, None] * row_stride + columns[None, :])


@triton.jit
def share_of_program(TILES: tl.constexpr, HEADS: tl.constexpr):
    """Return which tile of which sample's which head this program computes; sample and head have 64 bits.

    Programs lie along the grid's first axis, of which CUDA allows 2**31 - 1; the others have at most 65,535,
    and a batch may have more heads than that. Tiles of one head follow each other.
    """
    program = tl.program_id(0)
    line = (program // TILES).to(tl.int64)
    return program % TILES, line // HEADS, line % HEADS


@triton.jit
def keeps(row_key, column_key, threshold):
    """Return which weights dropout keeps: the hash of `model.dropout.keeps` in int32, which wraps."""
    mixed = (row_key ^ column_key) * FIRST_FACTOR
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * SECOND_FACTOR
    return (mixed ^ -2147483648) >= threshold  # an unsigned comparison, since the signs are flipped


@triton.jit
def ranges_of_keys(
    starts_at,
    first,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Return where the keys that a tile of queries sees begin, and where two kinds of them end.

    The queries are those from `first` on. Keys from the first result to the second are hidden from some of
    them by documents, those to the third are seen by all of them, and those after it are hidden from some by
    causality. All three are multiples of KEYS. starts_at: the sample's first positions of documents.
    """
    lower = 0
    whole = 0
    if HAS_DOCUMENTS:
        lower = tl.load(starts_at + first) // KEYS * KEYS
        last = tl.load(starts_at + tl.minimum(first + QUERIES, LENGTH) - 1)
        whole = tl.minimum((last + KEYS - 1) // KEYS * KEYS, first // KEYS * KEYS)
        whole = tl.maximum(whole, lower)
    return lower, whole, tl.maximum(first // KEYS * KEYS, whole)


@triton.jit
def biased(scores, rows, columns, slope, HAS_SLOPES: tl.constexpr):
    """Return the scores with ALiBi's bias, if there is one."""
    if HAS_SLOPES:
        scores -= slope * (rows - columns).to(tl.float32)
    return scores
