"""The collectives of tensor and sequence parallelism inside the model, with their gradients.

Without sequence parallelism all ranks of a tensor-parallel group hold the same activations between the split
layers; with it each rank holds its part of the positions (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2.2). `EnterTensorParallelRegion` and
`LeaveTensorParallelRegion` are the conjugate operators f and g of Megatron-LM (Shoeybi et al. 2019,
section 3), each the other's backward. They use functional collectives, which torch.compile keeps in a block.

Legend: b batch, s sequence, h hidden, tp degree of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery import torch_private
from bloomery.parallel.axis import Axis


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """A tensor-parallel process group in a form that compiled code can hold, and the collectives over it.

    group: torch's name of the process group.
    index: this rank's index in it.
    degree: the number of its ranks.
    has_fast_reduce_scatter: whether reduce_scatter costs less than all_reduce on its backend.
    """

    group: str
    index: int
    degree: int
    has_fast_reduce_scatter: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the group."""
        return torch_private.wait_for(torch_private.begin_all_reduce(x.contiguous(), "sum", self.group))

    def maximum(self, x: Tensor) -> Tensor:
        """The elementwise maximum of `x` over the group."""
        return torch_private.wait_for(torch_private.begin_all_reduce(x.contiguous(), "max", self.group))

    def all_gather(self, x: Tensor) -> Tensor:
        """[…] of each rank → [tp, …], by index in the group."""
        gathered = torch_private.wait_for(
            torch_private.begin_all_gather(x.contiguous(), self.degree, self.group)
        )
        return gathered.unflatten(0, (self.degree, -1)) if x.dim() else gathered

    def all_gather_sequence(self, x: Tensor) -> Tensor:
        """The positions of all ranks: [b, s/tp, h] → [b, s, h]."""
        parts = self.all_gather(x)  # [tp, b, s/tp, h]
        return parts.transpose(0, 1).flatten(1, 2)

    def reduce_scatter_sequence(self, x: Tensor) -> Tensor:
        """The sum of `x` over the group, at this rank's positions: [b, s, h] → [b, s/tp, h]."""
        if not self.has_fast_reduce_scatter:
            return self.all_reduce(x).chunk(self.degree, dim=1)[self.index].contiguous()
        parts = x.unflatten(1, (self.degree, -1)).transpose(0, 1).contiguous()  # [tp, b, s/tp, h]
        scattered = torch_private.begin_reduce_scatter(parts, self.degree, self.group)
        return torch_private.wait_for(scattered).squeeze(0)


def tensor_group_of(axis: Axis) -> TensorGroup:
    """The process group of an axis that has more than one rank."""
    assert axis.group is not None, "an axis of one rank exchanges nothing"
    return TensorGroup(
        group=axis.group.group_name,
        index=axis.index,
        degree=axis.degree,
        has_fast_reduce_scatter=axis.has_fast_reduce_scatter,
    )


class EnterTensorParallelRegion(nn.Module):
    """Comes before a column-parallel layer: gives every rank the whole input, and sums its gradients.

    It is Megatron-LM's copy_to_tensor_model_parallel_region, and with `sequence` its
    gather_from_sequence_parallel_region.
    """

    def __init__(self, group: TensorGroup, *, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[b, s/tp, h] → [b, s, h] under sequence parallelism; otherwise `x` itself. Collective."""
        if self.sequence:
            return _GatherFromSequenceRegion.apply(x, self.group)
        return _CopyToTensorRegion.apply(x, self.group)


class LeaveTensorParallelRegion(nn.Module):
    """Comes after a row-parallel layer: sums the outputs of all ranks.

    It is Megatron-LM's reduce_from_tensor_model_parallel_region, and with `sequence` its
    reduce_scatter_to_sequence_parallel_region.
    """

    def __init__(self, group: TensorGroup, *, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] → [b, s/tp, h] under sequence parallelism; otherwise [b, s, h]. Collective."""
        if self.sequence:
            return _ReduceScatterToSequenceRegion.apply(x, self.group)
        return _ReduceFromTensorRegion.apply(x, self.group)


class _CopyToTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TensorGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.group.all_reduce(gradient), None


class _ReduceFromTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TensorGroup) -> Tensor:  # type: ignore[no-untyped-def]
        return group.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return gradient, None


class _GatherFromSequenceRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TensorGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return group.all_gather_sequence(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.group.reduce_scatter_sequence(gradient), None


class _ReduceScatterToSequenceRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TensorGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return group.reduce_scatter_sequence(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.group.all_gather_sequence(gradient), None
