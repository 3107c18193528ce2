"""The outer update: Nesterov momentum on pseudo-gradients."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def nesterov_step(
    base: Tensor, momentum: Tensor, pseudo_gradient: Tensor, *, learning_rate: float, decay: float
) -> tuple[Tensor, Tensor]:
    """The base weights and the momentum after an outer step; what is given stays as it is.

    Algorithm 1 of DiLoCo (Douillard et al., 2023, arXiv 2311.08105) with its choice of Nesterov momentum
    (Sutskever et al., 2013) as torch.optim.SGD writes it: m' = μ·m + Δ, θ' = θ − η·(Δ + μ·m'), where Δ is the
    mean of θ − θᵢ over the peers. All fp32 vectors of one length. Each product and each sum is rounded by
    itself: a fused multiply-add would give other bits on another processor, and peers must agree on all.
    """
    momentum = torch.add(torch.mul(momentum, decay), pseudo_gradient)
    ahead = torch.add(torch.mul(momentum, decay), pseudo_gradient)
    return torch.sub(base, torch.mul(ahead, learning_rate)), momentum
