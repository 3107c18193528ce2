"""Products of 16-bit matrices that are added up in fp32: gradients of weights whose rows come in chunks."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add left · right to the fp32 `total`; write it over `total` if `is_first`, which reads nothing of it.

    total: [a, b]. left: [a, n], right: [n, b], of one dtype.
    On GPUs the product adds its fp32 sums to `total` itself (beta = 1): nothing is rounded to 16 bits, and
    no product is stored beside `total`. Elsewhere the factors are widened, which gives the same sums up to
    their order.
    """
    if right.device.type == "cuda" and right.dtype in (torch.bfloat16, torch.float16):
        if is_first:
            torch.mm(left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return
    left, right = left.float(), right.float()
    if is_first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def rounded_product(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 `gradient` times a scalar, rounded once to `dtype`, without an fp32 copy of it."""
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
