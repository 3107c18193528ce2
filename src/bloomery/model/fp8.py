"""Matrix products of 8-bit floats: E4M3 forward, E5M2 for gradients (Micikevicius et al., 2022).

Each factor is scaled by its largest element at the moment of the product. Where tensor parallelism splits a
factor, the largest element is that of the whole factor, so each layout rounds alike. Devices without units
for 8 bits compute the same numbers with fp32 products of the rounded factors: these products are exact, and
the units sum in fp32 too. Legend: n rows of x, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = 16
"""The units need sizes that are multiples of this number; other sizes are padded with zeros."""
ADA = (8, 9)
"""The first compute capability with units for 8 bits."""

Maximum = Callable[[Tensor], Tensor]
"""Returns the elementwise maximum of a tensor over the ranks that hold parts of one factor. Collective."""


def fp8_linear(x: Tensor, weight: Tensor, maximum: Maximum | None = None) -> Tensor:
    """Return x · weightᵀ in x's dtype, from 8-bit factors, with 8-bit factors backward. [..., i] → [...,
    o].

    maximum: over the tensor-parallel ranks; None where this rank holds whole factors.
    """
    return _Product.apply(x.flatten(0, -2), weight, maximum).unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, maximum: Maximum | None) -> Tensor:  # type: ignore[no-untyped-def]
        largest = torch.stack([x.abs().amax(), weight.abs().amax()])
        if maximum is not None:
            largest = maximum(largest)
        narrow_x, scale_x = narrowed(x, FORWARD, largest[0])
        narrow_weight, scale_weight = narrowed(weight, FORWARD, largest[1])
        ctx.save_for_backward(narrow_x, scale_x, narrow_weight, scale_weight)
        ctx.dtype, ctx.maximum = x.dtype, maximum
        return _product(narrow_x, narrow_weight.t(), scale_x, scale_weight, x.dtype)  # [n, o]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, scale_x, weight, scale_weight = ctx.saved_tensors
        largest = gradient.abs().amax()
        if ctx.maximum is not None:
            largest = ctx.maximum(largest)
        narrow, scale = narrowed(gradient, BACKWARD, largest)
        by_x = _product(narrow, weight, scale, scale_weight, ctx.dtype)  # [n, i]
        by_weight = _product(narrow.t(), x, scale, scale_x, ctx.dtype)  # [o, i]
        return by_x, by_weight, None


def narrowed(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `x` in 8 bits, and the fp32 scale by which it is multiplied to give about x again.

    largest: the largest magnitude of the whole factor, a scalar; that of `x` if it is not given.
    """
    largest = x.abs().amax() if largest is None else largest
    scale = (largest.float() / torch.finfo(dtype).max).clamp(min=1e-30)
    return (x.float() / scale).to(dtype), scale


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [a, b] · [b, c] of 8-bit factors, times both scales, in `dtype`."""
    if _has_units(left):
        return scaled_product(left, right, left_scale, right_scale, dtype)
    return (left.float() @ right.float() * (left_scale * right_scale)).to(dtype)


def scaled_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return what `_product` does, computed by the units for 8 bits, which want whole tiles."""
    rows, columns = left.shape[0], right.shape[1]
    left, right = padded(left), padded(right)
    # The units need the left factor by rows and the right one by columns.
    by_columns = right.t().contiguous().t()
    product = torch._scaled_mm(
        left.contiguous(), by_columns, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype
    )
    return product[:rows, :columns]


def padded(matrix: Tensor) -> Tensor:
    """Return an 8-bit matrix with rows and columns of zeros added up to whole tiles, which change no sum."""
    rows, columns = (-size % UNIT for size in matrix.shape)
    if not rows and not columns:
        return matrix
    codes = F.pad(matrix.contiguous().view(torch.uint8), (0, columns, 0, rows))  # a code of 0 is the number 0
    return codes.view(matrix.dtype)


def _has_units(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= ADA
