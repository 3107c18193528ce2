"""Measures matmuls and an all-reduce with a node's ranks, so that preflight can compare nodes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bloomery import durable
from bloomery.torch_private import FileStore

_SIZE = {"cpu": 512, "cuda": 8192}
_REDUCED = {"cpu": 1 << 20, "cuda": 1 << 26}
_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What the ranks of a node measured.

    teraflops: of the slowest rank. all_reduce_gb_per_s: bytes of the buffer by the time of an all-reduce;
    None for one rank. is_exact: whether each matmul was equal to the first, to the bit, on every rank.
    products: the number of matmuls that were compared.
    """

    teraflops: float
    all_reduce_gb_per_s: float | None
    is_exact: bool
    products: int


def probe_as_rank(target: Path, *, seconds: float) -> None:
    """Measure as one rank of a node, for about `seconds`; the first rank writes the result to `target`.

    Collective over the ranks of the node, which find each other as those of a training do.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = (
        torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    )
    store = FileStore(os.environ["BLOOMERY_RENDEZVOUS_FILE"], world)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT
    )
    try:
        teraflops, is_exact, products = _products(device, seconds=seconds)
        gb_per_s = _all_reduce(device) if world > 1 else None
        worst = torch.tensor([teraflops, float(is_exact)], device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MIN)
        if rank == 0:
            slowest, all_exact = worst.tolist()
            result = ProbeResult(
                teraflops=slowest,
                all_reduce_gb_per_s=gb_per_s,
                is_exact=all_exact > 0.5,
                products=products,
            )
            durable.write_whole(target, json.dumps(asdict(result)) + "\n")
    finally:
        dist.destroy_process_group()


def _products(device: torch.device, *, seconds: float) -> tuple[float, bool, int]:
    """Return (TFLOP/s, whether equal matmuls were equal, their number)."""
    size = _SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device="cpu").manual_seed(1)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    first, count, spent_s, is_exact = left @ right, 0, 0.0, True
    begun = time.monotonic()
    while time.monotonic() - begun < seconds or count == 0:
        _wait(device)
        start = time.perf_counter()
        product = left @ right
        _wait(device)
        spent_s += time.perf_counter() - start
        is_exact = is_exact and torch.equal(product, first)
        count += 1
    return 2 * size**3 * count / spent_s / 1e12, is_exact, count


def _all_reduce(device: torch.device) -> float:
    """Return gigabytes of a buffer a second, the best of five. Collective over the ranks of the node."""
    buffer = torch.ones(_REDUCED[device.type], device=device)
    best_s = float("inf")
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        _wait(device)
        best_s = min(best_s, time.perf_counter() - start)
    return buffer.numel() * buffer.element_size() / best_s / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
