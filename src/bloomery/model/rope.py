"""The frequencies of rotary positions, and their scaling to longer contexts than a model was trained on.

Rotary positions are Su et al. 2021. Scalings: 'linear' is Chen et al. 2023, 'dynamic' is NTK-aware
scaling, 'yarn' is Peng et al. 2023, 'llama3' is Llama 3.1's. The formulas follow transformers'
modeling_rope_utils, so that an imported model computes the same. Legend: d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bloomery.model.shape import RopeScaling


def rotary_frequencies(
    *, head_dim: int, theta: float, scaling: RopeScaling | None, length: int, device: torch.device
) -> Tensor:
    """Return fp32 [d/2]: each channel pair's radians from one position to the next.

    length: the number of positions so far, on which 'dynamic' scaling depends.
    """
    if scaling is not None and scaling.kind == "dynamic" and length > scaling.positions:
        stretch = scaling.factor * length / scaling.positions - (scaling.factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    keeps = (
        _kept_by_llama3(plain, scaling) if scaling.kind == "llama3" else _kept_by_yarn(plain, theta, scaling)
    )
    return plain / scaling.factor * (1 - keeps) + plain * keeps


def _kept_by_llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the share [d/2] of each frequency that is kept: all of it if it turns often in the original
    context.
    """
    rotations = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_rotations, scaling.high_rotations
    return ((rotations - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the share [d/2] of each frequency that is kept: a ramp over the channels between two
    rotations.
    """
    head_dim = 2 * plain.shape[0]

    def channel(rotations: float) -> float:
        length = scaling.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    first = max(math.floor(channel(scaling.high_rotations)), 0)
    last = float(min(math.ceil(channel(scaling.low_rotations)), head_dim - 1))
    if last == first:
        last += 0.001  # as in transformers, to avoid a division by 0
    channels = torch.arange(plain.shape[0], device=plain.device, dtype=torch.float32)
    return 1 - ((channels - first) / (last - first)).clamp(0.0, 1.0)
