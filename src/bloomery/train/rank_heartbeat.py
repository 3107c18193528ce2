"""The heartbeat of this rank, and the stacks of all its threads, which SIGUSR2 makes it write to a file."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

from bloomery.errors import storage_error
from bloomery.events.heartbeat import Heartbeat
from bloomery.events.records import ProgressCallback
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.rank_zero_task import ReportProgress


def make_heartbeat(rundir: RunDirectory, mesh: Mesh) -> Heartbeat:
    """Return the heartbeat of this rank, to be started once this peer holds the run.

    A second start of the run by mistake therefore leaves the files of the first alone.
    """
    return Heartbeat(
        rundir.heartbeat(rank=mesh.rank),
        rank=mesh.rank,
        world=mesh.world,
        device=str(mesh.device),
        host=host_name(),
        stacks=rundir.stacks(rank=mesh.rank),
        before_first_write=write_stacks_on_signal,
    )


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


def ticking(progress: ProgressCallback, *ticks: ReportProgress) -> ProgressCallback:
    """Return `progress` as a function that also calls each of `ticks`, which say that something moves."""

    def progress_and_ticks(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        for tick in ticks:
            tick()
        progress(stage, done, total, unit, note)

    return progress_and_ticks
