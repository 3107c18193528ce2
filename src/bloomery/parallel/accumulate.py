"""Adds a micro-batch's gradient to the fp32 sum of a step's, on GPUs by a kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from bloomery.kernels.available import has_triton

LEAST_FOR_KERNEL = 2**16
"""Elements below which torch adds: it starts a kernel in a fraction of the time that the host needs to start
one of Triton's, and biases and norms take no time worth saving.
"""


def add_gradient(total: Tensor, gradient: Tensor, *, is_first: bool) -> None:
    """Add `gradient` to the fp32 `total` of its shape; overwrite `total` if `is_first`.

    Elements are widened before they are added, so the bits are the same by either way.
    """
    if kernel_adds(total, gradient):
        from bloomery.kernels.triton_accumulate import add_widened  # only where Triton is

        add_widened(total, gradient, is_first=is_first)
    elif is_first:
        # Copying saves a pass over memory that zeroing and adding would take.
        total.copy_(gradient)
    else:
        total.add_(gradient)


def kernel_adds(total: Tensor, gradient: Tensor) -> bool:
    """Return whether `add_gradient` uses Triton's kernel.

    torch's own copies and sums of tensors with two dtypes load element by element on GPUs.
    """
    return (
        gradient.device.type == "cuda"
        and gradient.dtype in (torch.bfloat16, torch.float16)
        and gradient.numel() >= LEAST_FOR_KERNEL
        and gradient.is_contiguous()
        and total.is_contiguous()
        and has_triton()
    )
