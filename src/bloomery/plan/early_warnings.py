"""Computes a plan's warnings for `config check` and the start of a training, which ask for no plan."""

from __future__ import annotations

from bloomery.config.load import LoadedRecipe
from bloomery.errors import ConfigError
from bloomery.plan.advice import recipe_advice
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request


def warnings_of(loaded: LoadedRecipe, *, accelerators: int | None = None) -> tuple[str, ...]:
    """Return the warnings of `bloomery plan`: all of it where the recipe names its machine (`run.hardware`).

    accelerators: their number; None for the recipe's own. Where no plan can be made, those are left that need
    no machine: a training may run on what its recipe does not describe.
    """
    recipe = loaded.recipe
    alone = tuple(recipe_advice(recipe, tensor=recipe.parallel.tensor))
    if not recipe.run.hardware:
        return alone
    try:
        hardware = load_hardware(recipe.run.hardware)
    except ConfigError as unknown:
        (mistake, *_) = unknown.mistakes
        return (
            *alone,
            f"run.hardware = {recipe.run.hardware!r}: {mistake.problem}, so no plan is made for it. "
            f"{mistake.remedy}",
        )
    try:
        return make_plan(Request(loaded=loaded, hardware=hardware, accelerators=accelerators)).warnings
    except ConfigError:
        return alone
