"""Loads the recipe that a command was given, completed from the directory of `init.from`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bloomery.config.load import LoadedRecipe, load_recipe

if TYPE_CHECKING:
    from bloomery.config.begin_from import DescribedWeights


def load_given(path_or_name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe as `load_recipe`; what it leaves to the weights of `init.from` is read from there.

    Raises ConfigError, and CheckpointError for weights that our decoder does not compute with. torch is
    loaded only to look at a transformers directory's weight files, after all that can be seen without it.
    """
    return load_recipe(path_or_name, overrides, describe=_described)


def settings_from_weights(path_or_name: str, overrides: Sequence[str]) -> list[str]:
    """Return as `section.key=value` what the directory of `init.from` completes the recipe with.

    With these beside the other overrides the recipe loads without that directory. Raises as `load_given`.
    """
    from bloomery.config.convert import settings_of

    loaded = load_given(path_or_name, overrides)
    if not loaded.recipe.init.from_:
        return []
    values = settings_of(loaded.recipe)
    place = loaded.recipe.init.from_
    return [f"{key}={values[key]}" for key, source in loaded.sources.items() if source == place]


def _described(place: str) -> Iterator[DescribedWeights]:
    from bloomery.interchange.described_weights import described_weights  # only for recipes that name some

    return described_weights(place)
