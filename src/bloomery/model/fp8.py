"""Matmuls of 8-bit floats: E4M3 forward, E5M2 for gradients (Micikevicius et al., 2022).

Each factor is scaled by its largest element at the moment of the matmul. Where tensor parallelism splits a
factor, the largest element is that of the whole factor, so each layout rounds alike. Devices without units
for 8 bits compute the same numbers with fp32 matmuls of the rounded factors: these are exact, and the units
sum in fp32 too.

Legend: n rows of x, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bloomery import torch_private

FP8_FORWARD, FP8_BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MULTIPLE = 16
"""The units need sizes that are multiples of this number; other sizes are padded with zeros."""
FP8_CAPABILITY = (8, 9)
"""The first compute capability with units for 8 bits."""

Maximum = Callable[[Tensor], Tensor]
"""Returns the elementwise maximum of a tensor over the ranks that hold parts of one factor. Collective."""


def fp8_linear(x: Tensor, weight: Tensor, maximum: Maximum | None = None) -> Tensor:
    """Return x · weightᵀ in x's dtype, from 8-bit factors, with 8-bit factors backward. [..., i] → [...,
    o].

    maximum: over the tensor-parallel ranks; None where this rank holds whole factors.
    """
    return _Fp8Product.apply(x.flatten(0, -2), weight, maximum).unflatten(0, x.shape[:-1])


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, maximum: Maximum | None) -> Tensor:  # type: ignore[no-untyped-def]
        largest = torch.stack([x.abs().amax(), weight.abs().amax()])
        if maximum is not None:
            largest = maximum(largest)
        narrow_x, scale_x = to_fp8(x, FP8_FORWARD, largest[0])
        narrow_weight, scale_weight = to_fp8(weight, FP8_FORWARD, largest[1])
        ctx.save_for_backward(narrow_x, scale_x, narrow_weight, scale_weight)
        ctx.dtype, ctx.maximum = x.dtype, maximum
        scales = (scale_x, scale_weight)
        return _fp8_product(narrow_x, narrow_weight.t(), scales, x.dtype, is_fast=True)  # [n, o]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, scale_x, weight, scale_weight = ctx.saved_tensors
        largest = gradient.abs().amax()
        if ctx.maximum is not None:
            largest = ctx.maximum(largest)
        narrow, scale = to_fp8(gradient, FP8_BACKWARD, largest)
        by_x = _fp8_product(narrow, weight, (scale, scale_weight), ctx.dtype)  # [n, i]
        by_weight = _fp8_product(narrow.t(), x, (scale, scale_x), ctx.dtype)  # [o, i]
        return by_x, by_weight, None


def to_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `x` in 8 bits, and the fp32 scale by which it is multiplied to give about x again.

    largest: the largest magnitude of the whole factor, a scalar; that of `x` if it is not given.
    """
    largest = x.abs().amax() if largest is None else largest
    scale = (largest.float() / torch.finfo(dtype).max).clamp(min=1e-30)
    return (x.float() / scale).to(dtype), scale


def _fp8_product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return [a, b] · [b, c] of 8-bit factors, times both scales, in `dtype`.

    is_fast: whether the units may add up with fewer bits than fp32 has: Transformer Engine's choice for a
        forward, and not for gradients.
    """
    if _has_fp8_units(left):
        return scaled_product(left, right, scales, dtype, is_fast=is_fast)
    return (left.float() @ right.float() * (scales[0] * scales[1])).to(dtype)


def scaled_product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return what `_fp8_product` does, computed by the units for 8 bits, which want whole tiles."""
    rows, columns = left.shape[0], right.shape[1]
    left, right = padded_to_tiles(left), padded_to_tiles(right)
    # The units need the left factor by rows and the right one by columns.
    by_columns = right.t().contiguous().t()
    product = torch_private.scaled_matmul(left.contiguous(), by_columns, scales, dtype, is_fast=is_fast)
    return product[:rows, :columns]


def padded_to_tiles(matrix: Tensor) -> Tensor:
    """Return an 8-bit matrix with rows and columns of zeros added up to whole tiles, which change no sum."""
    rows, columns = (-size % FP8_MULTIPLE for size in matrix.shape)
    if not rows and not columns:
        return matrix
    codes = F.pad(matrix.contiguous().view(torch.uint8), (0, columns, 0, rows))  # a code of 0 is the number 0
    return codes.view(matrix.dtype)


def _has_fp8_units(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY
