"""Rows of a table, with a gradient that is the same on every run."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Embedding(nn.Module):
    """A table [rows, h]; values are undefined until initialised or loaded."""

    def __init__(self, rows: int, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))

    def forward(self, indices: Tensor) -> Tensor:
        """Integers [...] → [..., h]."""
        return rows_of(indices, self.weight)


def rows_of(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` [rows, h] at integers [...] → [..., h]; its gradient is added up in one order."""
    return _Rows.apply(indices, weight)


class _Rows(torch.autograd.Function):
    """F.embedding, whose own gradient compiled code adds up in whatever order its threads arrive."""

    @staticmethod
    def forward(ctx, indices: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[no-untyped-def]
        (indices,) = ctx.saved_tensors
        return None, torch.ops.bloomery.sum_of_rows(gradient.contiguous(), indices, ctx.rows)


# An operator, so that torch.compile leaves it whole; torch offers no way to make one but at import. Not
# torch.library.custom_op: its operators import the compiler at their first call, used or not.
torch.library.define("bloomery::sum_of_rows", "(Tensor gradient, Tensor indices, int rows) -> Tensor")


@torch.library.impl("bloomery::sum_of_rows", "default")
def _sum_of_rows(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    """[rows, h]: the gradients [..., h] of each row added in the order of positions, in fp32."""
    wide = gradient.float() if gradient.device.type == "cpu" else gradient  # GPU kernels widen by themselves
    summed = torch.ops.aten.embedding_dense_backward(
        wide, indices, rows, padding_idx=-1, scale_grad_by_freq=False
    )
    return summed.to(gradient.dtype)


@torch.library.register_fake("bloomery::sum_of_rows")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    return gradient.new_empty(rows, gradient.shape[-1])
