"""What a rank shows of itself: its heartbeat, its stacks, and what a GPU's memory held when it ran out."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.errors import StorageError, TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.plan.memory import StageMemory
from bloomery.train import rank_diagnostics, recomputation
from bloomery.train.rank_diagnostics import (
    explaining_out_of_memory,
    make_heartbeat,
    pci_bus_of,
    planned_memory,
    write_stacks_on_signal,
)

GIB = 1 << 30
PLANNED = StageMemory(**{name: 0.0 for name in StageMemory.__dataclass_fields__} | {"activations": 2.0 * GIB})
USED = {"allocated_bytes.all.peak": 5 * GIB, "reserved_bytes.all.current": 6 * GIB}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_a_full_memory_held_is_written_down_with_the_allocators_figures(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    rundir, mesh = RunDirectory(tmp_path), Mesh(device=torch.device(device), rank=3, world=4)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda of: asked.append(of) or USED)
    monkeypatch.setattr(
        rank_diagnostics, "planned_memory", lambda *told, **more: asked.append((told, more)) or PLANNED
    )
    monkeypatch.setattr(rank_diagnostics.torch_private, "write_memory_snapshot", asked.append)
    told = "CUDA out of memory. Tried to allocate 2.00 GiB."
    with (
        pytest.raises(TrainingFailed) as failed,
        explaining_out_of_memory("loaded", rundir, mesh, vocabulary=9),
    ):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError(f"{told}\nand much more")
    path = rundir.memory / "out-of-memory-3.json"
    is_gpu = device == "cuda"
    held = " Held at most: 5.00 GiB; the allocator keeps 6.00 GiB." if is_gpu else ""
    assert failed.value.message.startswith(
        f"rank 3 on {host_name()} has no device memory left: {told} Planned: 2.00"
    )
    assert failed.value.message.endswith("." + held)
    assert failed.value.remedy.endswith(f"All figures, and where it happened: {path}.")
    plan = (("loaded", mesh), {"vocabulary": 9})
    assert asked == ([mesh.device, plan, path.with_suffix(".pickle")] if is_gpu else [plan])
    record = json.loads(path.read_text())
    assert (record["rank"], record["host"]) == (3, host_name())
    assert record["error"] == f"{told}\nand much more" and record["allocator"] == (USED if is_gpu else {})
    assert record["planned_bytes"]["total"] == record["planned_bytes"]["activations"] == 2.0 * GIB


def test_another_error_is_not_explained_as_one_of_memory(tmp_path: Path) -> None:
    mesh = Mesh(device=torch.device("cpu"))
    with (
        pytest.raises(RuntimeError, match=r"^shapes$"),
        explaining_out_of_memory(None, RunDirectory(tmp_path), mesh, vocabulary=9),
    ):  # type: ignore[arg-type]
        raise RuntimeError("shapes")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_fails_too_is_logged_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*told: Any, **more: Any) -> StageMemory:
        raise ValueError("no such machine")

    monkeypatch.setattr(rank_diagnostics, "planned_memory", fail)
    mesh = Mesh(device=torch.device("cpu"), rank=1, world=2)
    with (
        pytest.raises(TrainingFailed) as failed,
        explaining_out_of_memory(None, RunDirectory(tmp_path), mesh, vocabulary=9),
    ):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "CUDA out of memory" in failed.value.message and "figures" not in failed.value.remedy
    (logged,) = caplog.records
    assert logged.levelno == logging.ERROR and "the memory of rank 1 held" in logged.getMessage()


def test_main_memory_that_is_refused_is_told_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_diagnostics, "planned_memory", lambda *told, **more: PLANNED)
    mesh = Mesh(device=torch.device("cpu"))
    with (
        pytest.raises(TrainingFailed, match=r"has no main memory left: .* Planned: 2.00 GiB") as failed,
        explaining_out_of_memory(None, RunDirectory(tmp_path), mesh, vocabulary=9),
    ):  # type: ignore[arg-type]
        torch.empty(1 << 58)
    assert "Lower train.micro_batch" in failed.value.remedy


def test_the_plan_is_that_of_the_ranks_own_stage_on_as_many_accelerators_as_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    hardware: Any = SimpleNamespace(
        node=SimpleNamespace(accelerators=8), accelerator=SimpleNamespace(memory_gib=2.0)
    )
    monkeypatch.setattr(recomputation, "this_machine", lambda: hardware)
    monkeypatch.setattr(
        recomputation, "layout_of", lambda *told, **more: asked.append((told, more)) or "layout"
    )
    monkeypatch.setattr(recomputation, "base_workload", lambda *told: asked.append(told) or "work")
    work: Any = SimpleNamespace(hardware=hardware)
    monkeypatch.setattr(
        recomputation, "replace", lambda found, **changed: asked.append((found, changed)) or work
    )

    def chosen(recipe: str, of: Any, *, room_bytes: float) -> tuple[str, None]:
        return f"{recipe} with {room_bytes / GIB} GiB", None

    monkeypatch.setattr(rank_diagnostics, "resolved", chosen)
    monkeypatch.setattr(
        rank_diagnostics, "memory_of", lambda *told: asked.append(told) or ("first", "second", "third")
    )
    loaded: Any = SimpleNamespace(recipe="recipe")
    mesh = Mesh(device=torch.device("cpu"), world=24, pipeline=Axis(index=1, ranks=(0, 1, 2)))
    assert planned_memory(loaded, mesh, vocabulary=300) == "second"
    (layout, (request, of_layout), known, memory) = asked
    assert layout == (("recipe",), {"accelerators": 24, "per_node": 8, "vocabulary": 300})
    assert (request.loaded, request.hardware, request.accelerators, of_layout) == (
        loaded,
        hardware,
        24,
        "layout",
    )
    assert known == ("work", {"vocabulary": 300})
    assert memory == ("recipe with 2.0 GiB", work), "with what 'auto' recomputes"


@pytest.mark.parametrize(("device", "bus"), [("cuda:1", "0000:3b:00"), ("cpu", "")])
def test_a_heartbeat_names_the_rank_its_device_and_its_host(
    device: str, bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: asked.append(of) or properties)
    monkeypatch.setattr(rank_diagnostics, "Heartbeat", lambda *told, **more: (told, more))
    rundir, mesh = RunDirectory(tmp_path), Mesh(device=torch.device(device), rank=3, world=4)
    assert make_heartbeat(rundir, mesh) == (
        (rundir.heartbeat(rank=3),),
        {
            "rank": 3,
            "world": 4,
            "device": device,
            "bus": bus,
            "host": host_name(),
            "stacks": rundir.stacks(rank=3),
            "before_first_write": write_stacks_on_signal,
        },
    )
    assert asked == ([mesh.device] if bus else [])


def test_a_signal_writes_the_stacks_of_all_threads_into_the_ranks_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rank-0.txt"
    try:
        write_stacks_on_signal(path)
        os.kill(os.getpid(), signal.SIGUSR2)
        told = path.read_text()
    finally:
        faulthandler.unregister(signal.SIGUSR2)
    assert "Current thread" in told and "test_a_signal_writes_the_stacks" in told


def test_a_file_for_stacks_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("in the way of the directory")
    with pytest.raises(StorageError, match=r"(?i)opening the file for stacks"):
        write_stacks_on_signal(tmp_path / "new" / "rank-0.txt")


@pytest.mark.parametrize("absent", ["pci_domain_id", "pci_bus_id", "pci_device_id"])
def test_a_torch_that_tells_a_part_of_the_pci_bus_alone_leaves_it_unknown(absent: str) -> None:
    whole = {"pci_domain_id": 0, "pci_bus_id": 59, "pci_device_id": 1}
    assert pci_bus_of(SimpleNamespace(**whole)) == "0000:3b:01"
    del whole[absent]
    assert pci_bus_of(SimpleNamespace(**whole)) == ""


def test_a_rank_that_starts_again_writes_its_stacks_anew_where_the_old_ones_are(tmp_path: Path) -> None:
    path, meanwhile = tmp_path / "deep" / "new" / "rank-0.txt", threading.Event()
    other = threading.Thread(target=meanwhile.wait)
    other.start()
    try:
        write_stacks_on_signal(path)
        write_stacks_on_signal(path)
        os.kill(os.getpid(), signal.SIGUSR2)
        told = path.read_text()
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        meanwhile.set()
        other.join()
    assert told.count("Current thread") == 1 and told.count("Thread 0x") >= 1, "of all threads"
