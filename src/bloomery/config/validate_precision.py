"""Checks that the scales of 8-bit factors fit the layout of `[parallel]`."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from bloomery.config.findings import Finding, divisors
from bloomery.config.model import ModelSection
from bloomery.config.recipe import Recipe, TrainSection
from bloomery.config.validate_layout import split_sizes

SCALED_BLOCKS = {"block": 128, "mx": 32}
"""`train.fp8_scaling` → the channels that share a scale."""


def scaling_mistakes(recipe: Recipe) -> Iterator[Finding]:
    """Yield a finding where tensor parallelism would split a block of elements that share a scale.

    The parts would be rounded apart, so that other degrees would train another model.
    """
    block, tensor = SCALED_BLOCKS.get(recipe.train.fp8_scaling), recipe.parallel.tensor
    if block is None or tensor == 1 or not uses_fp8(recipe.train):
        return
    sizes = _split_channels(recipe.model)
    wrong = [f"{size} {what}" for what, size in sizes.items() if size % (block * tensor)]
    if not wrong:
        return
    common = gcd(*sizes.values())
    degrees = [degree for degree in divisors(common) if common % (block * degree) == 0]
    fitting = f"Degrees that do: {', '.join(map(str, degrees))}. Or set" if degrees else "Set"
    yield Finding(
        key="train.fp8_scaling",
        problem=f"scales blocks of {block} channels, and parallel.tensor = {tensor} does not divide "
        f"{', '.join(wrong)} into whole ones",
        remedy=f"{fitting} train.fp8_scaling = 'row' or 'tensor'.",
    )


def uses_fp8(train: TrainSection) -> bool:
    """Return whether any phase of the run multiplies in 8 bits."""
    return "fp8" in (train.precision, *(precision for _, precision in train.precision_changes))


def _split_channels(model: ModelSection) -> dict[str, int]:
    """Return the channels that tensor parallelism divides, by name."""
    heads, kv_heads, ffn = split_sizes(model).values()
    return {
        "channels of queries": heads * model.head_width,
        "channels of keys and of values": kv_heads * model.head_width,
        "channels of the MLP (model.ffn)": ffn,
    }
