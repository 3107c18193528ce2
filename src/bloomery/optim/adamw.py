"""AdamW on one flat fp32 buffer, fused; on the device it skips updates whose gradient is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from bloomery import torch_private
from bloomery.optim.clip import GradientFacts


class FlatAdamW:
    """Applies AdamW with decoupled weight decay (Loshchilov & Hutter, 2019) to a flat master and its flat
    gradient.

    One tensor instead of hundreds makes the fused kernel a single pass over memory. The kernel is called
    without torch.optim.AdamW, because that imports the compiler, which takes a third of the start of a run
    that is not compiled.
    updates: fp32 scalar on the device, the number of this update for the bias correction. The caller counts,
    because buffers of one rule share it.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        updates: Tensor,
    ) -> None:
        self._master, self._gradient = master, gradient
        self._betas, self._epsilon, self._weight_decay = betas, epsilon, weight_decay
        self.first_moment = torch.zeros_like(master)
        self.second_moment = torch.zeros_like(master)
        self._updates = updates

    @torch.no_grad()
    def step(self, facts: GradientFacts, *, learning_rate: float) -> None:
        """Make one update with the gradient times `facts.coefficient`; make none if `facts.applies` is
        false.
        """
        # The fused kernel divides by grad_scale and leaves everything as it was where found_inf is 1:
        # GradScaler's contract with it, and the only gate without a host sync.
        usable = torch.where(facts.applies, facts.coefficient, torch.ones_like(facts.coefficient))
        torch_private.fused_adamw(
            self._master,
            self._gradient,
            (self.first_moment, self.second_moment),
            self._updates,
            learning_rate=learning_rate,
            betas=self._betas,
            weight_decay=self._weight_decay,
            epsilon=self._epsilon,
            gradient_divisor=usable.reciprocal(),
            is_refused=(~facts.applies).float(),
        )

    @property
    def moments(self) -> dict[str, Tensor]:
        """The flat state by its name in checkpoints; each tensor is laid out like the master."""
        return {"first_moment": self.first_moment, "second_moment": self.second_moment}
