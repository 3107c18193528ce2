"""The Triton kernel that rounds a matrix to 8 bits, and writes the codes, their transpose, or both.

Import this module only where `available.has_triton()`.
"""

# No `from __future__ import annotations`: Triton reads the annotations of its kernels.
import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 128, 128, 8
"""A program's tile: both copies are then written in whole lines of 128 bytes."""


def write_codes(
    x: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    transposed: Tensor | None,
    *,
    through: torch.dtype | None = None,
) -> None:
    """Write `x` [a, b] / scale in 8 bits to `codes` [a, b] and `transposed` [b, a], those that are given.

    x: 16 bits or fp32; it is copied where neither its rows nor its columns are contiguous.
    through: the dtype to which `x` is rounded before it is divided; None: its own.
    scale: fp32 scalar. codes, transposed: contiguous, E4M3 or E5M2.
    """
    if through not in (None, x.dtype, torch.bfloat16):
        x = x.to(through)
    if x.stride(1) != 1 and x.stride(0) == 1:
        # The transpose of a contiguous matrix: each result is what the other is of the other matrix.
        x, codes, transposed = x.t(), transposed, codes
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)
    _write_codes[grid](
        x, scale, x if codes is None else codes, x if transposed is None else transposed,
        rows, columns, x.stride(0),
        THROUGH_BF16=through == torch.bfloat16 != x.dtype,
        BY_ROWS=codes is not None, BY_COLUMNS=transposed is not None,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _write_codes(
    x, scale_of_x, codes, transposed, rows, columns, row_stride,
    THROUGH_BF16: tl.constexpr, BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Treat one tile; programs lie along one axis, row by row of tiles."""
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    # In 64 bits: the matrix may have more than 2^31 numbers.
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (row < rows)[:, None] & (column < columns)[None, :]
    part = tl.load(x + row[:, None] * row_stride + column[None, :], mask=exists, other=0.0).to(tl.float32)
    if THROUGH_BF16:
        part = part.to(tl.bfloat16).to(tl.float32)
    # As torch divides: `/` of Triton's is an approximation on GPUs.
    part = tl.div_rn(part, tl.zeros_like(part) + tl.load(scale_of_x))
    if BY_ROWS:
        rounded = part.to(codes.dtype.element_ty)
        tl.store(codes + row[:, None] * columns + column[None, :], rounded, mask=exists)
    if BY_COLUMNS:
        turned = tl.trans(part.to(transposed.dtype.element_ty))
        turned_exists = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(transposed + column[:, None] * rows + row[None, :], turned, mask=turned_exists)
