"""The global gradient norm, and the factor that brings it below the limit, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """0-d tensors on the gradients' device. `norm` is before clipping."""

    norm: Tensor
    finite: Tensor
    coefficient: Tensor
    zeros: Tensor


def examine(
    gradients: Sequence[Tensor], *, limit: float, unscale: Tensor | float, padding: int
) -> GradientFacts:
    """Norm over all flat fp32 gradients, whether it is finite, and what to multiply gradients with.

    limit: largest norm, 0 for none. unscale: what the loss was multiplied with. padding: elements of the
    buffers that belong to no parameter (always zero), not counted in `zeros`.
    The coefficient is 1 / unscale / max(1, norm / limit); it is 0 where the norm is not finite.
    """
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    norm = torch.linalg.vector_norm(norms) / unscale
    finite = torch.isfinite(norm)
    shrink = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit > 0 else torch.ones_like(norm)
    coefficient = torch.where(finite, shrink / unscale, torch.zeros_like(norm))
    zeros = torch.stack([gradient.numel() - torch.count_nonzero(gradient) for gradient in gradients]).sum()
    return GradientFacts(norm=norm, finite=finite, coefficient=coefficient, zeros=zeros - padding)
