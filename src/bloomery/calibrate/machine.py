"""The machine as a hardware file: every figure measured, each saying how."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bloomery.calibrate.blocks import (
    measure_elementwise_gb_per_s,
    measure_exponential_ns,
    measure_kernel_us,
)
from bloomery.calibrate.products import (
    fit_half_size,
    measure_attention,
    measure_peak_flops,
    measure_products,
)
from bloomery.calibrate.surroundings import (
    context_gib,
    disk_gb_per_s,
    link_between_processes,
    memory_gb_per_s,
    memory_gib,
    process_gib,
)
from bloomery.parallel.precision import multiplies_bf16
from bloomery.plan.hardware import Accelerator, Hardware, Network, Node, Operation, Storage

HOW = {
    "accelerator.memory_gib": "of the device, or the RAM that this process may use",
    "accelerator.reserved_gib": "a training process with almost no model; of a GPU, context and libraries",
    "accelerator.memory_gb_per_s": "real blocks: what they take beyond products, for the bytes that the "
    "plan counts",
    "accelerator.memory_efficiency": "in the figure before",
    "accelerator.matmul_efficiency": "fitted to products of many shapes",
    "accelerator.matmul_half_size": "fitted to products of many shapes",
    "accelerator.attention_efficiency": "fitted to fused attention, forward and backward",
    "accelerator.attention_pass_ns": "fitted to fused attention, forward and backward",
    "accelerator.exponential_ns": "real losses: what they take beyond products and memory",
    "accelerator.kernel_us": "a block on eight tokens",
    "node.link_gb_per_s": "all-reduce of 32 MiB between two processes: NCCL on two GPUs, else gloo",
    "node.link_us": "all-reduce of one number between two processes",
    "storage.write_gb_per_s": "128 MiB written and flushed",
    "storage.read_gb_per_s": "read again; may come from the page cache",
}


def measure_machine(directory: Path, *, say: Callable[[str], None]) -> Hardware:
    """Measure for about a minute, in the environment of training. directory: of the disk that counts."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    precision = "bf16" if multiplies_bf16(device) else "fp32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    say(f"products in {precision} on {device}, {torch.get_num_threads()} threads")
    products = measure_products(device, dtype)
    peak = max(product.flops for product in products)
    efficiency, half_size = fit_half_size(products, peak)
    say(f"peak {peak / 1e12:.4g} TFLOP/s; attention")
    attention = measure_attention(device, dtype, peak)
    say("memory, disk, links")
    copied = memory_gb_per_s(device)
    written, read = disk_gb_per_s(directory)
    speed, latency = link_between_processes()
    peaks = _peaks_teraflops(device, precision, peak)
    accelerator = Accelerator(
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
            link_gb_per_s=speed,
            link_efficiency=1.0,
            link_us=latency,
        ),
        network=Network(),
        storage=Storage(write_gb_per_s=written, read_gb_per_s=read),
        operation=Operation(step_jitter=0.0, failures_per_1000_accelerator_days=0.0),
        sources=HOW | {f"accelerator.{name}": "the quickest product measured" for name in peaks},
    )
    say("blocks and losses")
    return _with_blocks(hardware, precision, device, dtype)


def _peaks_teraflops(device: torch.device, precision: str, peak_flops: float) -> dict[str, float]:
    """Teraflops by precision: the one of the blocks measured, and on a GPU the others it may train in."""
    found = {f"{precision}_teraflops": peak_flops / 1e12}
    if device.type == "cuda":
        for other, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
            if f"{other}_teraflops" not in found and (other != "bf16" or multiplies_bf16(device)):
                found[f"{other}_teraflops"] = measure_peak_flops(device, dtype) / 1e12
    return found


def _with_blocks(hardware: Hardware, precision: str, device: torch.device, dtype: torch.dtype) -> Hardware:
    """With what blocks and losses take beyond their products; each figure stands on those before it."""

    def known(**figures: float) -> Hardware:
        return replace(hardware, accelerator=replace(hardware.accelerator, **figures))

    hardware = known(kernel_us=measure_kernel_us(device, dtype))
    hardware = known(memory_gb_per_s=measure_elementwise_gb_per_s(hardware, precision, device))
    return known(exponential_ns=measure_exponential_ns(hardware, precision, device))
