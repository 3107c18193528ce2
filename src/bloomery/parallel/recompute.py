"""Activations that are computed again in backward: of nothing, of attention's inside, or of whole blocks.

Dropout needs no generator state for it, since its masks have addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.utils.checkpoint import checkpoint

from bloomery.model.decoder import Block, Decoder


def set_recompute(decoder: Decoder, how: str) -> None:
    """Keep 'none': everything; 'selective': all but scores and weights of attention; 'full': a block's input.

    Layouts' hooks on blocks stay outside of what is computed again.
    """
    for module in decoder.blocks:
        block = cast(Block, module)
        _restore(block, "forward")
        _restore(block.attention, "attend")
        if how == "full":
            block.__dict__["forward"] = _again(block.forward)
        elif how == "selective":
            block.attention.__dict__["attend"] = _again(block.attention.attend)


def _restore(module: nn.Module, method: str) -> None:
    module.__dict__.pop(method, None)


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed_again(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return computed_again
