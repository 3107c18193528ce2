"""The Triton kernel that adds 16-bit gradients to their fp32 sum.

Import this module only where `available.has_triton()`.
"""

# No `from __future__ import annotations`: Triton reads the annotations of its kernels.
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


def add_widened(total: Tensor, values: Tensor, *, is_first: bool) -> None:
    """Add `values`, bf16 or fp16, to the fp32 `total` of the same size; write them over it if `is_first`.

    Both are contiguous. Each element is widened and added in fp32, so the bits are those of `Tensor.add_`.
    """
    count = values.numel()
    _add_widened[(triton.cdiv(count, BLOCK),)](
        total, values, count, ADDS=not is_first, BLOCK=BLOCK, num_warps=WARPS
    )


@triton.jit
def _add_widened(total, values, count, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Treat BLOCK elements. Only the first one's place has 64 bits: a tensor may have more than 2**31."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    # Both tensors are read in fours, so that each thread stores what it has read.
    within = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    exists = within < count - first
    sums = tl.load(values + first + within, mask=exists, other=0.0).to(tl.float32)
    if ADDS:
        sums += tl.load(total + first + within, mask=exists, other=0.0)
    tl.store(total + first + within, sums, mask=exists)
