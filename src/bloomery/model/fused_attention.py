"""Fused attention on GPUs (scores never in memory) with ALiBi, document masks and dropout.

torch's fused kernels know neither ALiBi nor documents nor dropout by address, other than as a mask of all
scores; these do. Plain causal attention is computed by whatever is the quickest (`attention_choice`). Legend:
b batch, s positions, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bloomery.kernels.available import has_triton
from bloomery.kernels.rules import Rules, tiles_for
from bloomery.model.dropout import ElementKeys

MOST_WIDTH = 128
"""The largest head width whose tiles fit the chip's memory."""
MOST_ROW_STRIDE = 2**24
"""The most elements from one token's heads to the next: 32 bits hold the offsets in a tile of 128 tokens."""


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """What each query sees beside plain causality, in the form that the kernels read.

    starts, ends: int32 [b, s], the first and last position of each token's document; None where a token sees
        across documents.
    slopes: ALiBi's, fp32 [heads held here]; None for no bias.
    """

    starts: Tensor | None
    ends: Tensor | None
    slopes: Tensor | None


def document_ranges(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last position of each token's document, int32 [b, s].

    documents: int [b, s]; the tokens of a document lie side by side.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    edge = documents[:, 1:] != documents[:, :-1]
    opens = torch.ones_like(documents, dtype=torch.bool)
    closes = torch.ones_like(opens)
    opens[:, 1:], closes[:, :-1] = edge, edge
    starts = torch.where(opens, index, 0).cummax(dim=1).values
    ends = torch.where(closes, index, documents.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return starts.int(), ends.int()


def supports_tiled_attention(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether `tiled_attention` can compute heads of this width and dtype on this device.

    Code compiled for a GPU cannot ask. A model that is compiled whole for a CPU does, and torch.compile
    cannot follow the search for a compiler: so that is the last question.
    """
    narrow = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and narrow and width <= MOST_WIDTH and has_triton()


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    keys: ElementKeys | None = None,
    rate: float = 0.0,
) -> Tensor:
    """Return softmax(query · keyᵀ / √d + bias) · value of visible keys, [b, s, heads, d].

    query: [b, s, heads, d]; key, value: [b, s, kv_heads, d].
    keys, rate: the dropout of weights, see `dropout.weight_keys`; None for none.
    """
    row_keys, column_keys = (None, None) if keys is None else (keys.rows, keys.columns)
    mixed: Tensor = _TiledAttention.apply(
        query, key, value, visibility.starts, visibility.ends, visibility.slopes, row_keys, column_keys, rate
    )
    return mixed


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor | None,
        ends: Tensor | None,
        slopes: Tensor | None,
        row_keys: Tensor | None,
        column_keys: Tensor | None,
        rate: float,
    ) -> Tensor:
        rules = (starts, ends, slopes, row_keys, column_keys)
        mixed, log_partition = torch.ops.bloomery.tiled_attention(query, key, value, *rules, rate)
        ctx.save_for_backward(query, key, value, *rules, mixed, log_partition)
        ctx.rate = rate
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        slopes = torch.ops.bloomery.tiled_attention_backward(gradient, *ctx.saved_tensors, ctx.rate)
        return *slopes, None, None, None, None, None, None


_RULES = "Tensor? starts, Tensor? ends, Tensor? slopes, Tensor? row_keys, Tensor? column_keys"
# Operators, so that torch.compile leaves them whole; see `layers.py` for why they are made like this.
torch.library.define(
    "bloomery::tiled_attention",
    f"(Tensor query, Tensor key, Tensor value, {_RULES}, float rate) -> (Tensor mixed, Tensor log_partition)",
)
torch.library.define(
    "bloomery::tiled_attention_backward",
    f"(Tensor gradient, Tensor query, Tensor key, Tensor value, {_RULES}, Tensor mixed, Tensor log_partition,"
    " float rate) -> (Tensor by_query, Tensor by_key, Tensor by_value)",
)


@torch.library.impl("bloomery::tiled_attention", "default")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    slopes: Tensor | None,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    rate: float,
) -> tuple[Tensor, Tensor]:
    from bloomery.kernels.triton_attention import forward  # only where Triton is

    query, key, value = (_rows(heads) for heads in (query, key, value))
    mixed, log_partition = _room(query)
    rules = _rules(starts, ends, slopes, row_keys, column_keys, rate)
    forward(query, key, value, rules, mixed, log_partition, tiles_for(query.shape[3]).forward)
    return mixed, log_partition


@torch.library.impl("bloomery::tiled_attention_backward", "default")
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    slopes: Tensor | None,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    mixed: Tensor,
    log_partition: Tensor,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from bloomery.kernels.triton_attention_backward import backward

    results = _gradients(query, key)
    rules = _rules(starts, ends, slopes, row_keys, column_keys, rate)
    gradient, query, key, value = (_rows(heads) for heads in (gradient, query, key, value))
    tiles = tiles_for(query.shape[3])
    backward(gradient, query, key, value, rules, mixed, log_partition, results, tiles=tiles)
    return results


@torch.library.register_fake("bloomery::tiled_attention")  # type: ignore[untyped-decorator]
def _(query: Tensor, *_unused: Tensor | float | None) -> tuple[Tensor, Tensor]:
    return _room(query)


@torch.library.register_fake("bloomery::tiled_attention_backward")  # type: ignore[untyped-decorator]
def _(
    gradient: Tensor, query: Tensor, key: Tensor, *_unused: Tensor | float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(query, key)


def _room(query: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(batch, heads, length, dtype=torch.float32)


def _gradients(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), key.new_empty(key.shape)


def _rows(heads: Tensor) -> Tensor:
    """Return heads [b, s, heads, d] as the kernels address them, copied where they lie in another way."""
    fits = heads.stride(-1) == 1 and heads.stride(1) <= MOST_ROW_STRIDE
    return heads if fits else heads.contiguous()


def _rules(
    starts: Tensor | None,
    ends: Tensor | None,
    slopes: Tensor | None,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    rate: float,
) -> Rules:
    return Rules(
        starts=_contiguous(starts),
        ends=_contiguous(ends),
        slopes=_contiguous(slopes),
        row_keys=_contiguous(row_keys),
        column_keys=_contiguous(column_keys),
        rate=rate,
    )


def _contiguous(rule: Tensor | None) -> Tensor | None:
    return None if rule is None else rule.contiguous()
