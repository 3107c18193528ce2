"""What the parts of `bloomery ckpt` share: which checkpoint a path or URL names, and sizes as text."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.format.source import Source, source_of
from bloomery.checkpoint.remote.remote_checkpoint import is_remote, remote_source
from bloomery.errors import CheckpointError
from bloomery.events.run_directory import RunDirectory


def parsed_with_target(
    options: ArgumentParser, arguments: list[str], *, metavar: str, about: str, required: bool
) -> Namespace:
    """Parse arguments whose target is the second positional word or `--to`; it is returned as `to`.

    metavar, about: name and help text of the target.
    required: whether the parser refuses arguments without a target.
    """
    options.add_argument("target", nargs="?", type=Path, metavar=metavar, help=about)
    options.add_argument("--to", type=Path, metavar=metavar, help=f"the same as {metavar}, as an option")
    args = options.parse_intermixed_args(arguments)
    if args.to and args.target:
        options.error(f"two targets to write to: {args.target} and {args.to}")
    args.to = args.to or args.target
    if required and args.to is None:
        options.error(f"{metavar} is missing: {about}")
    return args


def one_checkpoint(text: str) -> Source:
    """Return the checkpoint at a path or URL; where that is a run, its newest checkpoint."""
    if is_remote(text):
        return remote_source(text)
    return source_of(local_checkpoint(Path(text)))


def local_checkpoint(path: Path) -> Path:
    """Return the checkpoint directory at a path; where that is a run, its newest checkpoint."""
    if is_checkpoint(path):
        return path
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
    rundir = RunDirectory(path)
    if not rundir.exists() and not rundir.checkpoints.is_dir():
        raise CheckpointError(
            f"{path} is neither a run directory nor a checkpoint",
            remedy="Give the directory of a run (runs/NAME), or one of its checkpoints/step-*.",
        )
    return rundir


def size_words(count: float) -> str:
    """Return a number of bytes as text with a decimal unit, such as 1.5 GB."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
