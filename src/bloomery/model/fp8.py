"""Matrix products of 8-bit floats: E4M3 forward, E5M2 for gradients (Micikevicius et al., 2022).

Each factor is scaled by its largest element at the moment of the product. Devices without units for 8 bits
compute the same numbers with fp32 products of the rounded factors: these products are exact, and the units
sum in fp32 too. Legend: n rows of x, i inputs, o outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = 16
"""The units need sizes that are multiples of this number."""
ADA = (8, 9)
"""The first compute capability with units for 8 bits."""


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ in x's dtype, from 8-bit factors, with 8-bit factors backward. [..., i] → [...,
    o].
    """
    return _Product.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        narrow_x, scale_x = narrowed(x, FORWARD)
        narrow_weight, scale_weight = narrowed(weight, FORWARD)
        ctx.save_for_backward(narrow_x, scale_x, narrow_weight, scale_weight)
        ctx.dtype = x.dtype
        return _product(narrow_x, narrow_weight.t(), scale_x, scale_weight, x.dtype)  # [n, o]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x, scale_x, weight, scale_weight = ctx.saved_tensors
        narrow, scale = narrowed(gradient, BACKWARD)
        by_x = _product(narrow, weight, scale, scale_weight, ctx.dtype)  # [n, i]
        by_weight = _product(narrow.t(), x, scale, scale_x, ctx.dtype)  # [o, i]
        return by_x, by_weight


def narrowed(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x` in 8 bits, and the fp32 scale by which it is multiplied to give about x again."""
    wide = x.float()
    scale = (wide.abs().amax() / torch.finfo(dtype).max).clamp(min=1e-30)
    return (wide / scale).to(dtype), scale


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [a, b] · [b, c] of 8-bit factors, times both scales, in `dtype`."""
    if _has_units(left) and all(size % UNIT == 0 for size in (*left.shape, *right.shape)):
        # The units need the left factor by rows and the right one by columns.
        columns = right.t().contiguous().t()
        return torch._scaled_mm(
            left.contiguous(), columns, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype
        )
    return (left.float() @ right.float() * (left_scale * right_scale)).to(dtype)


def _has_units(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= ADA
