"""The MLP of a block: SwiGLU, or one of the two GELUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.model.linear import Linear
from bloomery.model.resolve import ResolvedModel


class MLP(nn.Module):
    """hidden → ffn → hidden. With SwiGLU, gate and up share one stored matrix, gate's rows first."""

    def __init__(self, model: ResolvedModel, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = model.section.activation
        inner = 2 * model.ffn if self.activation == "swiglu" else model.ffn
        bias = model.section.bias
        self.expand = Linear(inner, model.section.hidden, bias=bias, device=device, dtype=dtype)
        self.down = Linear(model.section.hidden, model.ffn, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] → [b, s, h], the output's bias not yet added (see `Linear.product`)."""
        return self.down.product(self._activate(self.expand(x)))

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
