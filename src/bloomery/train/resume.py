"""Holding a start's recipe against the run's: what may change is applied, what may not is refused."""

from __future__ import annotations

from bloomery.config.dump import dump_recipe, toml_value
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.resume import Changes, compare, refuse_fixed
from bloomery.events.heartbeat import write_whole
from bloomery.events.rundir import RunDir


def changes_of(loaded: LoadedRecipe, rundir: RunDir) -> Changes:
    """How `loaded` differs from what the run has had. Raises ConfigError where a fixed setting differs."""
    if not rundir.recipe.exists():
        return Changes()
    changes = compare(load_recipe(str(rundir.recipe)).recipe, loaded.recipe)
    refuse_fixed(changes, dict(loaded.sources))
    return changes


def keep_recipe(loaded: LoadedRecipe, rundir: RunDir) -> None:
    """Make `loaded` the run's recipe. Only its holder calls this, once the changes are in the journal.

    So a start that fails or is killed on the way changes nothing, and the next one finds the changes again.
    """
    write_whole(rundir.recipe, dump_recipe(loaded.recipe))
    lines = [f"{toml_value(key)} = {toml_value(source)}" for key, source in sorted(loaded.sources.items())]
    write_whole(rundir.sources, "\n".join(lines) + "\n")
