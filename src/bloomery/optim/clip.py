"""Computes the global gradient norm and the clipping coefficient, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """What is known of a step's gradients, as 0-d tensors on their device.

    norm: of the gradients before clipping.
    finite: boolean, whether the norm is finite.
    applies: boolean, whether the update is made: the gradients are finite, and no gate refuses them.
    shrink: at most 1, what clipping multiplies gradients with.
    coefficient: what to multiply gradients with: `shrink` without the loss scale; 0 where not finite.
    zeros: the number of gradient elements that are 0.
    """

    norm: Tensor
    finite: Tensor
    applies: Tensor
    shrink: Tensor
    coefficient: Tensor
    zeros: Tensor

    def shrunk_to(self, shrink: Tensor) -> GradientFacts:
        """Return the same facts with another `shrink`, and the coefficient that follows from it."""
        usable = torch.where(self.finite, shrink / self.shrink, torch.ones_like(shrink))
        return replace(self, shrink=shrink, coefficient=self.coefficient * usable)

    def to(self, device: torch.device) -> GradientFacts:
        """Return the facts on another device, which waits for them; the same object if they are there
        already.
        """
        if self.norm.device == device:
            return self
        return GradientFacts(**{part.name: getattr(self, part.name).to(device) for part in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A flat fp32 gradient, or this rank's shard of one, with what this rank has to count of it.

    padding: number of elements that belong to no parameter and are always zero.
    counts: false if another rank counts the same elements.
    """

    gradient: Tensor
    padding: int = 0
    counts: bool = True


def examine(
    gradients: Sequence[Counted],
    *,
    limit: float,
    unscale: Tensor | float,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> GradientFacts:
    """Return the norm over all gradients of the peer, whether it is finite, and the factor for the gradients.

    limit: largest norm; 0 for no limit.
    unscale: the factor by which the loss was multiplied.
    total: sums a small tensor over the ranks among which gradients are split. Each element is counted on
    exactly one rank.
    The coefficient is 1 / unscale / max(1, norm / limit); it is 0 if the norm is not finite.
    """
    device = gradients[0].gradient.device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    zeros = torch.zeros((), dtype=torch.float64, device=device)
    for counted in gradients:
        if counted.counts:
            squares += torch.linalg.vector_norm(counted.gradient).double().square()
            zeros += counted.gradient.numel() - torch.count_nonzero(counted.gradient) - counted.padding
    squares, zeros = total(torch.stack([squares, zeros])).unbind()
    norm = squares.sqrt().float() / unscale
    finite = torch.isfinite(norm)
    shrink = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit > 0 else torch.ones_like(norm)
    coefficient = torch.where(finite, shrink / unscale, torch.zeros_like(norm))
    return GradientFacts(
        norm=norm, finite=finite, applies=finite, shrink=shrink, coefficient=coefficient, zeros=zeros
    )
