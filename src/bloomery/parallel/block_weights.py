"""Gathers the weights of a block around its forward and its backward, and frees them after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from torch import Tensor, nn

from bloomery.parallel.flat import FlatGroup


def gather_around_blocks(module: nn.Module, groups: Sequence[FlatGroup], *, ahead: int) -> None:
    """Hook the blocks of `module` so that their weights are gathered in time, and freed after each use.

    groups: of the whole module. Those that belong to no block are gathered once for the whole step.
    ahead: the number of blocks whose weights are gathered while the blocks before them are computed, so that
        at most 1 + `ahead` blocks have weights. None is gathered across a block that another rank computes:
        what this rank computes after that is known to the pipeline's schedule alone.
    """
    of_block: dict[str, list[FlatGroup]] = {}
    for group in groups:
        of_block.setdefault(group.layout.bucket, []).append(group)
    of_block.pop("", None)
    for name, block in module.named_modules():
        if name in of_block:
            gather_around(
                block,
                of_block[name],
                before=_neighbours(of_block, name, steps=range(-1, -1 - ahead, -1)),
                after=_neighbours(of_block, name, steps=range(1, 1 + ahead)),
            )


def _neighbours(of_block: Mapping[str, Sequence[FlatGroup]], name: str, *, steps: range) -> list[FlatGroup]:
    """Return the groups of the blocks at these distances, up to the first block that another rank has."""
    kind, _, index = name.rpartition(".")
    names = (f"{kind}.{int(index) + step}" for step in steps)
    return [group for neighbour in takewhile(of_block.__contains__, names) for group in of_block[neighbour]]


def gather_around(
    block: nn.Module,
    groups: Sequence[FlatGroup],
    *,
    before: Sequence[FlatGroup] = (),
    after: Sequence[FlatGroup] = (),
) -> None:
    """Hook a block so that its weights are gathered for its forward and its backward, and freed after each.

    groups: those with the block's parameters. before, after: those of the blocks before and after it, which a
    backward or a forward needs next, the nearest first: they are gathered while this block is computed. A
    forward or backward is then collective over the shard axis.
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
