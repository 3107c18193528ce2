"""Rounding to E4M3 with shared scales, written out element by element in NumPy for the tests."""

from __future__ import annotations

import math

import numpy as np
import torch

LARGEST = 448.0


def e4m3(value: float) -> float:
    """The nearest number with 4 bits of exponent (bias 7) and 3 of mantissa; ties go to the even one."""
    if value == 0.0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), -6)
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(abs(value) / step) * step, LARGEST), value)


def scale_of(block: np.ndarray, scaling: str) -> np.float32:
    """The scale that the elements of a block share."""
    exact = np.float32(np.abs(block).max()) / np.float32(LARGEST)
    if scaling == "block":
        return np.float32(exact)
    power = np.float32(2.0**-140)
    while power < exact:
        power *= np.float32(2.0)
    return power


def rounded(x: torch.Tensor, scaling: str, *, is_weight: bool = False) -> torch.Tensor:
    """[r, k] rounded along k, in fp64."""
    values = x.detach().float().numpy()
    rows, columns = values.shape
    height, length = {"row": (1, columns), "block": (128 if is_weight else 1, 128), "mx": (1, 32)}[scaling]
    found = np.zeros(values.shape)
    round_all = np.vectorize(e4m3, otypes=[np.float64])
    for row in range(0, rows, height):
        for column in range(0, columns, length):
            place = (slice(row, row + height), slice(column, column + length))
            scale = scale_of(values[place], scaling)
            found[place] = round_all(values[place] / scale) * np.float64(scale)
    return torch.from_numpy(found)
