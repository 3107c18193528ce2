"""Scales of 8-bit factors against the layout: tensor parallelism divides whole blocks, or is refused."""

from __future__ import annotations

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError, Mistake

FP8 = ("train.precision=fp8",)
WIDE = ("model.hidden=512", "model.heads=4", "model.kv_heads=2", "model.ffn=768")
"""512 channels of queries, 256 of keys and of values, 768 of the MLP."""


def mistake(*settings: str) -> Mistake | None:
    """What a check of the recipe finds wrong with the scales."""
    overrides = ("optim.name=adamw", "parallel.ranks_per_node=8", *WIDE, *settings)
    loaded = load_recipe("demo", overrides)
    try:
        check_recipe(loaded.recipe, loaded.sources)
    except ConfigError as error:
        (found,) = error.mistakes
        return found
    return None


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.tensor=2", "train.fp8_scaling=block", *FP8),
        ("parallel.tensor=2", "train.fp8_scaling=mx", *FP8),
        ("parallel.tensor=1", "train.fp8_scaling=block", "model.ffn=1000", *FP8),
        ("parallel.tensor=2", "train.fp8_scaling=row", "model.ffn=1000", *FP8),
        ("parallel.tensor=2", "train.fp8_scaling=tensor", "model.ffn=1000", *FP8),
        ("parallel.tensor=2", "train.fp8_scaling=block", "model.ffn=1000", "train.precision=bf16"),
    ],
)
def test_whole_blocks_rows_and_other_precisions_are_accepted(settings: tuple[str, ...]) -> None:
    assert mistake(*settings) is None


@pytest.mark.parametrize("scaling", ["block", "mx"])
@pytest.mark.parametrize("when", [FP8, ("train.precision_changes=[[64, 'fp8']]",)])
def test_a_block_that_ranks_would_split_is_refused(scaling: str, when: tuple[str, ...]) -> None:
    found = mistake("parallel.tensor=2", f"train.fp8_scaling={scaling}", "model.ffn=1000", *when)
    assert found is not None and found.key == "train.fp8_scaling" and found.value == scaling
    assert "1000 channels of the MLP" in found.problem and "queries" not in found.problem
    assert found.remedy == "Set train.fp8_scaling = 'row' or 'tensor'."


def test_degrees_that_divide_into_whole_blocks_are_named() -> None:
    found = mistake("parallel.tensor=4", "train.fp8_scaling=block", "model.kv_heads=4", *FP8)
    assert found is not None and "768 channels of the MLP" in found.problem
    assert found.remedy == "Degrees that do: 1, 2. Or set train.fp8_scaling = 'row' or 'tensor'."
