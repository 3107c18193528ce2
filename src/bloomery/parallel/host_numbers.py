"""Copies numbers of the host to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(numbers: Sequence[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `numbers` on `device`, [n]. The device copies them when it gets there; the host goes on.

    `torch.tensor(numbers, device=…)` copies from pageable memory, for which the host waits until the device
    has done all that was asked of it before. torch keeps a pinned block until its copy is done.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
