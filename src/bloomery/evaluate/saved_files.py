"""Finds a run's checkpoint, recipe and tokenizer without torch, so that mistakes show at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.format.catalogue import checkpoints, newest_intact, with_its_run
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.format.suspects import newest_trusted, trusted
from bloomery.config.environment import may_not_use_network
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import find_tokenizer
from bloomery.data.tokenizer_files import JSON_FILE, tokenizer_in
from bloomery.errors import CheckpointError, DataError
from bloomery.events.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class SavedFiles:
    """What a command reads of a run: one checkpoint, and the recipe and the tokenizer's file beside it."""

    checkpoint: Path
    rundir: RunDirectory
    recipe: Recipe
    tokenizer: Path


def find_saved(path: Path, *, fallback: bool = False) -> SavedFiles:
    """Find what lies at `path`: a run directory (its newest checkpoint) or one of its checkpoints.

    fallback: for a run directory, take the newest intact checkpoint. To find it, all bytes of the newest
        ones are read.
    Raises CheckpointError if there is no checkpoint, and DataError if its tokenizer is gone.
    """
    is_checkpoint = (path / MANIFEST).is_file()
    checkpoint = with_its_run(path) if is_checkpoint else _newest_of(path, fallback=fallback)
    rundir = RunDirectory(checkpoint.parent.parent)
    if not rundir.recipe.is_file():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run directory: there is no {rundir.recipe}.",
            remedy="Give a checkpoint where its run left it, RUN/checkpoints/step-….",
        )
    recipe = load_recipe(str(rundir.recipe)).recipe
    tokenizer = tokenizer_in(rundir.data) or _tokenizer_elsewhere(recipe, rundir)
    return SavedFiles(checkpoint=checkpoint, rundir=rundir, recipe=recipe, tokenizer=tokenizer)


def _tokenizer_elsewhere(recipe: Recipe, rundir: RunDirectory) -> Path:
    """Return the tokenizer that the recipe names, for a run that has none of its own."""
    if recipe.data.tokenizer == "train":
        raise DataError(
            f"{rundir.data} no longer holds the tokenizer that this run trained ({JSON_FILE}).",
            remedy=f"Bring {rundir.data / JSON_FILE} back from a backup, or start `bloomery train` with the "
            "run's recipe: it trains the same one again from the same text.",
        )
    is_forbidden = may_not_use_network(offline=recipe.run.offline)
    return find_tokenizer(recipe.data.tokenizer, may_fetch=not is_forbidden)


def _newest_of(path: Path, *, fallback: bool) -> Path:
    rundir = RunDirectory(path)
    if not rundir.exists():
        raise CheckpointError(
            f"{path} is neither a run directory nor a checkpoint.",
            remedy="Give the directory of a run (runs/NAME), or one of its checkpoints/step-….",
        )
    saved = checkpoints(rundir)
    if not saved:
        raise CheckpointError(
            f"{path} has no checkpoints yet.",
            remedy="Let `bloomery train` run on: it saves as the recipe says.",
        )
    newest = newest_trusted(saved)
    if not fallback and newest is not None:
        return newest.directory
    intact = newest_intact(trusted(saved))
    if intact is None:
        raise CheckpointError(
            f"No checkpoint of {path} is intact.",
            remedy="See what is damaged with `bloomery ckpt verify`, and restore one from a backup.",
        )
    return intact.directory
