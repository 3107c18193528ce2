"""Gradients of weights on a GPU: their sums in fp32, products that add to a sum themselves, and the head.

sums: the kernel that adds gradients of 16 bits against torch's operators. products: weight gradients of a
block of 8B from 4,096 tokens, rounded and then added, against products that add to the sum (beta = 1).
head: forward and backward of the loss by the number of tokens whose logits exist at one time. `--tiny` shows
on any machine that everything runs; without kernels both sides of a comparison are torch's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from contract import Measurement, measurement, report
from torch import Tensor

from bloomery.model.loss import NextTokenLoss
from bloomery.model.products import add_product
from bloomery.parallel.accumulate import add_gradient

BLOCK_OF_8B = {"qkv": (6144, 4096), "output": (4096, 4096), "expand": (28_672, 4096), "down": (4096, 14_336)}
TOKENS, CHUNKS = 4096, (1024, 2048, 4096)
HEAD = (131_072, 4096)
ROUNDS = 9


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no GPU: --tiny runs on CPUs")
    shrink = 64 if options.tiny else 1
    found = [*sums(device, shrink), *products(device, shrink), *head(device, shrink)]
    return report(found, as_json=options.json)


def sums(device: torch.device, shrink: int) -> Iterator[Measurement]:
    """Bytes a second of the kernel, and its time as a share of torch's."""
    numel = 2**27 // shrink**2
    total, gradient = torch.zeros(numel, device=device), torch.randn(numel, device=device).bfloat16()
    for name, is_first, per_element in (("first", True, 6), ("further", False, 10)):
        by_torch = total.copy_ if is_first else total.add_
        own_s = timed(lambda is_first=is_first: add_gradient(total, gradient, is_first=is_first), device)
        torch_s = timed(lambda by_torch=by_torch: by_torch(gradient), device)
        yield measurement(
            f"sums, {name}",
            per_element * numel / own_s / 1e9,
            unit="GB/s",
            reference=f"torch's {per_element * numel / torch_s / 1e9:.4g} GB/s: {torch_s / own_s:.3g} ×",
        )


def products(device: torch.device, shrink: int) -> Iterator[Measurement]:
    """Time of products that add to the sum, as a share of rounded products and the kernel that adds them."""
    added = separate = 0.0
    for name, (rows, columns) in BLOCK_OF_8B.items():
        slope, x, total = factors(rows // shrink, columns // shrink, TOKENS // shrink, device)
        both_s = timed(lambda s=slope, x=x, t=total: add_gradient(t, s.t() @ x, is_first=False), device)
        alone_s = timed(lambda s=slope, x=x: s.t() @ x, device)
        adds_s = timed(lambda s=slope, x=x, t=total: add_product(t, s.t(), x, is_first=False), device)
        added, separate = added + adds_s, separate + both_s
        yield measurement(
            f"product that adds to the sum, {name}",
            adds_s / both_s,
            unit="of both",
            reference=f"rounded product {alone_s * 1e3:.4g} ms, with its sum {both_s * 1e3:.4g} ms",
        )
    yield measurement(
        "products that add to the sum, a block",
        added / separate,
        unit="of both",
        reference=f"{separate * 1e3:.4g} ms rounded and added, {added * 1e3:.4g} ms in the product",
    )


def head(device: torch.device, shrink: int) -> Iterator[Measurement]:
    """Time and peak memory of the loss's forward and backward, for each size of chunk."""
    rows, width = (size // shrink for size in HEAD)
    weight = (0.02 * torch.randn(rows, width, device=device)).bfloat16().requires_grad_()
    hidden = torch.randn(1, TOKENS // shrink, width, device=device).bfloat16().requires_grad_()
    targets = torch.randint(0, rows, (1, TOKENS // shrink), device=device)
    loss = NextTokenLoss()

    def step(chunk: int) -> None:
        sums = loss(hidden, weight, targets, z_loss=0.0, chunk=chunk, matmul_mode="native")
        (sums.total / targets.numel()).backward()
        weight.grad = hidden.grad = None

    for chunk in CHUNKS:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = timed(lambda chunk=chunk: step(max(1, chunk // shrink)), device)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        operations = 6 * hidden.numel() * rows
        yield measurement(
            f"head, {chunk} tokens at a time",
            seconds * 1e3,
            unit="ms",
            reference=f"{operations / seconds / 1e12:.4g} TFLOP/s, peak {peak:.2f} GiB",
        )


def factors(rows: int, columns: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a layer's output, its input, and the fp32 sum of its weight's gradient."""
    slope, x = (torch.randn(tokens, size, device=device).bfloat16() for size in (rows, columns))
    return slope, x, torch.zeros(rows, columns, device=device)


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the median of some after one that warms up; a GPU's by its own clock."""
    function()
    seconds = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
    return median(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
