"""The Triton kernels of causal attention's backward: one by keys and values, one by queries.

Each computes the scores of its tiles anew (Dao 2023, algorithm 2). The legend is that of `triton_tiles`.
"""

# No `from __future__ import annotations`: Triton reads the annotations of its kernels.
import torch
import triton
import triton.language as tl
from torch import Tensor

from bloomery.kernels.rules import AttentionTiles, Rules
from bloomery.kernels.triton_tiles import (
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


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Rules,
    mixed: Tensor,
    log_partition: Tensor,
    slopes: tuple[Tensor, Tensor, Tensor],
    *,
    tiles: AttentionTiles,
) -> None:
    """Write the gradients by query, key and value into `slopes`, which have their shapes.

    gradient: of `mixed`. mixed, log_partition: what `forward` wrote.
    """
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    by_query, by_key, by_value = slopes
    correction = torch.empty_like(log_partition)
    rows = 64
    _row_corrections[(triton.cdiv(length, rows) * batch * heads,)](
        gradient, mixed, correction, *strides(gradient), *strides(mixed),
        LENGTH=length, HEADS=heads, WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=rows,
    )  # fmt: skip
    shared = (gradient, query, key, value, *rule_tensors(rules, query), log_partition, correction)
    factor_strides = (*strides(gradient), *strides(query), *strides(key), *strides(value))
    fixed = constants(query, key, rules)
    of_keys, of_queries = tiles.backward_of_keys, tiles.backward_of_queries
    _backward_of_keys[(triton.cdiv(length, of_keys.keys) * batch * kv_heads,)](
        *shared, by_key, by_value, *factor_strides, *strides(by_key), *strides(by_value),
        **fixed, **launch(of_keys),
    )  # fmt: skip
    _backward_of_queries[(triton.cdiv(length, of_queries.queries) * batch * heads,)](
        *shared, by_query, *factor_strides, *strides(by_query), **fixed, **launch(of_queries)
    )


@triton.jit
def _row_corrections(
    gradient, mixed, correction,
    gradient_batch, gradient_row, gradient_head, mixed_batch, mixed_row, mixed_head,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write each query's sum over channels of (gradient of the output) · output, fp32 [b, heads, s].

    That is D in Dao 2023, algorithm 2, line 4. mixed: the output, which is values mixed by the weights.
    """
    number, sample, head = share_of_program((LENGTH + ROWS - 1) // ROWS, HEADS)
    first = number * ROWS
    within = tl.arange(0, ROWS)
    rows = first + within
    inner = tl.arange(0, PADDED)
    gradient_base = gradient + sample * gradient_batch + head * gradient_head
    slope = tile(gradient_base, first, within, inner, gradient_row, LENGTH, WIDTH, MASKED=True)
    mixed_base = mixed + sample * mixed_batch + head * mixed_head
    result = tile(mixed_base, first, within, inner, mixed_row, LENGTH, WIDTH, MASKED=True)
    sums = tl.sum(slope.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(correction + (sample * HEADS + head) * LENGTH + rows, sums, mask=rows < LENGTH)


@triton.jit
def _slopes_of_keys(
    by_key, by_value, keys, values, gradient_base, query_base, gradient_row, query_row, first, end,
    columns, starts_at, slope, row_keys_at, column_key, partition_at, correction_at,
    scale, threshold, kept, inner,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients by some keys and values that come from the queries from `first` to `end`.

    Scores are transposed, [keys, queries], so that no product needs a transposed factor of weights.
    MASKED: whether one of the keys may be hidden from a query of these.
    """
    within = tl.arange(0, QUERIES)
    for begin in range(first, end, QUERIES):
        rows = begin + within
        query = tile(query_base, begin, within, inner, query_row, LENGTH, WIDTH, MASKED=True)
        exists = rows < LENGTH
        partition = tl.load(partition_at + rows, mask=exists, other=0.0)
        scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * (scale * LOG2_E)
        scores = biased(scores, rows[None, :], columns[:, None], slope, HAS_SLOPES)
        weights = tl.exp2(scores - partition[None, :])
        if MASKED:
            seen = (columns[:, None] <= rows[None, :]) & exists[None, :]
            if HAS_DOCUMENTS:
                start = tl.load(starts_at + rows, mask=exists, other=LENGTH)
                seen &= columns[:, None] >= start[None, :]
            weights = tl.where(seen, weights, 0.0)
        slope_of_mixed = tile(gradient_base, begin, within, inner, gradient_row, LENGTH, WIDTH, MASKED=True)
        by_weights = tl.dot(values, tl.trans(slope_of_mixed), input_precision=PRECISION)
        dropped = weights
        if DROPS:
            row_key = tl.load(row_keys_at + rows, mask=exists, other=0)
            keep = keeps(row_key[None, :], column_key[:, None], threshold)
            dropped = tl.where(keep, weights * kept, 0.0)
            by_weights = tl.where(keep, by_weights * kept, 0.0)
        by_value += tl.dot(dropped.to(slope_of_mixed.dtype), slope_of_mixed, input_precision=PRECISION)
        correction = tl.load(correction_at + rows, mask=exists, other=0.0)
        by_scores = weights * (by_weights - correction[None, :])
        by_key += tl.dot(by_scores.to(query.dtype), query, input_precision=PRECISION)
    return by_key, by_value


@triton.jit
def _backward_of_keys(
    gradient, query, key, value, starts, ends, slopes, row_keys, column_keys, log_partition, correction,
    by_key_at, by_value_at,
    gradient_batch, gradient_row, gradient_head, query_batch, query_row, query_head,
    key_batch, key_row, key_head, value_batch, value_row, value_head,
    by_key_batch, by_key_row, by_key_head, by_value_batch, by_value_row, by_value_head,
    scale, threshold, kept,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_SLOPES: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The first keys are seen by most queries, and their programs start first as it is.
    number, sample, kv_head = share_of_program((LENGTH + KEYS - 1) // KEYS, KV_HEADS)
    first = number * KEYS
    within = tl.arange(0, KEYS)
    columns = first + within
    inner = tl.arange(0, PADDED)
    key_base = key + sample * key_batch + kv_head * key_head
    keys = tile(key_base, first, within, inner, key_row, LENGTH, WIDTH, MASKED=True)
    value_base = value + sample * value_batch + kv_head * value_head
    values = tile(value_base, first, within, inner, value_row, LENGTH, WIDTH, MASKED=True)
    by_key = tl.zeros([KEYS, PADDED], tl.float32)
    by_value = tl.zeros([KEYS, PADDED], tl.float32)
    column_key = columns
    if DROPS:
        column_key = tl.load(column_keys + columns, mask=columns < LENGTH, other=0)
    starts_at = starts + sample * LENGTH if HAS_DOCUMENTS else starts
    # Queries up to `whole` hide some of the keys by causality, those from `part` on by documents.
    stop = LENGTH
    part = LENGTH
    if HAS_DOCUMENTS:
        ends_at = ends + sample * LENGTH
        stop = tl.load(ends_at + tl.minimum(first + KEYS, LENGTH) - 1) + 1
        part = tl.load(ends_at + first) + 1
    whole = tl.minimum((first + KEYS + QUERIES - 1) // QUERIES * QUERIES, stop)
    begin = first // QUERIES * QUERIES
    part = tl.maximum(part // QUERIES * QUERIES, whole) if HAS_DOCUMENTS else tl.maximum(stop, whole)
    for member in range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + member
        lines = (sample * HEADS + head) * LENGTH
        slope = tl.load(slopes + head) * LOG2_E if HAS_SLOPES else 0.0
        gradient_base = gradient + sample * gradient_batch + head * gradient_head
        query_base = query + sample * query_batch + head * query_head
        row_keys_at = row_keys + lines if DROPS else row_keys
        by_key, by_value = _slopes_of_keys(
            by_key, by_value, keys, values, gradient_base, query_base, gradient_row, query_row, begin, whole,
            columns, starts_at, slope, row_keys_at, column_key, log_partition + lines, correction + lines,
            scale, threshold, kept, inner,
            LENGTH, WIDTH, QUERIES, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=True,
        )  # fmt: skip
        by_key, by_value = _slopes_of_keys(
            by_key, by_value, keys, values, gradient_base, query_base, gradient_row, query_row, whole, part,
            columns, starts_at, slope, row_keys_at, column_key, log_partition + lines, correction + lines,
            scale, threshold, kept, inner,
            LENGTH, WIDTH, QUERIES, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=False,
        )  # fmt: skip
        if HAS_DOCUMENTS:
            by_key, by_value = _slopes_of_keys(
                by_key, by_value, keys, values, gradient_base, query_base, gradient_row, query_row, part,
                stop, columns, starts_at, slope, row_keys_at, column_key, log_partition + lines, correction +
                lines, scale, threshold, kept, inner,
                LENGTH, WIDTH, QUERIES, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=True,
            )  # fmt: skip
    exists = (columns[:, None] < LENGTH) & (inner[None, :] < WIDTH)
    by_key_base = by_key_at + sample * by_key_batch + kv_head * by_key_head
    key_places = places(by_key_base, first, within, inner, by_key_row)
    tl.store(key_places, (by_key * scale).to(by_key_at.dtype.element_ty), mask=exists)
    by_value_base = by_value_at + sample * by_value_batch + kv_head * by_value_head
    value_places = places(by_value_base, first, within, inner, by_value_row)
    tl.store(value_places, by_value.to(by_value_at.dtype.element_ty), mask=exists)


@triton.jit
def _slopes_of_queries(
    by_query, queries, slope_of_mixed, partition, correction, key_base, value_base, key_row, value_row,
    first, end, rows, starts, slope, row_key, columns_at, scale, threshold, kept, inner,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradient by some queries that comes from the keys from `first` to `end`."""
    within = tl.arange(0, KEYS)
    for begin in range(first, end, KEYS):
        columns = begin + within
        key = tile(key_base, begin, within, inner, key_row, LENGTH, WIDTH, MASKED)
        scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
        scores = biased(scores, rows[:, None], columns[None, :], slope, HAS_SLOPES)
        weights = tl.exp2(scores - partition[:, None])
        if MASKED:
            seen = columns[None, :] <= rows[:, None]
            if HAS_DOCUMENTS:
                seen &= columns[None, :] >= starts[:, None]
            weights = tl.where(seen, weights, 0.0)
        value = tile(value_base, begin, within, inner, value_row, LENGTH, WIDTH, MASKED)
        by_weights = tl.dot(slope_of_mixed, tl.trans(value), input_precision=PRECISION)
        if DROPS:
            column_key = tl.load(columns_at + columns, mask=columns < LENGTH, other=0)
            keep = keeps(row_key[:, None], column_key[None, :], threshold)
            by_weights = tl.where(keep, by_weights * kept, 0.0)
        by_scores = weights * (by_weights - correction[:, None])
        by_query += tl.dot(by_scores.to(key.dtype), key, input_precision=PRECISION)
    return by_query


@triton.jit
def _backward_of_queries(
    gradient, query, key, value, starts, ends, slopes, row_keys, column_keys, log_partition, correction,
    by_query_at,
    gradient_batch, gradient_row, gradient_head, query_batch, query_row, query_head,
    key_batch, key_row, key_head, value_batch, value_row, value_head,
    by_query_batch, by_query_row, by_query_head,
    scale, threshold, kept,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_SLOPES: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (LENGTH + QUERIES - 1) // QUERIES
    number, sample, head = share_of_program(TILES, HEADS)
    first = (TILES - 1 - number) * QUERIES
    kv_head = head // (HEADS // KV_HEADS)
    within = tl.arange(0, QUERIES)
    rows = first + within
    exists = rows < LENGTH
    inner = tl.arange(0, PADDED)
    query_base = query + sample * query_batch + head * query_head
    queries = tile(query_base, first, within, inner, query_row, LENGTH, WIDTH, MASKED=True)
    gradient_base = gradient + sample * gradient_batch + head * gradient_head
    slope_of_mixed = tile(gradient_base, first, within, inner, gradient_row, LENGTH, WIDTH, MASKED=True)
    lines = (sample * HEADS + head) * LENGTH
    partition = tl.load(log_partition + lines + rows, mask=exists, other=0.0)
    corrections = tl.load(correction + lines + rows, mask=exists, other=0.0)
    key_base = key + sample * key_batch + kv_head * key_head
    value_base = value + sample * value_batch + kv_head * value_head
    slope = tl.load(slopes + head) * LOG2_E if HAS_SLOPES else 0.0
    row_key = rows
    if DROPS:
        row_key = tl.load(row_keys + lines + rows, mask=exists, other=0)
    start = rows
    if HAS_DOCUMENTS:
        start = tl.load(starts + sample * LENGTH + rows, mask=exists, other=LENGTH)
    lower, whole, diagonal = ranges_of_keys(
        starts + sample * LENGTH, first, QUERIES, KEYS, LENGTH, HAS_DOCUMENTS
    )
    by_query = tl.zeros([QUERIES, PADDED], tl.float32)
    if HAS_DOCUMENTS:
        by_query = _slopes_of_queries(
            by_query, queries, slope_of_mixed, partition, corrections, key_base, value_base, key_row,
            value_row, lower, whole, rows, start, slope, row_key, column_keys, scale, threshold, kept, inner,
            LENGTH, WIDTH, KEYS, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=True,
        )  # fmt: skip
    by_query = _slopes_of_queries(
        by_query, queries, slope_of_mixed, partition, corrections, key_base, value_base, key_row, value_row,
        whole, diagonal, rows, start, slope, row_key, column_keys, scale, threshold, kept, inner,
        LENGTH, WIDTH, KEYS, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=False,
    )  # fmt: skip
    by_query = _slopes_of_queries(
        by_query, queries, slope_of_mixed, partition, corrections, key_base, value_base, key_row, value_row,
        diagonal, tl.minimum(first + QUERIES, LENGTH),
        rows, start, slope, row_key, column_keys, scale, threshold, kept, inner,
        LENGTH, WIDTH, KEYS, HAS_DOCUMENTS, HAS_SLOPES, DROPS, PRECISION, MASKED=True,
    )  # fmt: skip
    by_query_base = by_query_at + sample * by_query_batch + head * by_query_head
    at = places(by_query_base, first, within, inner, by_query_row)
    tl.store(
        at, (by_query * scale).to(by_query_at.dtype.element_ty),
        mask=exists[:, None] & (inner[None, :] < WIDTH),
    )  # fmt: skip
