"""Describes the machine that this process is on, as far as the system tells, where a plan names no other.

Nothing is measured; `bloomery calibrate` does that. Figures of processors are peaks by instruction sets.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bloomery.plan.hardware import GIB, Accelerator, Hardware, Node, Operation, Storage, load_hardware

_GPUS = Path("/proc/driver/nvidia/gpus")
_PROCESSOR = Path("/proc/cpuinfo")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_BY_MODEL = (("H200", "h200"), ("H100", "h100-80g"), ("A100", "a100-80g"), ("V100", "v100-32g"))
_USUAL_HZ = 2.5e9
_FLOPS_PER_CYCLE = (("avx512f", 64.0), ("avx2", 32.0), ("avx", 16.0), ("asimd", 16.0))
"""fp32 operations of one core in one cycle, with two units for products that add."""
_BF16_GAIN = (("amx_bf16", 8.0), ("avx512_bf16", 2.0), ("avx512bf16", 2.0), ("bf16", 2.0))
_CORE_GB_PER_S, _SOCKET_GB_PER_S = 12.0, 100.0
_PROCESS_GIB = 0.5


def this_machine(
    *, gpus: Path = _GPUS, processor: Path = _PROCESSOR, memory_limit: Path = _MEMORY_LIMIT
) -> Hardware | None:
    """Return this machine: the shipped file of its GPU, or an estimate from its processor's description.

    The paths are those of Linux. None for GPUs of which no file is shipped.
    """
    models = [_field(file, r"Model:\s*(.+)") for file in sorted(gpus.glob("*/information"))]
    if models:
        name = next((name for word, name in _BY_MODEL if word in models[0]), None)
        return None if name is None else load_hardware(name)
    return _of_processor(processor, memory_limit)


def _of_processor(processor: Path, memory_limit: Path) -> Hardware:
    cores = len(os.sched_getaffinity(0))
    flags = set(_field(processor, r"(?:flags|Features)\s*:\s*(.+)").split())
    megahertz = _field(processor, r"cpu MHz\s*:\s*([\d.]+)")
    clock_hz = float(megahertz) * 1e6 if megahertz else _USUAL_HZ
    per_cycle = next((flops for flag, flops in _FLOPS_PER_CYCLE if flag in flags), 8.0)
    fp32 = cores * clock_hz * per_cycle / 1e12
    gain = next((gain for flag, gain in _BF16_GAIN if flag in flags), 0.0)
    bf16 = fp32 * gain
    return Hardware(
        name=f"this machine ({cores} cores, not measured)",
        notes="Estimated from the processor's description; `bloomery calibrate` measures it.",
        accelerator=Accelerator(
            kind="cpu",
            memory_gib=_memory_gib(memory_limit),
            reserved_gib=_PROCESS_GIB,
            memory_gb_per_s=min(_SOCKET_GB_PER_S, _CORE_GB_PER_S * cores),
            fp32_teraflops=fp32,
            bf16_teraflops=bf16,
            matmul_efficiency=0.5,
            attention_efficiency=0.1,
        ),
        node=Node(accelerators=1),
        storage=Storage(write_gb_per_s=0.5, read_gb_per_s=0.5),
        operation=Operation(step_jitter=0.0, failures_per_1000_accelerator_days=0.0),
    )


def _memory_gib(memory_limit: Path) -> float:
    """Return the RAM, or what a container may use of it, in GiB."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _field(memory_limit, r"^(\d+)")
    return (min(most, int(limit)) if limit else most) / GIB


def _field(path: Path, pattern: str) -> str:
    """Return what the first match in a file captures; '' where there is no file, or no match."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    match = re.search(pattern, text)
    return match[1].strip() if match else ""
