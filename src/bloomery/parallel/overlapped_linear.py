"""Asynchronous tensor parallelism: linear layers of a split sequence whose exchange overlaps their product.

In tensor_collectives.py an all_gather ends before the column-parallel product after it begins, and a
reduce_scatter begins after the row-parallel product before it. Here both are one operator of torch that
divides the product by ranks, and exchanges one part while it multiplies another (Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition"). The two operators are each other's backward, as
the collectives are. They need GPUs that map each other's memory.

Legend: b batch, s sequence, tp degree of the group; in and out are channels that this rank holds.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery import torch_private
from bloomery.errors import BloomeryError
from bloomery.model.decoder import Block
from bloomery.model.layers import Linear
from bloomery.parallel.axis import Axis
from bloomery.parallel.tensor_collectives import (
    EnterTensorParallelRegion,
    LeaveTensorParallelRegion,
    TensorGroup,
)


def can_overlap_products(axis: Axis, device: torch.device) -> bool:
    """Return whether the ranks of the tensor axis overlap products: on GPUs, and only with several ranks.

    On CPUs the plain layers compute the same. Collective over the axis.
    Raises BloomeryError where GPUs cannot map each other's memory.
    """
    if axis.group is None or device.type != "cuda":
        return False
    try:
        torch_private.open_symmetric_memory(axis.group.group_name)
    except RuntimeError as refused:
        raise BloomeryError(
            f"parallel.async_tensor needs GPUs of one node that map each other's memory (NVLink, or peer "
            f"access over PCIe), and the {axis.degree} ranks of the tensor axis cannot: {refused}",
            remedy="Set parallel.async_tensor = false: the same model is trained, and exchanges follow "
            "products.",
        ) from refused
    return True


def place_overlapped_layers(block: Block, group: TensorGroup) -> None:
    """Replace the collectives of a block, and the layers beside them, by layers that do both."""
    block.attention.qkv = GatheringLinear(block.attention.qkv, group)
    block.attention.output = ScatteringLinear(block.attention.output, group)
    block.mlp.expand = GatheringLinear(block.mlp.expand, group)
    block.mlp.down = ScatteringLinear(block.mlp.down, group)


class GatheringLinear(Linear):
    """A column-parallel layer that gathers its input's positions while it multiplies.

    Products of other modes than "native" follow the plain all_gather.
    """

    def __init__(self, layer: Linear, group: TensorGroup) -> None:
        """layer: gives its weight and bias, which are shared."""
        nn.Module.__init__(self)
        self.matmul_mode, self.weight, self.bias = layer.matmul_mode, layer.weight, layer.bias
        self.enter, self.group = EnterTensorParallelRegion(group, sequence=True), group

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, s, out] from [b, s/tp, in]. Collective."""
        if self.matmul_mode != "native":
            return super().forward(self.enter(x))
        return self.add_bias(cast(Tensor, _GatherAndMultiply.apply(x, self.weight, self.group)))


class ScatteringLinear(Linear):
    """A row-parallel layer that sums its products over the ranks, and scatters them, while it multiplies.

    Products of other modes than "native" come before the plain reduce_scatter.
    """

    def __init__(self, layer: Linear, group: TensorGroup) -> None:
        """layer: gives its weight and bias, which are shared."""
        nn.Module.__init__(self)
        self.matmul_mode, self.weight, self.bias = layer.matmul_mode, layer.weight, layer.bias
        self.leave, self.group = LeaveTensorParallelRegion(group, sequence=True), group

    def matmul(self, x: Tensor) -> Tensor:
        """Return [b, s/tp, out], without the bias, from [b, s, in]. Collective."""
        if self.matmul_mode != "native":
            return cast(Tensor, self.leave(super().matmul(x)))
        return cast(Tensor, _MultiplyAndScatter.apply(x, self.weight, self.group))


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:  # type: ignore[no-untyped-def]
        gathered, product = torch_private.gather_and_multiply(x, weight.t(), group.group)
        ctx.save_for_backward(gathered, weight)
        ctx.group = group
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        gathered, weight = ctx.saved_tensors
        # The operator stores s outermost; so do both factors of the weight's gradient, which are then views.
        gradient = gradient.transpose(0, 1).contiguous().transpose(0, 1)
        x_gradient = torch_private.multiply_and_scatter(gradient, weight, ctx.group.group)
        return x_gradient, _positions(gradient).t() @ _positions(gathered), None


class _MultiplyAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return torch_private.multiply_and_scatter(x, weight.t(), group.group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        gathered, x_gradient = torch_private.gather_and_multiply(gradient, weight, ctx.group.group)
        return x_gradient, _positions(gathered).t() @ _positions(x), None


def _positions(x: Tensor) -> Tensor:
    """Return the positions of all samples in one order: [b, s, k] → [s · b, k]."""
    return x.transpose(0, 1).flatten(0, 1)
