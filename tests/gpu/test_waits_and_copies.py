"""A step waits for the GPU once, and initial values reach it with the CPU's bits: skipped without a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.small_run import train_small

from bloomery.config.model import ModelSection
from bloomery.model.attention_choice import MEASURED, AttentionSizes, device_time_s, measure
from bloomery.model.initial_filling import InitialBox, fill_initial
from bloomery.model.shape import resolve
from bloomery.train import loop
from bloomery.train.metrics import Metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no accelerator"),
]
WARM_UP = 2
"""Steps in which torch compiles, chooses algorithms and asks for memory."""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim.name": "muon", "optim.clip_method": "tensor"},
        {"model.position": "alibi", "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1},
        {"data.mask_documents": True, "train.precision": "fp8"},
    ],
    ids=["llama", "Muon, by tensor", "BLOOM", "documents, FP8"],
)
def test_a_step_waits_for_the_gpu_once_in_its_report(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step, real_report = loop.train_step, Metrics.report
    waits: list[list[str]] = []

    def train_step(parts: Any, micro_batches: Any, state: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error" if state.step >= WARM_UP else "default")
        try:
            return real_step(parts, micro_batches, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def report(self: Metrics, *told: Any) -> Any:
        with warnings.catch_warnings(record=True) as told_of:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return real_report(self, *told)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append([str(one.message) for one in told_of if "synchroniz" in str(one.message)])

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(Metrics, "report", report)
    run = {
        "train.steps": 8,
        "train.compile": "off",
        "evaluate.every_steps": 0,
        "checkpoint.every_steps": 0,
        "guard.growth_steps": 2,
    }
    train_small(tmp_path / "run", run | settings)
    assert [len(told) for told in waits[WARM_UP:]] == [1] * (8 - WARM_UP), waits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_on_the_gpu_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    section = ModelSection(layers=8, hidden=96, heads=4)
    model, shape = resolve(section, vocabulary=1000, sequence_length=32), (1000, 1500)

    def filled(device: str, threads: int) -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype, device=device)
        columns = torch.empty(shape[0], 400, dtype=dtype, device=device)
        boxes = [
            InitialBox(tensor=whole, name="head.weight", global_shape=shape, offset=(0, 0)),
            InitialBox(tensor=columns, name="blocks.1.mlp.up.weight", global_shape=shape, offset=(0, 700)),
        ]
        fill_initial(boxes, model=model, seed=3, threads=threads)
        return torch.cat([whole, columns], dim=1).cpu()

    assert torch.equal(filled("cuda", 4), filled("cpu", 1))


def test_some_of_the_fused_kernels_of_attention_run_and_are_timed() -> None:
    sizes = AttentionSizes(samples=2, heads=8, kv_heads=8, length=512, width=64, dtype=torch.bfloat16)
    seconds, refusals = measure(MEASURED, sizes, torch.device("cuda"), time_s=device_time_s)
    assert set(seconds) | set(refusals) == set(MEASURED)
    assert {"flash", "efficient"} <= set(seconds), refusals
    assert all(0.0 < took < 0.1 for took in seconds.values()), seconds
