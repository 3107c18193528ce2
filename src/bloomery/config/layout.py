"""Does the model divide among the ranks of `[parallel]`? With the degrees that would."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from bloomery.config.divisors import divisors, some
from bloomery.config.finding import Finding
from bloomery.config.model import ModelSection
from bloomery.config.recipe import Recipe


def layout_mistakes(recipe: Recipe) -> Iterator[Finding]:
    """What of the recipe's layout its model, its samples or its optimizer do not allow."""
    yield from _tensor_mistakes(recipe)
    yield from _sequence_mistakes(recipe)


def _tensor_mistakes(recipe: Recipe) -> Iterator[Finding]:
    tensor, per_node = recipe.parallel.tensor, recipe.parallel.ranks_per_node
    sizes = _split_sizes(recipe.model)
    if any(size % tensor for size in sizes.values()):
        wrong = [f"{size} {what}" for what, size in sizes.items() if size % tensor]
        yield Finding(
            key="parallel.tensor",
            problem=f"does not divide {' and '.join(wrong)}",
            remedy=f"Degrees that divide all that is split: {_fitting(recipe, near=tensor)}.",
        )
    if per_node != "auto" and (tensor > per_node or per_node % tensor):
        yield Finding(
            key="parallel.tensor",
            problem=f"does not divide the {per_node} ranks of a node, and must stay inside one",
            remedy=f"Degrees that do: {_fitting(recipe, near=tensor)}.",
        )
    if tensor > 1 and recipe.optim.name == "muon":
        yield Finding(
            key="optim.name",
            problem=f"Muon needs whole matrices, and parallel.tensor = {tensor} splits them",
            remedy="Set parallel.tensor = 1, or optim.name = 'adamw'.",
        )


def _sequence_mistakes(recipe: Recipe) -> Iterator[Finding]:
    tensor, length = recipe.parallel.tensor, recipe.data.sequence_length
    if not recipe.parallel.sequence:
        return
    if tensor == 1:
        yield Finding(
            key="parallel.sequence",
            problem="splits the sequence over the tensor-parallel ranks, and there is one",
            remedy="Raise parallel.tensor, or leave it out.",
        )
    if length % tensor:
        yield Finding(
            key="data.sequence_length",
            problem=f"is not divisible by parallel.tensor = {tensor}, over which parallel.sequence splits it",
            remedy=f"The nearest that are: {length // tensor * tensor} and {-(-length // tensor) * tensor}.",
        )


def _split_sizes(model: ModelSection) -> dict[str, int]:
    """What tensor parallelism splits, by its name."""
    return {
        "query heads": model.heads,
        "key/value heads": model.heads if model.kv_heads == "auto" else model.kv_heads,
        "channels of the MLP (model.ffn)": 4 * model.hidden if model.ffn == "auto" else model.ffn,
    }


def _fitting(recipe: Recipe, *, near: int) -> str:
    per_node = recipe.parallel.ranks_per_node
    common = gcd(*_split_sizes(recipe.model).values(), 0 if per_node == "auto" else per_node)
    return some(divisors(common), near=near)
