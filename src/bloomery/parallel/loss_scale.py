"""The loss scale of fp16, which keeps small gradients from becoming 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bloomery.checkpoint.format.state import Json, StateEntry, whole


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2).

    The scale doubles after GROWTH_INTERVAL finite steps and halves at an overflow. It is a tensor on the
    device, so that no step waits for the host.
    """

    GROWTH_INTERVAL = 1000
    SMALLEST, FIRST = 1.0, 2.0**16

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(self.FIRST, device=device)
        self.good_steps = torch.tensor(0.0, device=device)

    def reset(self) -> None:
        """Take the scale of a run that begins."""
        self.scale.fill_(self.FIRST)
        self.good_steps.zero_()

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Adapt the scale to whether this step's gradients were finite.

        finite: boolean scalar on the device.
        """
        good_steps = torch.where(finite, self.good_steps + 1, 0.0)
        grow = good_steps >= self.GROWTH_INTERVAL
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.copy_(torch.clamp(self.scale * factor, min=self.SMALLEST))
        self.good_steps.copy_(torch.where(grow, 0.0, good_steps))

    def state_entries(self) -> Iterable[StateEntry]:
        """The scale and the counter of good steps, so that a resume need not search for the scale again."""
        for name, tensor in (("scale", self.scale), ("good_steps", self.good_steps)):
            yield whole(f"loss_scale.{name}", tensor, scope="peer")

    def state_values(self) -> dict[str, Json]:
        """Return no values: the whole state is in tensors."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Do nothing: the whole state is in tensors."""
