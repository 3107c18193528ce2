"""A device's memory that runs out: what is said of it, and what is written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bloomery.config.load import LoadedRecipe
from bloomery.errors import TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.parallel.mesh import Mesh
from bloomery.plan.hardware import load_hardware
from bloomery.train import loop
from bloomery.train.rank_diagnostics import pci_bus_of, planned_memory
from bloomery.train.settings import StartOptions

_TOLD_BY_TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"


def test_a_memory_that_is_full_is_told_beside_the_plan(
    start: Callable[..., tuple[LoadedRecipe, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_arguments: object) -> None:
        raise torch.OutOfMemoryError(_TOLD_BY_TORCH)

    loaded, path = start("train.micro_batch=4")
    monkeypatch.setattr(loop, "train_step", allocate)
    with pytest.raises(TrainingFailed) as failure:
        loop.train(loaded, RunDirectory(path), StartOptions(say=lambda line: None))

    record = json.loads((path / "memory" / "out-of-memory-0.json").read_text())
    assert record["error"] == _TOLD_BY_TORCH and record["rank"] == 0
    assert any("in allocate" in line for line in record["traceback"])
    planned = record["planned_bytes"]
    assert planned["total"] == sum(size for part, size in planned.items() if part != "total")
    assert planned["activations"] > 0 and planned["master"] + planned["weights"] > 0
    text, remedy = str(failure.value), str(failure.value.remedy)
    assert text.startswith("rank 0 on ") and _TOLD_BY_TORCH in text and "out-of-memory-0.json" in remedy
    assert f"Planned: {planned['total'] / 2**30:.2f} GiB" in text
    end = RankEnd(rank=0, host="node1", status=1, error=text, log=f"bloomery train: {text}\n", step=100)
    assert diagnose(FailureEvidence(ranks=[end], first_step=1)).cause == Cause.GPU_MEMORY


def test_a_disk_that_is_full_too_does_not_hide_what_happened(
    start: Callable[..., tuple[LoadedRecipe, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, path = start("train.micro_batch=4")

    def allocate(*_arguments: object) -> None:
        (path / "memory").write_text("in the way of the directory")
        raise torch.OutOfMemoryError(_TOLD_BY_TORCH)

    monkeypatch.setattr(loop, "train_step", allocate)
    with pytest.raises(TrainingFailed, match=r"CUDA out of memory.*Planned: ") as failure:
        loop.train(loaded, RunDirectory(path), StartOptions(say=lambda line: None))
    assert "out-of-memory-0.json" not in str(failure.value.remedy), "a file that is not there is not named"


def test_the_plan_of_a_rank_is_the_same_on_a_machine_that_nobody_described(
    start: Callable[..., tuple[LoadedRecipe, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = start()
    mesh, plans = Mesh(device=torch.device("cpu")), []
    for machine in (None, load_hardware("h100-80g")):
        monkeypatch.setattr("bloomery.train.recomputation.this_machine", lambda found=machine: found)
        plans.append(planned_memory(loaded, mesh, vocabulary=300))
    assert plans[0] == plans[1] and plans[0].total > 0
    assert planned_memory(loaded, mesh, vocabulary=30_000).total > plans[0].total


def test_the_bus_of_a_gpu_is_written_as_kernels_write_it() -> None:
    told = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC9, pci_device_id=0)
    assert pci_bus_of(told) == "0000:c9:00"
    assert pci_bus_of(SimpleNamespace(uuid="GPU-1")) == ""  # as of torch before it told
