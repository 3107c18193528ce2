"""The Triton kernel of causal attention's forward, with ALiBi, document masks and dropout.

The algorithm is FlashAttention-2 (Dao 2023): scores exist only in tiles on the chip, and each row keeps its
log-partition for the backward. Tiles in which nothing is visible are not computed, so that documents cost
less than the whole triangle does. The legend is that of `triton_tiles`.
"""

# No `from __future__ import annotations`: Triton reads the annotations of its kernels.
import triton
import triton.language as tl
from torch import Tensor

from bloomery.kernels.rules import Rules, Tiles
from bloomery.kernels.triton_tiles import (
    HIDDEN_SCORE,
    LOG2_E,
    biased,
    constants,
    keeps,
    launch,
    places,
    ranges_of_keys,
    rule_tensors,
    share_of_program,
    strides,
    tile,
)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Rules,
    mixed: Tensor,
    log_partition: Tensor,
    tiles: Tiles,
) -> None:
    """Write `mixed` [b, s, heads, d] and `log_partition` fp32 [b, heads, s], which is times log2(e).

    query: [b, s, heads, d]; key, value: [b, s, kv_heads, d]; the last dimension of each is contiguous.
    """
    batch, length, heads, _ = query.shape
    grid = (triton.cdiv(length, tiles.queries) * batch * heads,)
    _forward[grid](
        query, key, value, *rule_tensors(rules, query), mixed, log_partition,
        *strides(query), *strides(key), *strides(value), *strides(mixed),
        **constants(query, key, rules), **launch(tiles),
    )  # fmt: skip


@triton.jit
def _attend_to(
    mixed, total, largest, query, key_base, value_base, key_row, value_row, first, end,
    rows, starts, slope, row_key, columns_at, scale, threshold, inner,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with the softmax of some queries over the keys from `first` to `end`.

    MASKED: whether a key of these may be hidden from one of the queries.
    """
    within = tl.arange(0, KEYS)
    for begin in range(first, end, KEYS):
        columns = begin + within
        key = tile(key_base, begin, within, inner, key_row, LENGTH, WIDTH, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
        scores = biased(scores, rows[:, None], columns[None, :], slope, HAS_SLOPES)
        if MASKED:
            seen = columns[None, :] <= rows[:, None]
            if HAS_DOCUMENTS:
                seen &= columns[None, :] >= starts[:, None]
            scores = tl.where(seen, scores, HIDDEN_SCORE)
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        if DROPS:
            column_key = tl.load(columns_at + columns, mask=columns < LENGTH, other=0)
            weights = tl.where(keeps(row_key[:, None], column_key[None, :], threshold), weights, 0.0)
        value = tile(value_base, begin, within, inner, value_row, LENGTH, WIDTH, MASKED)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        largest = higher
    return mixed, total, largest


@triton.jit
def _forward(
    query, key, value, starts, ends, slopes, row_keys, column_keys, mixed, log_partition,
    query_batch, query_row, query_head, key_batch, key_row, key_head,
    value_batch, value_row, value_head, mixed_batch, mixed_row, mixed_head,
    scale, threshold, kept,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_SLOPES: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (LENGTH + QUERIES - 1) // QUERIES
    number, sample, head = share_of_program(TILES, HEADS)
    # The last queries see most keys, so their programs start first.
    first = (TILES - 1 - number) * QUERIES
    kv_head = head // (HEADS // KV_HEADS)
    within = tl.arange(0, QUERIES)
    rows = first + within
    inner = tl.arange(0, PADDED)
    query_base = query + sample * query_batch + head * query_head
    queries = tile(query_base, first, within, inner, query_row, LENGTH, WIDTH, MASKED=True)
    key_base = key + sample * key_batch + kv_head * key_head
    value_base = value + sample * value_batch + kv_head * value_head
    result = tl.zeros([QUERIES, PADDED], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], HIDDEN_SCORE, tl.float32)
    slope = tl.load(slopes + head) * LOG2_E if HAS_SLOPES else 0.0
    row_key = rows
    if DROPS:
        row_key = tl.load(row_keys + (sample * HEADS + head) * LENGTH + rows, mask=rows < LENGTH, other=0)
    start = rows
    if HAS_DOCUMENTS:
        start = tl.load(starts + sample * LENGTH + rows, mask=rows < LENGTH, other=LENGTH)
    lower, whole, diagonal = ranges_of_keys(
        starts + sample * LENGTH, first, QUERIES, KEYS, LENGTH, HAS_DOCUMENTS
    )
    if HAS_DOCUMENTS:
        result, total, largest = _attend_to(
            result, total, largest, queries, key_base, value_base, key_row, value_row, lower, whole,
            rows, start, slope, row_key, column_keys, scale, threshold, inner,
            LENGTH, WIDTH, KEYS, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=True,
        )  # fmt: skip
    result, total, largest = _attend_to(
        result, total, largest, queries, key_base, value_base, key_row, value_row, whole, diagonal,
        rows, start, slope, row_key, column_keys, scale, threshold, inner,
        LENGTH, WIDTH, KEYS, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=False,
    )  # fmt: skip
    result, total, largest = _attend_to(
        result, total, largest, queries, key_base, value_base, key_row, value_row,
        diagonal, tl.minimum(first + QUERIES, LENGTH),
        rows, start, slope, row_key, column_keys, scale, threshold, inner,
        LENGTH, WIDTH, KEYS, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=True,
    )  # fmt: skip
    exists = rows < LENGTH
    tl.store(log_partition + (sample * HEADS + head) * LENGTH + rows, largest + tl.log2(total), mask=exists)
    result = result * ((kept if DROPS else 1.0) / total)[:, None]
    at = places(mixed + sample * mixed_batch + head * mixed_head, first, within, inner, mixed_row)
    tl.store(at, result.to(mixed.dtype.element_ty), mask=exists[:, None] & (inner[None, :] < WIDTH))
