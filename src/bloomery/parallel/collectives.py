"""What the ranks of a tensor-parallel line exchange inside the model, with gradients.

A rank's activations are either the same on the whole line or, under sequence parallelism, its share of the
positions. The pairs below are each other's backward. They are functional operators, so that torch.compile
keeps them inside a block. Legend: b batch, s sequence, h hidden, tp ranks of the line.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.parallel.mesh import Axis


@dataclass(frozen=True, kw_only=True)
class Line:
    """A tensor-parallel axis as compiled code may hold it. scatters: reduce-scatter is quick there."""

    group: str
    index: int
    degree: int
    scatters: bool

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the line."""
        return _waited(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))

    def gather(self, x: Tensor) -> Tensor:
        """[…] of each rank → [tp, …], by rank."""
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), self.degree, self.group)
        return _waited(gathered).unflatten(0, (self.degree, -1)) if x.dim() else _waited(gathered)

    def gather_sequence(self, x: Tensor) -> Tensor:
        """[b, s/tp, h] → [b, s, h]."""
        parts = self.gather(x)  # [tp, b, s/tp, h]
        return parts.transpose(0, 1).flatten(1, 2)

    def sum_to_share(self, x: Tensor) -> Tensor:
        """Summands [b, s, h] → this rank's positions of the sum, [b, s/tp, h]."""
        if not self.scatters:
            return self.sum(x).chunk(self.degree, dim=1)[self.index].contiguous()
        parts = x.unflatten(1, (self.degree, -1)).transpose(0, 1).contiguous()  # [tp, b, s/tp, h]
        scattered = torch.ops._c10d_functional.reduce_scatter_tensor(parts, "sum", self.degree, self.group)
        return _waited(scattered).squeeze(0)


def line_of(axis: Axis) -> Line:
    """The axis, which has more than one rank, as a value."""
    assert axis.group is not None, "an axis of one rank exchanges nothing"
    # gloo's reduce-scatter takes 2.6 times as long as its all-reduce.
    scatters = dist.get_backend(axis.group) == "nccl"
    return Line(group=axis.group.group_name, index=axis.index, degree=axis.degree, scatters=scatters)


class Enter(nn.Module):
    """Before split columns: the whole sequence for everyone; backward adds up everyone's gradients."""

    def __init__(self, line: Line, *, sequence: bool) -> None:
        super().__init__()
        self.line, self.sequence = line, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[b, s/tp, h] → [b, s, h] under sequence parallelism; else as it is."""
        return _Gathered.apply(x, self.line) if self.sequence else _SameOnAll.apply(x, self.line)


class Leave(nn.Module):
    """After split rows: everyone's summands become one sum."""

    def __init__(self, line: Line, *, sequence: bool) -> None:
        super().__init__()
        self.line, self.sequence = line, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] → [b, s/tp, h] under sequence parallelism; else [b, s, h]."""
        return _Scattered.apply(x, self.line) if self.sequence else _Summed.apply(x, self.line)


class _SameOnAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, line: Line) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.line.sum(gradient), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, line: Line) -> Tensor:  # type: ignore[no-untyped-def]
        return line.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, line: Line) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.line = line
        return line.gather_sequence(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.line.sum_to_share(gradient), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, line: Line) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.line = line
        return line.sum_to_share(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.line.gather_sequence(gradient), None


def _waited(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)
