"""Time of recorded steps by part: from a GPU's trace, written out here, and from one recorded on this CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.small import LENGTH, SAMPLES, build, mesh_for, micro_batches
from torch.profiler import ProfilerActivity, profile

from bloomery.train.time_by_part import IDLE, OTHER, PARTS, UPDATE, table_of_parts, time_by_part

Event = dict[str, Any]


def operator(name: str, begin: float, lasts: float, *, thread: int = 1, kind: str = "cpu_op") -> Event:
    return {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, "ts": begin, "dur": lasts}


def kernel(name: str, begin: float, lasts: float, *, launched: float, thread: int = 1) -> list[Event]:
    """A kernel and its launch, each with a number of its own."""
    number = hash((name, begin))
    launch = operator("cudaLaunchKernel", launched, 1, thread=thread, kind="cuda_runtime")
    run = operator(name, begin, lasts, thread=7, kind="kernel") | {"pid": 0}
    return [event | {"args": {"correlation": number}} for event in (launch, run)]


def parts_of(*events: Event) -> dict[str, float]:
    """Microseconds by part."""
    return {one.part: pytest.approx(1e6 * one.seconds) for one in time_by_part({"traceEvents": list(events)})}


def test_a_kernel_belongs_to_the_operator_that_launched_it_and_else_to_its_name() -> None:
    matmul = "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN"
    found = parts_of(
        operator("bloomery::loss_and_gradients", 0, 10),
        *kernel(matmul, 100, 20, launched=2),
        *kernel("_write_slopes", 120, 5, launched=4),
        *kernel(matmul, 125, 30, launched=12),
        *kernel("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", 155, 40, launched=13),
        operator("bloomery::tiled_attention", 14, 3),
        *kernel("_forward", 195, 2, launched=15),
        *kernel("triton_red_fused_mean_pow_rsqrt_0", 197, 3, launched=18),
        *kernel("void at::native::bfloat16_copy_kernel_cuda", 200, 7, launched=19),
        operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 30, thread=2),
        *kernel("void at::native::CUDAFunctor_add<float>", 207, 11, launched=5, thread=2),
    )
    assert found == {
        "loss and head": 25,
        "products": 30,
        "attention": 42,
        OTHER: 3,
        "copies": 7,
        "sums of gradients": 11,
        IDLE: 0,
    }
    assert found.keys() <= set(PARTS)


def test_an_update_is_its_norms_and_its_kernel_but_not_its_copies() -> None:
    found = parts_of(
        operator(UPDATE, 0, 50, kind="user_annotation"),
        *kernel("reduce_kernel<NormTwoOps>", 100, 4, launched=1),
        *kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 104, 6, launched=2),
        *kernel("bfloat16_copy_kernel_cuda", 110, 8, launched=3),
    )
    assert found == {"optimizer": 10, "copies": 8, IDLE: 0}


def test_idle_is_what_no_stream_covers() -> None:
    copy = operator("Memcpy DtoH", 105, 10, thread=8, kind="gpu_memcpy") | {"pid": 0, "args": {}}
    found = parts_of(
        *kernel("nvjet", 100, 10, launched=1),
        copy,
        *kernel("nvjet", 140, 10, launched=2),
        operator("a", 0, 900),
    )
    assert found == {"products": 20, "copies": 10, IDLE: 25}


def test_a_trace_without_events_has_no_parts() -> None:
    assert time_by_part({"traceEvents": [{"ph": "M", "name": "process_name"}]}) == []


def test_operators_of_a_cpu_are_counted_without_those_they_call(tmp_path: Path) -> None:
    model = build("llama", mesh_for(0))
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        model.accumulate(micro_batches(0, index=0, degree=1), 0, weight=1 / (SAMPLES * LENGTH))
        with torch.profiler.record_function(UPDATE):
            model.weights.examine(limit=1.0, unscale=1.0)
    recording.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    parts = {one.part: one for one in time_by_part(trace)}
    assert parts.keys() >= set(PARTS) - {"collectives"}
    assert sum(one.share for one in parts.values()) == pytest.approx(1.0, abs=0.02)
    operators = sum(1 for event in trace["traceEvents"] if event.get("cat") == "cpu_op")
    assert sum(one.calls for one in parts.values()) == operators
    lines = table_of_parts(list(parts.values()), steps=2).splitlines()
    assert len(lines) == 1 + len(parts) and max(map(len, lines)) <= 100
