"""Compares the recipe of a start with the run's own: applies what may change, and refuses what may not.

`StartOptions` holds what the command line asks for beside the recipe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from bloomery import durable
from bloomery.config.convert import dump_recipe, toml_value
from bloomery.config.load import LoadedRecipe, load_recipe, parse_recipe
from bloomery.config.recipe import Recipe
from bloomery.config.resume import SettingChanges, compare, refuse_fixed
from bloomery.errors import ConfigError, storage_error
from bloomery.events.journal import read_journal
from bloomery.events.records import ProgressCallback, ignore_progress
from bloomery.events.run_directory import RunDirectory
from bloomery.train.peering import Peering

log = logging.getLogger(__name__)


def changes_of(loaded: LoadedRecipe, rundir: RunDirectory) -> SettingChanges:
    """Return how `loaded` differs from the run's recipe. Raises ConfigError if a fixed setting differs."""
    if not rundir.recipe.exists():
        return SettingChanges()
    kept = _kept_recipe(rundir)
    if kept is None:
        return SettingChanges()
    changes = compare(kept, loaded.recipe)
    refuse_fixed(changes, dict(loaded.sources))
    return changes


def _kept_recipe(rundir: RunDirectory) -> Recipe | None:
    """Return the run's recipe. A damaged one is restored from the journal, or given up if the journal has
    none.

    Only the process that holds the run may call this. None means that it was given up, and the start's own
    recipe takes its place.
    """
    try:
        return load_recipe(str(rundir.recipe)).recipe
    except ConfigError as damage:
        problem = damage.mistakes[0].problem
    journalled = [str(event["recipe"]) for event in read_journal(rundir.journal()) if event.get("recipe")]
    if journalled:
        kept = parse_recipe(journalled[-1], label=f"the last start in {rundir.journal()}").recipe
        try:
            durable.write_whole(rundir.recipe, journalled[-1])
        except OSError as error:
            raise storage_error(error, path=rundir.recipe, doing="Mending the run's recipe") from error
        log.warning("%s was damaged (%s) and is mended from the journal", rundir.recipe, problem)
        return kept
    aside = rundir.recipe.with_name("recipe.damaged.toml")
    durable.replace(rundir.recipe, aside)
    log.warning(
        "the run's own %s is damaged (%s): it is kept as %s, and the recipe of this start takes its place. "
        "Whether what is fixed has changed cannot be told.",
        *(rundir.recipe, problem, aside.name),
    )
    return None


def keep_recipe(loaded: LoadedRecipe, rundir: RunDirectory) -> None:
    """Make `loaded` the run's recipe. Only its holder calls this, once the changes are in the journal.

    So a start that fails or is killed on the way changes nothing, and the next one finds the changes again.
    """
    lines = [f"{toml_value(key)} = {toml_value(source)}" for key, source in sorted(loaded.sources.items())]
    try:
        durable.remove_drafts(rundir.path)
        durable.write_whole(rundir.recipe, dump_recipe(loaded.recipe))
        durable.write_whole(rundir.sources, "\n".join(lines) + "\n")
    except OSError as error:
        raise storage_error(error, path=rundir.recipe, doing="Writing the run's recipe") from error


def _nothing_shown() -> AbstractContextManager[ProgressCallback]:
    return nullcontext(ignore_progress)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Choices of one start. They are not settings: the next start may choose otherwise.

    take_fallback: resume from the newest intact checkpoint if the newest of all is damaged.
    bar: show a progress bar in place of log lines.
    say: prints a line for people.
    data_progress: opens the callback that gets the progress of preparing the data.
    started: `time.perf_counter()` when the command began.
    peering: the connection to a peer's agent, for a run between peers; else None.
    ends_process: whether the process ends with this training.
    """

    say: Callable[[str], None]
    bar: bool = False
    take_fallback: bool = False
    data_progress: Callable[[], AbstractContextManager[ProgressCallback]] = _nothing_shown
    started: float = 0.0
    peering: Peering | None = None
    ends_process: bool = False
