"""Refuses before torch is loaded what a start of a training would refuse after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.config.resume import compare, refuse_fixed
from bloomery.data.missing_files import refuse_missing
from bloomery.errors import ConfigError, StorageError
from bloomery.train.trackers import refuse_missing_packages

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe


def refuse_early(loaded: LoadedRecipe, run: Path) -> None:
    """Raise BloomeryError for missing files and packages, and for a directory that the run cannot have.

    run: the run's directory, which need not be there. The start itself checks all of this again, under the
    run's lock.
    """
    refuse_missing_packages(loaded.recipe.log.trackers)
    _refuse_unusable(run)
    _refuse_changes(loaded, run)
    refuse_missing(loaded.recipe.data)


def _refuse_unusable(run: Path) -> None:
    there = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not there.is_dir():
        raise StorageError(
            f"The run directory {run} cannot be made: {there} is a file.",
            remedy="Move it away, or choose another directory.",
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(
            f"The run directory {run} cannot be written: {there} is not yours to write to.",
            remedy="Change its permissions, or choose another directory.",
        )


def _refuse_changes(loaded: LoadedRecipe, run: Path) -> None:
    """Refuse fixed settings that differ from the run's. Only the holder of a run mends a damaged recipe."""
    from bloomery.config.load import load_recipe
    from bloomery.events.run_directory import RunDirectory

    kept = RunDirectory(run).recipe
    if not kept.exists():
        return
    try:
        before = load_recipe(str(kept)).recipe
    except ConfigError:
        return
    refuse_fixed(compare(before, loaded.recipe), dict(loaded.sources))
