"""Measures a machine's compute: matmuls, attention, elementwise bandwidth, and kernel launches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional as F

from bloomery.config.model import ModelSection
from bloomery.kernels.available import has_triton
from bloomery.model.decoder import build
from bloomery.model.loss import next_token_loss
from bloomery.model.native_kernels import causal_attention, has_amx, supports_attention
from bloomery.parallel.recompute import compiled_function
from bloomery.plan.block_cost import Workload, block_passes, head_passes
from bloomery.plan.hardware import Hardware
from bloomery.plan.layout import Layout

LEAST_REPEATS = 5  # of one measurement
BUDGET_S = 0.4  # for one measurement
ROW_S = 5e-3
"""The shortest work between two events of a GPU, whose clock ticks in half microseconds, in seconds."""


def best_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the quickest of many runs on a device, because other work can only make it
    slower.

    On a CPU with one thread it is processor time, which leaves out waiting for the processor. On a GPU it is
    the device's own clock, over runs that follow each other without the host waiting in between.
    """
    work()
    return _on_gpu_s(work, device) if device.type == "cuda" else _on_cpu_s(work)


def _on_cpu_s(work: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best, runs, deadline = float("inf"), 0, time.perf_counter() + BUDGET_S
    while runs < LEAST_REPEATS or time.perf_counter() < deadline:
        started = clock()
        work()
        best, runs = min(best, clock() - started), runs + 1
    return max(best, 1e-9)


def _on_gpu_s(work: Callable[[], object], device: torch.device) -> float:
    def row_s(runs: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        for _ in range(runs):
            work()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return max(begin.elapsed_time(end) * 1e-3, 1e-9)  # the event reports milliseconds

    torch.cuda.synchronize(device)
    runs = max(1, round(ROW_S / row_s(3) * 3))
    best, rows, deadline = float("inf"), 0, time.perf_counter() + BUDGET_S
    while rows < LEAST_REPEATS or time.perf_counter() < deadline:
        best, rows = min(best, row_s(runs) / runs), rows + 1
    return best


LARGE = {"cpu": 1536, "cuda": 8192}
WIDTHS = {"cpu": (64, 96, 160, 256, 512), "cuda": (2048, 4096, 8192)}
ROWS = {"cpu": 2048, "cuda": 8192}
"""Matmuls of the sizes that models on such devices make: a GPU is not filled by smaller ones."""
ATTENTIONS = {
    "cpu": ((4, 2, 512, 80), (8, 4, 256, 24), (8, 6, 128, 16), (2, 4, 512, 64)),
    "cuda": ((2, 16, 4096, 128), (4, 16, 2048, 128), (4, 32, 2048, 64), (1, 16, 8192, 128)),
}
"""(samples, heads, sequence, head width) of the attention that is measured."""
LOSSES = {"cpu": ((1024, 96, 2048), (2048, 160, 4096)), "cuda": ((8192, 2048, 32_768), (8192, 2048, 65_536))}
"""(tokens, hidden, vocabulary) of the losses that are measured."""
HALF_SIZES = [0.0, *(2.0 ** (exponent / 4) for exponent in range(0, 37))]


@dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """One measured matmul [rows, inner] × [inner, columns]. flops: the FLOP/s that it reached."""

    rows: int
    columns: int
    inner: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """What fused attention adds to matmuls.

    efficiency: the share of the peak that it reaches.
    pass_ns: nanoseconds for each attention weight.
    """

    efficiency: float
    pass_ns: float


def measure_matmuls(device: torch.device, dtype: torch.dtype) -> list[MatmulRate]:
    """Return the FLOP/s of a large square matmul, and of those that narrow models make, forward and for
    gradients.
    """
    side = LARGE[device.type]
    shapes = [(side, side, side)]
    for width in WIDTHS[device.type]:
        rows = ROWS[device.type]
        shapes += [(rows, width, width), (rows, 3 * width, width), (3 * width, width, rows)]
    matmuls = []
    for rows, columns, inner in shapes:
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(columns, inner, device=device).to(dtype)
        seconds = best_s(partial(F.linear, left, right), device)
        flops = 2 * rows * columns * inner / seconds
        matmuls.append(MatmulRate(rows=rows, columns=columns, inner=inner, flops=flops))
    return matmuls


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of only the large square matmul."""
    side = LARGE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / best_s(partial(F.linear, left, right), device)


def fit_half_size(matmuls: Sequence[MatmulRate], peak_flops: float) -> tuple[float, float]:
    """Return the (efficiency, half size) with which the plan's formula comes nearest to the matmuls, as a
    ratio.
    """

    def shares(half: float) -> list[float]:
        return [math.prod(side / (side + half) for side in (p.rows, p.columns, p.inner)) for p in matmuls]

    best = (math.inf, 1.0, 0.0)
    for half in HALF_SIZES:
        logs = [
            math.log(matmul.flops / (peak_flops * share))
            for matmul, share in zip(matmuls, shares(half), strict=True)
        ]
        mean = min(0.0, sum(logs) / len(logs))
        error = sum((log - mean) ** 2 for log in logs)
        if error < best[0]:
            best = (error, math.exp(mean), half)
    return best[1], best[2]


def measure_attention(device: torch.device, dtype: torch.dtype, peak_flops: float) -> AttentionCost:
    """Fit both figures to causal attention, forward and backward, of two head widths."""
    rows = []
    for batch, heads, length, width in ATTENTIONS[device.type]:
        qkv = torch.randn(batch, length, 3 * heads, width, device=device).to(dtype).requires_grad_()

        def forward_and_backward(qkv: torch.Tensor = qkv, heads: int = heads) -> None:
            if has_amx() and supports_attention(qkv):
                mixed = causal_attention(qkv, heads=heads, rotary=None)
            else:
                query, key, value = (part.transpose(1, 2) for part in qkv.split(heads, dim=2))
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed.sum().backward()

        weights = batch * heads * length * length
        # The plan counts 1 + 2.5 times the matmuls of the causal half, and three passes over its weights.
        rows.append(
            (
                3.5 * 2 * weights * width / peak_flops,
                3 * weights / 2 * 1e-9,
                best_s(forward_and_backward, device),
            )
        )
    inverse, pass_ns = _least_squares(rows)
    return AttentionCost(efficiency=min(1.0, 1 / inverse), pass_ns=pass_ns)


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the (a, b) ≥ (1, 0) for which a·x + b·y is nearest to z, each row relative to its z."""
    best = (math.inf, 1.0, 0.0)
    for step in range(400):
        a = 1.0 + step * 0.05
        left = [(y / z, 1 - a * x / z) for x, y, z in rows]
        b = max(0.0, sum(y * rest for y, rest in left) / sum(y * y for y, _ in left))
        error = sum((b * y - rest) ** 2 for y, rest in left)
        if error < best[0]:
            best = (error, a, b)
    return best[1], best[2]


VOCABULARY = 512
KERNELS_OF_A_BLOCK = 33
"""The kernels that the plan counts, forward and backward: 12 matmuls, 3 of attention, 6 elementwise,
twice backward.
"""

SHAPES = {
    "cpu": ((96, 4, 256, 4), (160, 2, 512, 4), (256, 4, 512, 2)),
    "cuda": ((2048, 16, 4096, 2), (4096, 32, 4096, 1)),
}
"""(hidden, heads, sequence, samples) of the blocks that are measured."""


def measure_kernel_us(device: torch.device, dtype: torch.dtype) -> float:
    """Return the least microseconds of one operation.

    On a CPU it comes from a block on so little data that nothing else counts. A GPU works off a queue that
    the host fills ahead of it, so there it is the time between two kernels that do nothing.
    """
    if device.type == "cuda":
        number = torch.zeros(1, device=device)
        return best_s(lambda: number.add_(1.0), device) * 1e6
    seconds = _block_s(_model(32, 2), samples=1, length=8, device=device, dtype=dtype)
    return seconds / KERNELS_OF_A_BLOCK * 1e6


def measure_elementwise_gb_per_s(hardware: Hardware, precision: str, device: torch.device) -> float:
    """Return the GB/s with which the plan's bytes explain what blocks take besides matmuls and starts of
    kernels.
    """
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    moved = left = 0.0
    for hidden, heads, length, samples in SHAPES[device.type]:
        model = _model(hidden, heads)
        work = _workload(model, hardware, precision, samples=samples, length=length)
        passes = block_passes(work)
        spent = passes.forward + passes.backward
        # No block is quicker than its matmuls: a shorter time is noise, and would outweigh all others.
        measured = max(
            _block_s(model, samples=samples, length=length, device=device, dtype=dtype), spent.compute_s
        )
        starts = 18 * hardware.accelerator.kernel_us * 1e-6
        weight = 1 / measured
        moved += weight * (spent.memory_s - starts) * hardware.memory_bytes_per_s
        left += weight * max(measured - spent.compute_s - starts, 0.05 * measured)
    return moved / left / 1e9


def measure_exponential_ns(hardware: Hardware, precision: str, device: torch.device) -> float:
    """Return the nanoseconds for each logit that the loss takes besides matmuls and passes over memory."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    per_logit_ns = []
    for tokens, hidden, vocabulary in LOSSES[device.type]:
        states = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
        head = torch.randn(vocabulary, hidden, device=device).to(dtype).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), device=device)

        def forward_and_backward(
            states: torch.Tensor = states, head: torch.Tensor = head, targets: torch.Tensor = targets
        ) -> None:
            next_token_loss(states, head, targets, chunk=2048).total.backward()

        measured = best_s(forward_and_backward, device)
        work = _workload(_model(hidden, 2), hardware, precision, samples=1, length=tokens)
        passes = head_passes(replace(work, vocabulary=vocabulary))
        spent = (passes.forward + passes.backward).total_s
        per_logit_ns.append(max(0.0, measured - spent) / (tokens * vocabulary) * 1e9)
    return sum(per_logit_ns) / len(per_logit_ns)


def _model(hidden: int, heads: int) -> ModelSection:
    return ModelSection(layers=1, hidden=hidden, heads=heads, ffn=round(2.75 * hidden / 16) * 16)


def _block_s(
    model: ModelSection, *, samples: int, length: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the seconds of one block, forward and backward: what two more blocks add, halved.

    Where other work slowed the shorter run so much that they add nothing, it is a third of the longer one.
    On a GPU blocks are compiled, as those of a training are; they share their code.
    """
    compiles = device.type == "cuda" and has_triton()
    times = []
    for layers in (1, 3):
        decoder = build(
            replace(model, layers=layers), vocabulary=VOCABULARY, sequence_length=length, device=device
        ).to(dtype)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.normal_(std=0.05)
        for block in decoder.blocks:
            if compiles:
                block.__dict__["forward"] = compiled_function(block.forward, device=device)
        tokens = torch.randint(VOCABULARY, (samples, length), device=device)

        def forward_and_backward(decoder: torch.nn.Module = decoder, tokens: torch.Tensor = tokens) -> None:
            decoder(tokens).sum().backward()
            for parameter in decoder.parameters():
                parameter.grad = None

        times.append(best_s(forward_and_backward, device))
    return (times[1] - times[0]) / 2 if times[1] > times[0] else times[1] / 3


def _workload(
    model: ModelSection, hardware: Hardware, precision: str, *, samples: int, length: int
) -> Workload:
    return Workload(
        model=model,
        vocabulary=VOCABULARY,
        sequence_length=length,
        micro_batch=samples,
        precision=precision,
        layout=Layout(per_node=1),
        hardware=hardware,
    )
