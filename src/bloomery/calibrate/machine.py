"""Measures this machine's memory, disk, links and compute, and writes its hardware file.

The figures are bandwidth of memory and disk, memory sizes, and links between two processes.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bloomery import durable
from bloomery.calibrate.compute import (
    best_s,
    fit_half_size,
    measure_attention,
    measure_elementwise_gb_per_s,
    measure_exponential_ns,
    measure_kernel_us,
    measure_matmuls,
    measure_peak_flops,
)
from bloomery.parallel.precision import multiplies_bf16
from bloomery.plan.hardware import Accelerator, Hardware, Network, Node, Operation, Storage
from bloomery.plan.main_memory import main_memory_gib

COPY_BYTES = 256 * 2**20
DISK_BYTES = 128 * 2**20
LINK_BYTES = 32 * 2**20
OVERLAP_SIDE = {"cpu": 512, "cuda": 4096}
OVERLAP_ROUNDS = 9
PATIENCE_S = 300  # for a process that measures
MEMORY_WATCHER = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
sys.stdout.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""
"""A small process stands between, because a child's peak memory begins with what its parent held."""

TINY_MODEL = (
    *("model.layers=1", "model.hidden=256", "model.heads=4", "model.ffn=1024", "model.embedding_init=normal"),
    *("data.tokenizer_vocabulary=300", "data.sequence_length=256", "data.held_out_every=0"),
    *("train.tokens=0", "train.steps=2", "train.compile=off", "schedule.warmup=0", "checkpoint.at_end=false"),
    *("evaluate.every_steps=0", "evaluate.at_end=false", "log.tensorboard=false"),
)
"""A model of a million parameters, some 20 MiB: the BLAS library takes buffers only for matrices of
some size."""


def memory_gb_per_s(device: torch.device) -> float:
    """Return the GB/s of reading and writing a large tensor."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_s(lambda: target.copy_(source), device) / 1e9


def memory_gib(device: torch.device) -> float:
    """Return the memory of the device; on a machine without one, its RAM or what a container may use of
    it.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return main_memory_gib()


def process_gib() -> float:
    """Return the memory of a training process with almost no model, measured by two steps of a real one."""
    with tempfile.TemporaryDirectory(prefix="bloomery-calibrate-") as directory:
        text = Path(directory) / "text.txt"
        text.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        train = [sys.executable, "-m", "bloomery", "train", "demo-small", "--run", f"{directory}/run"]
        done = subprocess.run(
            [sys.executable, "-c", MEMORY_WATCHER, *train, "--plain", f"data.sources={text}", *TINY_MODEL],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
    # Linux counts kibibytes, other systems bytes.
    unit = 1024 if sys.platform == "linux" else 1
    return int(done.stdout) * unit / 2**30


def context_gib(device: torch.device) -> float:
    """Return what a process takes of a GPU besides its tensors: context, kernels and the libraries'
    workspaces.

    The GPU must belong to this process alone, because the memory of other processes cannot be told apart.
    """
    square = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    torch.mm(square, square)  # loads the BLAS library
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device)) / 2**30


def disk_gb_per_s(directory: Path) -> tuple[float, float]:
    """Return the GB/s of (writing and flushing, reading again) a file in `directory`. Reading may use the
    page cache.
    """
    content = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="bloomery-calibrate-") as file:
        started = time.perf_counter()
        for _ in range(DISK_BYTES // len(content)):
            file.write(content)
        file.flush()
        durable.sync_file(file.fileno())
        written = DISK_BYTES / (time.perf_counter() - started) / 1e9
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with Path(file.name).open("rb") as again:
            while again.read(2**20):
                pass
        return written, DISK_BYTES / (time.perf_counter() - started) / 1e9


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What two processes measured of the link between them.

    gb_per_s: what an all-reduce reaches. latency_us: of a small one. overlap: the share of the time of matrix
    matmuls by which an all-reduce beside them ends earlier than after them.
    """

    gb_per_s: float
    latency_us: float
    overlap: float


def link_between_processes() -> MeasuredLink:
    """Measure the link between two processes.

    The processes use the first two GPUs and NCCL if there are two, else gloo over loopback.
    """
    with tempfile.TemporaryDirectory(prefix="bloomery-calibrate-") as directory:
        command = [sys.executable, "-m", "bloomery.calibrate.machine", f"{directory}/meeting"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        other = subprocess.Popen([*command, "1"], env=environment)
        try:
            first = subprocess.run(
                [*command, "0"],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE_S,
            )
            other.wait(timeout=PATIENCE_S)
        finally:
            other.kill()
            other.wait()
        speed, latency, overlap = map(float, first.stdout.split()[-3:])
    return MeasuredLink(gb_per_s=speed, latency_us=latency, overlap=overlap)


def _as_one_of_two(meeting: str, rank: int) -> None:
    on_gpus = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    times = {}
    for size in (LINK_BYTES // 4, 1):
        tensor = torch.ones(size, device=device)
        dist.all_reduce(tensor)
        each = []
        for _ in range(10):
            _wait_for(device)
            started = time.perf_counter()
            dist.all_reduce(tensor)
            _wait_for(device)  # NCCL returns when it has begun
            each.append(time.perf_counter() - started)
        times[size] = min(each)
    overlap = _measured_overlap(device)
    # Each of two ranks sends as many bytes as the tensor has.
    if rank == 0:
        speed, latency_us = LINK_BYTES / times[LINK_BYTES // 4] / 1e9, times[1] / 2 * 1e6
        sys.stdout.write(f"{speed} {latency_us} {overlap}\n")
    dist.destroy_process_group()


def _measured_overlap(device: torch.device) -> float:
    """Return the share of computation beside which an all-reduce goes on. Collective over the two ranks.

    Matmuls are made that take about as long as the all-reduce, alone, and beside it: see `overlap_share`.
    """
    size = OVERLAP_SIDE[device.type]
    left = torch.ones(size, size, device=device)
    reduced = torch.ones(LINK_BYTES // 4, device=device)
    out = torch.empty_like(left)

    def timed(matmuls: int, *, reduces: bool) -> float:
        """Return seconds, the median of some, of the slower rank."""
        each = []
        for _ in range(OVERLAP_ROUNDS):
            dist.barrier()
            _wait_for(device)
            started = time.perf_counter()
            pending = dist.all_reduce(reduced, async_op=True) if reduces else None
            for _ in range(matmuls):
                torch.mm(left, left, out=out)
            if pending is not None:
                pending.wait()
            _wait_for(device)
            each.append(time.perf_counter() - started)
        median = torch.tensor([sorted(each)[len(each) // 2]], device=device)
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
        return float(median)

    timed(1, reduces=True)
    alone_s = timed(0, reduces=True)
    matmuls = max(1, round(alone_s / timed(1, reduces=False)))  # the same number on both ranks
    return overlap_share(
        exchange_s=alone_s,
        compute_s=timed(matmuls, reduces=False),
        both_s=timed(matmuls, reduces=True),
    )


def overlap_share(*, exchange_s: float, compute_s: float, both_s: float) -> float:
    """Return the share of the time that could be hidden which was: 1 where both take as long as the longer.

    0 where they take as long as one after the other, or longer.
    """
    return min(1.0, max(0.0, (exchange_s + compute_s - both_s) / min(exchange_s, compute_s)))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


HOW = {
    "accelerator.memory_gib": "of the device, or the RAM that this process may use",
    "accelerator.reserved_gib": "a training process with almost no model; of a GPU, context and libraries",
    "accelerator.memory_gb_per_s": "real blocks: what they take beyond matmuls, for the bytes that the "
    "plan counts",
    "accelerator.memory_efficiency": "in the figure before",
    "accelerator.matmul_efficiency": "fitted to matmuls of many shapes",
    "accelerator.matmul_half_size": "fitted to matmuls of many shapes",
    "accelerator.attention_efficiency": "fitted to fused attention, forward and backward",
    "accelerator.attention_pass_ns": "fitted to fused attention, forward and backward",
    "accelerator.exponential_ns": "real losses: what they take beyond matmuls and memory",
    "accelerator.kernel_us": "a block on eight tokens",
    "node.link_gb_per_s": "all-reduce of 32 MiB between two processes: NCCL on two GPUs, else gloo",
    "node.link_us": "all-reduce of one number between two processes",
    "node.overlap": "an all-reduce of 32 MiB alone, matmuls alone, and both at once, in two processes",
    "storage.write_gb_per_s": "128 MiB written and flushed",
    "storage.read_gb_per_s": "read again; may come from the page cache",
}


def measure_machine(directory: Path, *, say: Callable[[str], None]) -> Hardware:
    """Measure for about a minute, in the environment of training.

    directory: a directory on the disk that shall be measured.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    precision = "bf16" if multiplies_bf16(device) else "fp32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    say(f"matmuls in {precision} on {device}, {torch.get_num_threads()} threads")
    matmuls = measure_matmuls(device, dtype)
    peak = max(matmul.flops for matmul in matmuls)
    efficiency, half_size = fit_half_size(matmuls, peak)
    say(f"peak {peak / 1e12:.4g} TFLOP/s; attention")
    attention = measure_attention(device, dtype, peak)
    say("memory, disk, links")
    copied = memory_gb_per_s(device)
    written, read = disk_gb_per_s(directory)
    link = link_between_processes()
    peaks = _peaks_teraflops(device, precision, peak)
    accelerator = Accelerator(
        kind=device.type.replace("cuda", "gpu"),
        memory_gib=memory_gib(device),
        reserved_gib=context_gib(device) if device.type == "cuda" else process_gib(),
        memory_gb_per_s=copied,
        memory_efficiency=1.0,
        **peaks,
        matmul_efficiency=efficiency,
        matmul_half_size=half_size,
        attention_efficiency=attention.efficiency,
        attention_pass_ns=attention.pass_ns,
        kernel_us=0.0,
    )
    hardware = Hardware(
        name=platform.node() or "this-machine",
        notes=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}",
        accelerator=accelerator,
        node=Node(
            accelerators=max(1, torch.cuda.device_count()),
            link_gb_per_s=link.gb_per_s,
            link_efficiency=1.0,
            link_us=link.latency_us,
            overlap=link.overlap,
        ),
        network=Network(),
        storage=Storage(write_gb_per_s=written, read_gb_per_s=read),
        operation=Operation(step_jitter=0.0, failures_per_1000_accelerator_days=0.0),
        sources=HOW | {f"accelerator.{name}": "the quickest matmul measured" for name in peaks},
    )
    say("blocks and losses")
    return _with_blocks(hardware, precision, device, dtype)


def _peaks_teraflops(device: torch.device, precision: str, peak_flops: float) -> dict[str, float]:
    """Return teraflops by precision: the measured one of the blocks, and the others it may train in."""
    peaks = {f"{precision}_teraflops": peak_flops / 1e12}
    others = {"fp16": torch.float16, "bf16": torch.bfloat16} if device.type == "cuda" else {}
    for other, dtype in {**others, "fp32": torch.float32}.items():
        if f"{other}_teraflops" not in peaks and (other != "bf16" or multiplies_bf16(device)):
            peaks[f"{other}_teraflops"] = measure_peak_flops(device, dtype) / 1e12
    return peaks


def _with_blocks(hardware: Hardware, precision: str, device: torch.device, dtype: torch.dtype) -> Hardware:
    """Add what blocks and losses take besides their matmuls; each figure builds on those before it."""

    def known(**figures: Any) -> Hardware:
        return replace(hardware, accelerator=replace(hardware.accelerator, **figures))

    hardware = known(kernel_us=measure_kernel_us(device, dtype))
    hardware = known(memory_gb_per_s=measure_elementwise_gb_per_s(hardware, precision, device))
    return known(exponential_ns=measure_exponential_ns(hardware, precision, device))


if __name__ == "__main__":
    _as_one_of_two(sys.argv[1], int(sys.argv[2]))
