"""Computes a plan's warnings for `config check` and the start of a training, which ask for no plan."""

from __future__ import annotations

from bloomery.config.load import LoadedRecipe
from bloomery.errors import ConfigError
from bloomery.plan.advice import recipe_advice
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request


def warnings_of(
    loaded: LoadedRecipe, *, accelerators: int | None = None, consumed: int = 0
) -> tuple[str, ...]:
    """Return the warnings of `bloomery plan`: all of it where the recipe names its machine (`run.hardware`).

    accelerators: their number at a start; None for the recipe's own. Where no plan can be made, those are
        left that need no machine. At a start the reason is not told, because a training may run on what its
        recipe does not describe.
    consumed: the samples that the run has used already; see `check_recipe`.
    """
    recipe = loaded.recipe
    alone = tuple(recipe_advice(recipe, tensor=recipe.parallel.tensor))
    if not recipe.run.hardware:
        return alone
    try:
        hardware = load_hardware(recipe.run.hardware)
    except ConfigError as unknown:
        return (*alone, _without_plan(recipe.run.hardware, unknown))
    try:
        request = Request(loaded=loaded, hardware=hardware, accelerators=accelerators, consumed=consumed)
        return make_plan(request).warnings
    except ConfigError as refused:
        return alone if accelerators else (*alone, _without_plan(recipe.run.hardware, refused))


def _without_plan(machine: str, why: ConfigError) -> str:
    """Return what is told where no plan can be made for the recipe's machine."""
    mistake = why.mistakes[0]
    what = "" if mistake.key == "--hardware" else f"{mistake.key} = {mistake.value!r}: "
    return f"run.hardware = {machine!r}: {what}{mistake.problem}, so no plan is made for it. {mistake.remedy}"
