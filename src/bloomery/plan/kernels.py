"""How long single operations take on a machine: products by shape, passes over memory, collectives.

A product reaches `matmul_efficiency` of the peak when it is large, and loses half of that for each side as
short as `matmul_half_size` (tiles that are not filled, waves that do not cover the chip); it never beats
the memory it reads, nor the time a kernel takes to start (the roofline of Williams et al., 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.plan.hardware import Hardware

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Of one value that flows between operations; fp8 is of the products alone."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds by what bounds them. Adds and scales."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    tensor_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        """Both, one after the other."""
        return Spent(
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
            tensor_s=self.tensor_s + other.tensor_s,
        )

    def __mul__(self, times: float) -> Spent:
        """So many times."""
        return Spent(
            compute_s=self.compute_s * times, memory_s=self.memory_s * times, tensor_s=self.tensor_s * times
        )

    @property
    def total_s(self) -> float:
        """All of it, nothing overlapped."""
        return self.compute_s + self.memory_s + self.tensor_s


def matmul_s(
    hardware: Hardware, precision: str, *, rows: float, columns: float, inner: float, count: float = 1.0
) -> float:
    """Seconds of `count` products [rows, inner] × [inner, columns] in one kernel."""
    one = hardware.accelerator
    half = one.matmul_half_size
    shape = rows / (rows + half) * columns / (columns + half) * inner / (inner + half)
    peak = hardware.peak_flops(precision) or hardware.peak_flops("bf16") or hardware.peak_flops("fp16")
    if not peak:
        peak = hardware.peak_flops("fp32")
    width = BYTES.get(precision, 2)
    share = one.fp8_efficiency if precision == "fp8" else one.matmul_efficiency
    moved = count * width * (rows * inner + inner * columns + rows * columns)
    arithmetic = 2 * count * rows * columns * inner / (peak * share * shape)
    return max(arithmetic, moved / hardware.memory_bytes_per_s) + one.kernel_us * 1e-6


def moving_s(hardware: Hardware, moved_bytes: float, *, kernels: int = 1) -> float:
    """Seconds of elementwise work that reads and writes so many bytes."""
    return moved_bytes / hardware.memory_bytes_per_s + kernels * hardware.accelerator.kernel_us * 1e-6


def ring_bytes(size: float, ranks: int, *, passes: int) -> float:
    """What each rank sends to reduce-scatter or all-gather `size` bytes (1), or all-reduce them (2)."""
    return passes * (ranks - 1) / ranks * size


def ring_s(hardware: Hardware, size: float, ranks: int, *, passes: int, per_node: int, sharing: int) -> float:
    """Seconds of a ring collective over `ranks`, of them `per_node` on each machine.

    sharing: groups that use one machine's network at the same time. Inside a machine each accelerator has
    its own link.
    """
    if ranks <= 1:
        return 0.0
    sent = ring_bytes(size, ranks, passes=passes)
    inside = sent / hardware.link_bytes_per_s if per_node > 1 and hardware.link_bytes_per_s else 0.0
    hops = passes * (ranks - 1)
    if ranks <= per_node:
        return inside + hops * hardware.node.link_us * 1e-6
    return (
        max(inside, sent * sharing / between_bytes_per_s(hardware))
        + hops * hardware.network.latency_us * 1e-6
    )


def between_bytes_per_s(hardware: Hardware) -> float:
    """What one machine sends to others; where the file knows no network, what its links reach."""
    return hardware.network_bytes_per_s or hardware.link_bytes_per_s or 1e9
