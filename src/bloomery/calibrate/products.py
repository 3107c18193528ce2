"""Matrix products and attention of this machine: the peak, and what short sides cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from bloomery.calibrate.stopwatch import best_s
from bloomery.model.kernels import attends, causal_attention, has_units

LARGE = {"cpu": 1536, "cuda": 8192}
WIDTHS = {"cpu": (64, 96, 160, 256, 512), "cuda": (512, 1024, 2048, 4096)}
ROWS = 2048
HALF_SIZES = [0.0, *(2.0 ** (exponent / 4) for exponent in range(0, 37))]


@dataclass(frozen=True, kw_only=True)
class Product:
    """One measured product [rows, inner] × [inner, columns]."""

    rows: int
    columns: int
    inner: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What fused attention adds to products: its share of the peak, and nanoseconds for each weight."""

    efficiency: float
    pass_ns: float


def measure_products(device: torch.device, dtype: torch.dtype) -> list[Product]:
    """FLOP/s of a large square product and of those that narrow models make, forward and for gradients."""
    side = LARGE[device.type]
    shapes = [(side, side, side)]
    for width in WIDTHS[device.type]:
        shapes += [(ROWS, width, width), (ROWS, 3 * width, width), (3 * width, width, ROWS)]
    found = []
    for rows, columns, inner in shapes:
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(columns, inner, device=device).to(dtype)
        seconds = best_s(partial(F.linear, left, right), device)
        flops = 2 * rows * columns * inner / seconds
        found.append(Product(rows=rows, columns=columns, inner=inner, flops=flops))
    return found


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the large square product alone."""
    side = LARGE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / best_s(partial(F.linear, left, right), device)


def fit_half_size(products: Sequence[Product], peak_flops: float) -> tuple[float, float]:
    """(efficiency, half size) with which the plan's formula comes nearest to the products, in ratio."""

    def shares(half: float) -> list[float]:
        return [math.prod(side / (side + half) for side in (p.rows, p.columns, p.inner)) for p in products]

    best = (math.inf, 1.0, 0.0)
    for half in HALF_SIZES:
        logs = [
            math.log(product.flops / (peak_flops * share))
            for product, share in zip(products, shares(half), strict=True)
        ]
        mean = min(0.0, sum(logs) / len(logs))
        error = sum((one - mean) ** 2 for one in logs)
        if error < best[0]:
            best = (error, math.exp(mean), half)
    return best[1], best[2]


def measure_attention(device: torch.device, dtype: torch.dtype, peak_flops: float) -> Attention:
    """Fit both figures to causal attention, forward and backward, of two head widths."""
    rows = []
    for batch, heads, length, width in ((4, 2, 512, 80), (8, 4, 256, 24), (8, 6, 128, 16), (2, 4, 512, 64)):
        qkv = torch.randn(batch, length, 3 * heads, width, device=device).to(dtype).requires_grad_()

        def both(qkv: torch.Tensor = qkv, heads: int = heads) -> None:
            if has_units() and attends(qkv):
                mixed = causal_attention(qkv, heads=heads, rotary=None)
            else:
                query, key, value = (part.transpose(1, 2) for part in qkv.split(heads, dim=2))
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed.sum().backward()

        weights = batch * heads * length * length
        # The plan counts 1 + 2.5 times the causal half's products, and three passes over its weights.
        rows.append((3.5 * 2 * weights * width / peak_flops, 3 * weights / 2 * 1e-9, best_s(both, device)))
    inverse, pass_ns = _least_squares(rows)
    return Attention(efficiency=min(1.0, 1 / inverse), pass_ns=pass_ns)


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) ≥ (1, 0) with a·x + b·y nearest to z, each row in ratio to its z."""
    best = (math.inf, 1.0, 0.0)
    for step in range(400):
        a = 1.0 + step * 0.05
        left = [(y / z, 1 - a * x / z) for x, y, z in rows]
        b = max(0.0, sum(y * rest for y, rest in left) / sum(y * y for y, _ in left))
        error = sum((b * y - rest) ** 2 for y, rest in left)
        if error < best[0]:
            best = (error, a, b)
    return best[1], best[2]
