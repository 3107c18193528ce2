"""The run directory that a command is given."""

from __future__ import annotations

from pathlib import Path

from bloomery.errors import TrainingFailed
from bloomery.events.run_directory import RunDirectory


def existing_run(path: str | Path) -> RunDirectory:
    """Return the run directory at a path. Raises TrainingFailed where no run was started there."""
    rundir = RunDirectory(Path(path))
    if not rundir.exists() and not rundir.operations.exists():
        problem = "is no run directory" if rundir.path.exists() else "does not exist"
        raise TrainingFailed(
            f"{rundir.path} {problem}.",
            remedy="Give the directory that `bloomery train` names, runs/NAME without --run.",
        )
    return rundir
