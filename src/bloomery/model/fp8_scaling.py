"""Matmuls of 8-bit factors with many scales each: one a row, a block of 128, or a block of 32 (MXFP8).

With one scale a tensor (`model/fp8.py`) a few large elements push all small ones below what 8 bits can
tell apart; here they do so only within their own row or block. All values are E4M3, gradients too: with so
many scales they need precision more than range.

- 'row': each factor has one scale for each of its rows along the dimension that the product sums over, a
  power of two. These are the choices of torchao's float8 recipe "rowwise".
- 'block': 1 × 128 elements of activations and gradients share a scale, 128 × 128 of weights, in fp32
  (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2).
- 'mx': 32 elements along the summed dimension share a power of two (OCP Microscaling Formats 1.0, MXFP8).
  It is the smallest that keeps the largest element within range (Mishra et al. 2025, "Recipes for
  Pre-training LLMs with MXFP8"), where the OCP's own rule would clip some.

x, weight and gradient are factors of two products each, which sum over different dimensions. So each is
scaled and rounded twice, along its rows and along its columns, from its 16 bits both times; no product is
left in higher precision. What waits for the backward is x by columns, in 8 bits, and no copy of the weight
but the one that is kept from update to update.

CPUs multiply the rounded factors in fp32: the products are exact, and the units sum in fp32 too.

Legend: n rows of x, i inputs, o outputs; r rows and k summed elements of a factor, in blocks of a × b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bloomery.model.fp8 import FP8_FORWARD, Maximum, fp8_scale, has_fp8_units
from bloomery.model.fp8_units import units_product

FineScaling = Literal["row", "block", "mx"]
Scaling = Literal["tensor", "row", "block", "mx"]
"""What shares a scale: a whole factor, its rows, or its blocks."""
FINE_SCALINGS: tuple[FineScaling, ...] = get_args(FineScaling)

BLOCK, MX_BLOCK = 128, 32
"""The elements along the summed dimension that share a scale."""
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000  # bits of an fp32


class ScaledFactor(NamedTuple):
    """A factor in 8 bits. codes: E4M3 [r, k], by rows. scales: fp32 [⌈r/a⌉, ⌈k/b⌉]. block: (a, b)."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ScaledWeight:
    """The two 8-bit copies of a linear layer's weight. A `Linear` carries it in `scaled_weight`.

    Whoever changes weights writes the new values into the same tensors before the next product
    (`parallel/scaled_weights.py`), so that compiled code stays valid.

    rows: [o, i], as the forward reads it. columns: [i, o], as the gradient by x reads it.
    """

    rows: ScaledFactor
    columns: ScaledFactor


def scaled_linear(
    x: Tensor,
    weight: Tensor,
    *,
    scaling: FineScaling,
    maximum: Maximum | None = None,
    splits_input: bool = False,
    scaled_weight: ScaledWeight | None = None,
) -> Tensor:
    """Return x · weightᵀ in x's dtype from 8-bit factors, with 8-bit factors backward. [..., i] → [..., o].

    maximum: over the tensor-parallel ranks; None where this rank holds whole factors.
    splits_input: whether these ranks hold parts of the inputs of one product; else they hold parts of its
        outputs.
    scaled_weight: of `weight`, as it is now; None: each product rounds the weight.
    """
    flat = x.flatten(0, -2)
    # Rows that are split over ranks share the scale of the whole row, so each layout rounds alike. Blocks
    # are never split: the configuration refuses degrees that would (`config/validate_precision.py`).
    shared = maximum if scaling == "row" else None
    forward, backward = (shared, None) if splits_input else (None, shared)
    kept: tuple[Tensor | None, ...] = (None,) * 4
    if scaled_weight is not None:
        kept = (*scaled_weight.rows[:2], *scaled_weight.columns[:2])
    product = _ScaledProduct.apply(flat, weight, scaling, forward, backward, *kept)
    return product.unflatten(0, x.shape[:-1])


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: Tensor,
        weight: Tensor,
        scaling: FineScaling,
        forward: Maximum | None,
        backward: Maximum | None,
        *kept: Tensor | None,
    ) -> Tensor:
        """kept: codes and scales of the weight by rows, then by columns, or four times None."""
        factor = _factor(weight, scaling, forward, kept[:2], is_weight=True)
        by_columns = scaled(x.t(), scaling)
        ctx.save_for_backward(by_columns.codes, by_columns.scales, weight, *kept[2:])
        ctx.scaling, ctx.maximum, ctx.block = scaling, backward, by_columns.block
        by_rows = _factor(x, scaling, forward)
        return _product(by_rows, factor, x.dtype, scaling=scaling, is_fast=True)  # [n, o]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        codes, scales, weight, *kept = ctx.saved_tensors
        factor = _factor(weight.t(), ctx.scaling, ctx.maximum, kept, is_weight=True)
        by_rows = _factor(gradient, ctx.scaling, ctx.maximum)
        by_x = _product(by_rows, factor, gradient.dtype, scaling=ctx.scaling)  # [n, i]
        by_columns = scaled(gradient.t(), ctx.scaling)
        x = ScaledFactor(codes, scales, ctx.block)
        by_weight = _product(by_columns, x, gradient.dtype, scaling=ctx.scaling)  # [o, i]
        return by_x, by_weight, None, None, None, None, None, None, None


def scaled(
    x: Tensor, scaling: FineScaling, *, is_weight: bool = False, largest: Tensor | None = None
) -> ScaledFactor:
    """Return [r, k] in 8 bits, scaled along k.

    largest: the largest magnitude of each block, [⌈r/a⌉, ⌈k/b⌉]; that of `x` if it is not given.
    """
    block = block_of(x, scaling, is_weight=is_weight)
    largest = largest_of_blocks(x, scaling, is_weight=is_weight) if largest is None else largest
    scales = fp8_scale(largest, FP8_FORWARD)
    if scaling != "block":
        scales = power_of_two_from(scales)
    # GPUs fuse the rounding with what makes x.
    rounded = torch.ops.bloomery.fp8_blocks if x.device.type == "cpu" else _rounded_blocks
    return ScaledFactor(rounded(x, scales, *block), scales, block)


def largest_of_blocks(x: Tensor, scaling: FineScaling, *, is_weight: bool = False) -> Tensor:
    """Return the largest magnitude of each block of [r, k], [⌈r/a⌉, ⌈k/b⌉], in x's dtype."""
    blocks = _in_blocks(x, block_of(x, scaling, is_weight=is_weight))
    return blocks.abs().amax(dim=(1, 3))


def block_of(x: Tensor, scaling: FineScaling, *, is_weight: bool) -> tuple[int, int]:
    """Return (height, length) of the blocks of [r, k] that share a scale."""
    if scaling == "row":
        return 1, x.shape[1]
    if scaling == "mx":
        return 1, MX_BLOCK
    return BLOCK if is_weight else 1, BLOCK


def power_of_two_from(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each positive normal fp32 number."""
    bits = x.view(torch.int32) + _MANTISSA  # carries into the exponent unless the mantissa is 0
    return (bits & _EXPONENT).view(torch.float32)


def widened(factor: ScaledFactor) -> Tensor:
    """Return what a factor in 8 bits stands for, in fp32, [r, k]."""
    values: Tensor = torch.ops.bloomery.fp8_widened(factor.codes, factor.scales, *factor.block)
    return values


def _factor(
    x: Tensor,
    scaling: FineScaling,
    maximum: Maximum | None,
    kept: Sequence[Tensor | None] = (None, None),
    *,
    is_weight: bool = False,
) -> ScaledFactor:
    """Return [r, k] in 8 bits, with the maxima of all ranks. kept: its codes and scales, if there are."""
    codes, scales = kept
    if codes is not None and scales is not None:
        return ScaledFactor(codes, scales, block_of(x, scaling, is_weight=is_weight))
    largest = largest_of_blocks(x, scaling, is_weight=is_weight)
    return scaled(x, scaling, is_weight=is_weight, largest=largest if maximum is None else maximum(largest))


def _product(
    left: ScaledFactor,
    right: ScaledFactor,
    dtype: torch.dtype,
    *,
    scaling: FineScaling,
    is_fast: bool = False,
) -> Tensor:
    """Return left · rightᵀ, [r, k] and [c, k] → [r, c].

    is_fast: whether the units may add up with fewer bits than fp32 has, where they can: with one scale a row.
    """
    if has_fp8_units(left.codes.device):  # GPUs without them are refused at the start
        scales, is_square = (left.scales, right.scales), right.block[0] > 1
        return units_product(
            left.codes,
            right.codes,
            scales,
            dtype,
            scaling=scaling,
            is_square=is_square,
            is_fast=is_fast and scaling == "row",
        )
    return (widened(left) @ widened(right).t()).to(dtype)


def _in_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[r, k] → [⌈r/a⌉, a, ⌈k/b⌉, b], with zeros where the last blocks are not full."""
    (rows, columns), (height, length) = x.shape, block
    missing = (0, -columns % length, 0, -rows % height)
    whole = F.pad(x, missing) if any(missing) else x
    return whole.unflatten(1, (-1, length)).unflatten(0, (-1, height))


def _rounded_blocks(x: Tensor, scales: Tensor, height: int, length: int) -> Tensor:
    """Return the codes of [r, k], contiguous."""
    blocks = _in_blocks(x, (height, length))  # [r/a, a, k/b, b]
    codes = (blocks.float() / scales[:, None, :, None]).to(FP8_FORWARD)
    return codes.flatten(2, 3).flatten(0, 1)[: x.shape[0], : x.shape[1]].contiguous()


# Operators, so that torch.compile leaves them whole on CPUs; see `layers.py` for why they are made like this.
# Column j has the scale of block j // b. For that the compiler of torch 2.13 splits a CPU's loop over columns
# into whole blocks. It leaves out the columns after the last whole block, and it fails where a matrix and its
# transpose share a loop.
torch.library.define(
    "bloomery::fp8_blocks", "(Tensor x, Tensor scales, int height, int length) -> Tensor codes"
)
torch.library.define(
    "bloomery::fp8_widened", "(Tensor codes, Tensor scales, int height, int length) -> Tensor values"
)
torch.library.impl("bloomery::fp8_blocks", "default", _rounded_blocks)


@torch.library.register_fake("bloomery::fp8_blocks")  # type: ignore[untyped-decorator]
def _(x: Tensor, _scales: Tensor, _height: int, _length: int) -> Tensor:
    return x.new_empty(x.shape, dtype=FP8_FORWARD)


@torch.library.impl("bloomery::fp8_widened", "default")
def _fp8_widened(codes: Tensor, scales: Tensor, height: int, length: int) -> Tensor:
    rows, columns = codes.shape
    by_row = scales.repeat_interleave(height, 0)[:rows]
    return codes.float() * by_row.repeat_interleave(length, 1)[:, :columns]


@torch.library.register_fake("bloomery::fp8_widened")  # type: ignore[untyped-decorator]
def _(codes: Tensor, _scales: Tensor, _height: int, _length: int) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)
