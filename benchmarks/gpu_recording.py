"""What torch's profiler records of a call, for `gpu.py`: time by part of a step, and memory on a CPU."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers_throughput import Step
from torch.profiler import ProfilerActivity, profile

from bloomery.train.time_by_part import time_by_part

PROFILED_STEPS = 2


def parts_of(step: Step, device: torch.device) -> dict[str, list[float]]:
    """(milliseconds of a step, share) by part of the step; none if a GPU's kernels could not be recorded."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recording:
        for _ in range(PROFILED_STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    trace = _trace_of(recording)
    has_kernels = any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    parts = time_by_part(trace) if has_kernels or device.type == "cpu" else []
    return {one.part: [1e3 * one.seconds / PROFILED_STEPS, one.share] for one in parts}


def peak_bytes_of(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call held of the device at a time, beyond those held before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        call()
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in _trace_of(recording)["traceEvents"]
        if event.get("name") == "[memory]"
    ]
    held = most = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        held += change
        most = max(most, held)
    return most


def _trace_of(recording: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json.gz"
        recording.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        return trace
