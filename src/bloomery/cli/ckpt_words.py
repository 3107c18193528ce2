"""What the parts of `bloomery ckpt` share: what a path means, and sizes in words."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from bloomery.checkpoint.catalogue import checkpoints
from bloomery.checkpoint.manifest import MANIFEST
from bloomery.checkpoint.remote import is_remote, remote_source
from bloomery.checkpoint.source import Source, source_of
from bloomery.errors import CheckpointError
from bloomery.events.rundir import RunDir


def parsed_with_target(
    options: ArgumentParser, arguments: list[str], *, metavar: str, about: str, required: bool
) -> Namespace:
    """Parse the arguments of what writes to a new place: named after the first path, or with `--to`."""
    options.add_argument("target", nargs="?", type=Path, metavar=metavar, help=about)
    options.add_argument("--to", type=Path, metavar=metavar, help=f"the same as {metavar}")
    given = options.parse_intermixed_args(arguments)
    if given.to and given.target:
        options.error(f"two places to write to: {given.target} and {given.to}")
    given.to = given.to or given.target
    if required and given.to is None:
        options.error(f"{metavar} is missing: where to write")
    return given


def one_checkpoint(text: str) -> Source:
    """Return the checkpoint that is meant: itself, or the newest of a run, here or at a URL."""
    if is_remote(text):
        return remote_source(text)
    return source_of(local_checkpoint(Path(text)))


def local_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest of a run."""
    if is_checkpoint(path):
        return path
    directories = all_checkpoints(path)
    if not directories:
        raise CheckpointError(
            f"{path} has no checkpoints yet", remedy="The first is saved as the recipe says."
        )
    return directories[-1]


def all_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run directory, oldest first."""
    return [found.directory for found in checkpoints(run_directory(path))]


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint rather than a run."""
    return (path / MANIFEST).exists() or path.name.startswith("step-")


def run_directory(path: Path) -> RunDir:
    """Return the run at a path. Raises CheckpointError where there is none."""
    rundir = RunDir(path)
    if not rundir.exists() and not rundir.checkpoints.is_dir():
        raise CheckpointError(
            f"{path} is neither a run directory nor a checkpoint",
            remedy="Give the directory of a run (runs/NAME), or one of its checkpoints/step-*.",
        )
    return rundir


def size_words(count: float) -> str:
    """Return a number of bytes with a unit."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
