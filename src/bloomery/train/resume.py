"""Holding a start's recipe against the run's: what may change is applied, what may not is refused."""

from __future__ import annotations

from bloomery.config.dump import dump_recipe, toml_value
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.resume import Changes, compare, refuse_fixed
from bloomery.events.heartbeat import write_whole
from bloomery.events.rundir import RunDir


def settle_recipe(loaded: LoadedRecipe, rundir: RunDir) -> Changes:
    """Make `loaded` the run's recipe, and return how it differs from what the run had.

    Raises ConfigError, and changes nothing, where a fixed setting differs. Only the run's holder calls this.
    """
    changes = Changes()
    if rundir.recipe.exists():
        changes = compare(load_recipe(str(rundir.recipe)).recipe, loaded.recipe)
        refuse_fixed(changes, dict(loaded.sources))
    if changes or not rundir.recipe.exists():
        write_whole(rundir.recipe, dump_recipe(loaded.recipe))
        lines = [
            f"{toml_value(key)} = {toml_value(source)}" for key, source in sorted(loaded.sources.items())
        ]
        write_whole(rundir.sources, "\n".join(lines) + "\n")
    return changes
