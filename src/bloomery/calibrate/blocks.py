"""What a block and a loss take beyond their products: real ones, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import torch

from bloomery.calibrate.stopwatch import best_s
from bloomery.config.model import ModelSection
from bloomery.model.decoder import build
from bloomery.model.loss import next_token_loss
from bloomery.plan.blockcost import Workload, block_passes, head_passes
from bloomery.plan.hardware import Hardware
from bloomery.plan.layout import Layout

VOCABULARY = 512
KERNELS_OF_A_BLOCK = 33
"""That the plan counts, forward and backward: 12 products, 3 of attention, 6 elementwise, twice backward."""

SHAPES = ((96, 4, 256, 4), (160, 2, 512, 4), (256, 4, 512, 2))
"""(hidden, heads, sequence, samples) of the blocks that are measured."""


def measure_kernel_us(device: torch.device, dtype: torch.dtype) -> float:
    """Least time of one operation: a block on so little that nothing else counts."""
    seconds = _block_s(_model(32, 2), samples=1, length=8, device=device, dtype=dtype)
    return seconds / KERNELS_OF_A_BLOCK * 1e6


def measure_elementwise_gb_per_s(hardware: Hardware, precision: str, device: torch.device) -> float:
    """GB/s with which the plan's bytes explain what blocks take beyond products and starts of kernels."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    moved = left = 0.0
    for hidden, heads, length, samples in SHAPES:
        model = _model(hidden, heads)
        measured = _block_s(model, samples=samples, length=length, device=device, dtype=dtype)
        work = _workload(model, hardware, precision, samples=samples, length=length)
        passes = block_passes(work)
        spent = passes.forward + passes.backward
        starts = 18 * hardware.accelerator.kernel_us * 1e-6
        weight = 1 / measured
        moved += weight * (spent.memory_s - starts) * hardware.memory_bytes_per_s
        left += weight * max(measured - spent.compute_s - starts, 0.05 * measured)
    return moved / left / 1e9


def measure_exponential_ns(hardware: Hardware, precision: str, device: torch.device) -> float:
    """Nanoseconds for each logit that the loss takes beyond products and passes over memory."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    found = []
    for tokens, hidden, vocabulary in ((1024, 96, 2048), (2048, 160, 4096)):
        states = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
        head = torch.randn(vocabulary, hidden, device=device).to(dtype).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), device=device)

        def both(
            states: torch.Tensor = states, head: torch.Tensor = head, targets: torch.Tensor = targets
        ) -> None:
            next_token_loss(states, head, targets, chunk=2048).total.backward()

        measured = best_s(both, device)
        work = _workload(_model(hidden, 2), hardware, precision, samples=1, length=tokens)
        passes = head_passes(replace(work, vocabulary=vocabulary))
        spent = (passes.forward + passes.backward).total_s
        found.append(max(0.0, measured - spent) / (tokens * vocabulary) * 1e9)
    return sum(found) / len(found)


def _model(hidden: int, heads: int) -> ModelSection:
    return ModelSection(layers=1, hidden=hidden, heads=heads, ffn=round(2.75 * hidden / 16) * 16)


def _block_s(
    model: ModelSection, *, samples: int, length: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Seconds of one block, forward and backward: what two more blocks add, halved."""
    times = []
    for layers in (1, 3):
        decoder = build(
            replace(model, layers=layers), vocabulary=VOCABULARY, sequence_length=length, device=device
        ).to(dtype)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.normal_(std=0.05)
        tokens = torch.randint(VOCABULARY, (samples, length), device=device)

        def both(decoder: torch.nn.Module = decoder, tokens: torch.Tensor = tokens) -> None:
            decoder(tokens).sum().backward()
            for parameter in decoder.parameters():
                parameter.grad = None

        times.append(best_s(both, device))
    return max((times[1] - times[0]) / 2, 1e-7)


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
