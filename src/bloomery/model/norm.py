"""Norms: computed in fp32 whatever the working dtype, returned in the working dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    def __init__(self, width: int, *, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] → [..., h]."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight.float()).to(x.dtype)


class LayerNorm(nn.Module):
    """(x − mean) / std · weight + bias over the last dimension."""

    def __init__(self, width: int, *, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] → [..., h]."""
        wide_norm = F.layer_norm(
            x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.epsilon
        )
        return wide_norm.to(x.dtype)


def norm(kind: str, width: int, *, epsilon: float, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The norm that a recipe's `model.norm` names."""
    family = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[kind]
    return family(width, epsilon=epsilon, device=device, dtype=dtype)
