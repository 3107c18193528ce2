"""Diagnostics of one rank: its heartbeat, its stacks upon SIGUSR2, and its memory when that ran out.

Beside what a device's memory held stands what was planned for it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from bloomery import durable, torch_private
from bloomery.config.load import LoadedRecipe
from bloomery.errors import TrainingFailed, storage_error
from bloomery.events.heartbeat import Heartbeat
from bloomery.events.records import ProgressCallback
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.rank_zero_task import ReportProgress
from bloomery.plan.hardware import GIB
from bloomery.plan.memory import StageMemory
from bloomery.plan.recomputation import memory_of, resolved
from bloomery.train.recomputation import workload_of_rank

log = logging.getLogger(__name__)


@contextmanager
def explaining_out_of_memory(
    loaded: LoadedRecipe, rundir: RunDirectory, mesh: Mesh, *, vocabulary: int
) -> Iterator[None]:
    """Raise TrainingFailed where a device has no memory left, after writing down what the memory held.

    The file `memory/out-of-memory-RANK.json` of the run has the planned bytes by part, and the allocator's
    figures; on a GPU `memory/out-of-memory-RANK.pickle` beside it lists all that was allocated, for
    https://pytorch.org/memory_viz.
    """
    try:
        yield
    except RuntimeError as error:
        kind = _memory_that_ran_out(error)
        if not kind:
            raise
        used = torch.cuda.memory_stats(mesh.device) if mesh.device.type == "cuda" else {}
        path = rundir.memory / f"out-of-memory-{mesh.rank}.json"
        planned, figures = None, ""
        try:
            planned = planned_memory(loaded, mesh, vocabulary=vocabulary)
            _write(path, error, planned, used, mesh)
            figures = f" All figures, and where it happened: {path}."
        except Exception:
            # Whatever goes wrong here, such as a full disk, must not hide the error that is explained.
            log.exception("what the memory of rank %d held could not be written to %s", mesh.rank, path)
        told = str(error).partition("\n")[0]
        raise TrainingFailed(
            f"rank {mesh.rank} on {host_name()} has no {kind} memory left: {told} "
            f"{_comparison(planned, used)}",
            remedy="Lower train.micro_batch, set train.recompute = 'auto', 'mlp' or 'full', or shard more "
            f"(parallel.zero); `bloomery plan` shows each choice's memory.{figures}",
        ) from error


def _memory_that_ran_out(error: RuntimeError) -> str:
    """Return which memory an error says is full; '' for another error. torch has no class for a machine's."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    return "main" if "DefaultCPUAllocator" in str(error) else ""


def _write(path: Path, error: BaseException, planned: StageMemory, used: dict[str, int], mesh: Mesh) -> None:
    record = {
        "rank": mesh.rank,
        "host": host_name(),
        "error": str(error),
        "traceback": traceback.format_exception(error),
        "planned_bytes": asdict(planned) | {"total": planned.total},
        "allocator": used,
    }
    durable.make_directory(path.parent)
    durable.write_whole(path, json.dumps(record, indent=1) + "\n")
    if mesh.device.type == "cuda":
        torch_private.write_memory_snapshot(path.with_suffix(".pickle"))


def planned_memory(loaded: LoadedRecipe, mesh: Mesh, *, vocabulary: int) -> StageMemory:
    """Return what the plan gives a rank of this rank's pipeline stage at its peak.

    vocabulary: the number of rows of the embedding, which the recipe may leave to the tokenizer.
    """
    work = workload_of_rank(loaded, mesh, vocabulary=vocabulary)
    room = work.hardware.accelerator.memory_gib * GIB
    recipe, _ = resolved(loaded.recipe, work, room_bytes=room)
    return memory_of(recipe, work)[mesh.pipeline.index]


def _comparison(planned: StageMemory | None, used: dict[str, int]) -> str:
    told = ""
    if planned is not None:
        parts = sorted(asdict(planned).items(), key=lambda part: -part[1])
        largest = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts[:4])
        told = f"Planned: {planned.total / GIB:.2f} GiB ({largest})."
    if used:
        peak, reserved = used["allocated_bytes.all.peak"], used["reserved_bytes.all.current"]
        told += f" Held at most: {peak / GIB:.2f} GiB; the allocator keeps {reserved / GIB:.2f} GiB."
    return told


def make_heartbeat(rundir: RunDirectory, mesh: Mesh) -> Heartbeat:
    """Return the heartbeat of this rank, to be started once this peer holds the run.

    A second start of the run by mistake therefore leaves the files of the first alone.
    """
    return Heartbeat(
        rundir.heartbeat(rank=mesh.rank),
        rank=mesh.rank,
        world=mesh.world,
        device=str(mesh.device),
        bus=pci_bus_of(torch.cuda.get_device_properties(mesh.device)) if mesh.device.type == "cuda" else "",
        host=host_name(),
        stacks=rundir.stacks(rank=mesh.rank),
        before_first_write=write_stacks_on_signal,
    )


def pci_bus_of(properties: object) -> str:
    """Return the PCI bus of a GPU as the kernel's log names it, "0000:3b:00"; "" if torch lacks it.

    properties: what `torch.cuda.get_device_properties` returns; older torch has no `pci_…` in it.
    """
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(properties, name, None) for name in names)
    if domain is None or bus is None or device is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def write_stacks_on_signal(path: Path) -> None:
    """Make each SIGUSR2 append the stacks of all threads to `path`, until this process ends.

    It needs no lock of the interpreter, so a rank that hangs in native code answers too. Raises StorageError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as error:
        raise storage_error(error, path=path, doing="Opening the file for stacks") from error
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)  # which keeps the file open


def progress_with_ticks(progress: ProgressCallback, *ticks: ReportProgress) -> ProgressCallback:
    """Return `progress` as a function that also calls each of `ticks`, which report that something moves."""

    def progress_and_ticks(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        for tick in ticks:
            tick()
        progress(stage, done, total, unit, note)

    return progress_and_ticks
