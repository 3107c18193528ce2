"""Gathers the weights of a block around its forward and its backward, and frees them after each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from bloomery.parallel.flat import FlatGroup


def gather_around(
    block: nn.Module,
    groups: Sequence[FlatGroup],
    *,
    before: Sequence[FlatGroup] = (),
    after: Sequence[FlatGroup] = (),
) -> None:
    """Hook a block so that its weights are gathered for its forward and its backward, and freed after each.

    groups: those with the block's parameters. before, after: those of the blocks before and after it, which a
    backward or a forward needs next: they are gathered while this block is computed. A forward or backward is
    then collective over the shard axis.
    """

    def gather(following: Sequence[FlatGroup]) -> None:
        for group in groups:
            group.all_gather_weights()
        for group in following:
            group.begin_gathering()

    def before_forward(module: nn.Module, inputs: object) -> None:
        gather(after)

    def before_backward(gradient: Tensor) -> None:
        gather(before)

    def after_forward(module: nn.Module, inputs: object, output: Tensor) -> None:
        for group in groups:
            group.free_weights()
        if output.requires_grad:
            output.register_hook(before_backward)

    block.register_forward_pre_hook(before_forward)
    block.register_forward_hook(after_forward)
