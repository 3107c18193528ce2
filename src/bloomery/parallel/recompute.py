"""Activations that are computed again in backward: of nothing, of attention's inside, or of whole blocks.

Dropout needs no generator state for it, since its masks have addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bloomery.model.decoder import Block, Decoder


def set_recompute(decoder: Decoder, how: Mapping[int, str], *, in_parts: bool) -> None:
    """Keep 'none': everything; 'selective': all but scores and weights of attention; 'full': a block's input.

    how: by the block's index. in_parts: whether backward runs over a graph several times, as schedules do
    that split it. Layouts' hooks on blocks stay outside of what is computed again.
    """
    again = _once if in_parts else _again
    for module in decoder.blocks:
        block = cast(Block, module)
        _restore(block, "forward")
        _restore(block.attention, "attend")
        if how[block.index] == "full":
            block.__dict__["forward"] = again(block.forward)
        elif how[block.index] == "selective":
            block.attention.__dict__["attend"] = again(block.attention.attend)


def _restore(module: nn.Module, method: str) -> None:
    module.__dict__.pop(method, None)


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed_again(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return computed_again


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `_again`, but computed once however often backward comes: torch's checkpoint computes anew in each
    of the passes in which the weights' gradients are made, one for each matrix of a block.
    """

    def computed_once(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments)
        saved = _Saved(function, arguments)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return function(*arguments)

    return computed_once


class _Saved:
    """What the backward of one call needs: made when it is first asked for, and then kept. Only the graph
    holds it, so it goes when the last pass has let go of the graph.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._count = 0
        self._made: list[Tensor] = []

    def pack(self, tensor: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        if not self._made:
            self._make()
        return self._made[number]

    def _make(self) -> None:
        made: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            made.append(tensor.detach())
            return made[-1]

        arguments = [
            one.detach().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one
            for one in self._arguments
        ]
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            self._function(*arguments)
        assert len(made) == self._count, "a block computes the same twice"
        self._made, self._arguments = made, ()
