"""AdamW on one flat fp32 buffer, fused, refusing non-finite updates on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from bloomery.optim.clip import GradientFacts


class FlatAdamW:
    """Decoupled weight decay (Loshchilov & Hutter, 2019) on a flat master and its flat gradient.

    One tensor instead of hundreds makes the fused kernel a single pass over memory.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
    ) -> None:
        self._parameter = torch.nn.Parameter(master, requires_grad=True)
        self._parameter.grad = gradient
        self.first_moment = torch.zeros_like(master)
        self.second_moment = torch.zeros_like(master)
        # Applied updates, for the bias correction. On the device: a refused update must not count.
        self.updates = torch.zeros((), dtype=torch.float32, device=master.device)
        self._optimizer = torch.optim.AdamW(
            [self._parameter], lr=0.0, betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True
        )
        self._optimizer.state[self._parameter] = {
            "step": self.updates,
            "exp_avg": self.first_moment,
            "exp_avg_sq": self.second_moment,
        }

    def step(self, facts: GradientFacts, *, learning_rate: float) -> None:
        """One update with the gradient times `facts.coefficient`; none where `facts.finite` is false."""
        self._optimizer.param_groups[0]["lr"] = learning_rate
        # The fused kernel divides by grad_scale and leaves everything as it was where found_inf is 1:
        # GradScaler's contract with it (the stubs do not know), and the only gate without a host sync.
        usable = torch.where(facts.finite, facts.coefficient, torch.ones_like(facts.coefficient))
        self._optimizer.grad_scale = usable.reciprocal()  # type: ignore[attr-defined]
        self._optimizer.found_inf = (~facts.finite).float()  # type: ignore[attr-defined]
        self._optimizer.step()

    @property
    def moments(self) -> dict[str, Tensor]:
        """Flat state by its name in checkpoints; each lies like the master."""
        return {"first_moment": self.first_moment, "second_moment": self.second_moment}
