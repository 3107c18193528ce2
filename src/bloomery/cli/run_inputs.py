"""Finds what a command reads of a run: its directory, its checkpoints, or the model that one holds."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.checkpoint.format.catalogue import checkpoints, with_its_run
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.format.source import Source, source_of
from bloomery.checkpoint.remote.remote_run import is_remote, remote_source
from bloomery.config.environment import follow_recipe
from bloomery.errors import CheckpointError, TrainingFailed
from bloomery.events.run_directory import RunDirectory

if TYPE_CHECKING:
    from bloomery.evaluate.open_checkpoint import OpenedModel
    from bloomery.model.decoder import Decoder


def one_checkpoint(text: str) -> Source:
    """Return the checkpoint at a path or URL; where that is a run, its newest checkpoint."""
    if is_remote(text):
        return remote_source(text)
    return source_of(local_checkpoint(Path(text)))


def local_checkpoint(path: Path) -> Path:
    """Return the checkpoint directory at a path; where that is a run, its newest checkpoint."""
    if is_checkpoint(path):
        return with_its_run(path)
    directories = all_checkpoints(path)
    if not directories:
        raise CheckpointError(
            f"{path} has no checkpoints yet",
            remedy="The run saves the first one as the recipe's [checkpoint] says.",
        )
    return directories[-1]


def all_checkpoints(path: Path) -> list[Path]:
    """Return the directories of a run's checkpoints, oldest first."""
    return [checkpoint.directory for checkpoint in checkpoints(run_directory(path))]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint rather than a run."""
    return (path / MANIFEST).exists() or path.name.startswith("step-")


def run_directory(path: Path) -> RunDirectory:
    """Return the run directory at a path. Raises CheckpointError where there is none."""
    if (path / MANIFEST).exists():
        run = RunDirectory(with_its_run(path).parent.parent)
        remedy = f"Give its run: {run.path}." if run.exists() else "Give the directory of a run (runs/NAME)."
        raise CheckpointError(f"{path} is a checkpoint, and a run is wanted here", remedy=remedy)
    rundir = RunDirectory(path)
    if not rundir.exists() and not rundir.checkpoints.is_dir():
        raise CheckpointError(
            f"{path} is neither a run directory nor a checkpoint",
            remedy="Give the directory of a run (runs/NAME), or one of its checkpoints/step-*.",
        )
    return rundir


def refuse_existing(target: Path) -> None:
    """Raise CheckpointError where the output path of a command exists already."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already.", remedy="Choose another directory, or remove it.")


DTYPES = ("auto", "fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint, and its weights in a decoder."""

    saved: OpenedModel
    decoder: Decoder


def add_loading(options: ArgumentParser) -> None:
    """Add `--dtype` and `--by-layer`, which `load_saved` takes."""
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of the weights (default: auto, bf16 on a GPU that multiplies it and fp32 elsewhere)",
    )
    options.add_argument(
        "--by-layer",
        action="store_true",
        help="read each layer from the file whenever it computes (also done where memory does not suffice)",
    )


def load_saved(path: Path, *, dtype: str, by_layer: bool, fallback: bool = False) -> LoadedModel:
    """Open a run or checkpoint and load its weights, on the GPU where there is one.

    dtype: one of DTYPES.
    fallback: take the newest intact checkpoint where the newest is damaged.
    by_layer: read each block when it is computed; done, with a message, also where memory is too small.
    """
    from bloomery.evaluate.saved_files import find_saved

    files = find_saved(path, fallback=fallback)
    follow_recipe(offline=files.recipe.run.offline)
    import torch  # after what a person may have got wrong was looked at: it takes seconds

    from bloomery.evaluate.open_checkpoint import must_load_by_block, open_model
    from bloomery.parallel.precision import DTYPES as PRECISIONS
    from bloomery.parallel.precision import resolve_precision

    saved = open_model(files)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto":
        dtype = resolve_precision("auto", device) if device.type == "cuda" else "fp32"
    kind = PRECISIONS[dtype]
    if not by_layer and must_load_by_block(saved.model, device=device, dtype=kind):
        by_layer = True
        print("the model does not fit into memory: layers are read from the file each time", file=sys.stderr)
    return LoadedModel(saved=saved, decoder=saved.decoder(device=device, dtype=kind, by_layer=by_layer))


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
