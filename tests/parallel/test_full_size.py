"""The four source runs at full size, on the device 'meta', as ranks of the worlds that their layouts make."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from tests.parallel.fake_worlds import degrees_at, fake_world

from bloomery.checkpoint.format.state import StateEntry
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.parallel.build import build_training_model
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.pipeline_stages import StageContents, contents_of
from bloomery.plan.ranks import Degrees

# Ranks of the published layout (the 172B's data degree is ours), parameters, blocks of each stage.
RUNS = {
    "tr1-13b": (128, 12_853_386_240, [10] * 4),
    "tr11-176b": (384, 176_247_271_424, [5, *[6] * 10, 5]),
    "llmjp-172b": (512, 172_394_557_440, [6] * 16),
    "intellect1-10b": (8, 10_211_381_248, [42]),
}
ALIGNMENT = 1e-3
"""What flat buffers may have more than their parameters, as a share."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What one rank of the fake world made."""

    blocks: list[int]
    weights: int
    masters: int
    masters_per_moment: list[int]
    entries: list[StateEntry]


@pytest.mark.parametrize("name", RUNS)
def test_a_source_run_builds_at_full_size_and_its_ranks_hold_what_the_plan_says(name: str) -> None:
    world, parameters, counts = RUNS[name]
    recipe, degrees = load_recipe(name).recipe, degrees_at(name, world)
    found = contents(recipe, degrees)
    assert sum(one.parameters for one in found) == parameters
    assert [len(one.stage.blocks) for one in found] == counts
    seen: dict[str, tuple[int, ...]] = {}
    for place, one in enumerate(found):
        made = build(recipe, degrees, rank=degrees.rank_at(pipeline=place, data=0, tensor=0))
        assert made.blocks == list(one.stage.blocks)
        assert made.weights == one.weights
        assert made.masters == pytest.approx(one.masters, rel=ALIGNMENT)
        assert made.masters_per_moment == [made.masters, made.masters]
        seen |= {entry.name: entry.global_shape for entry in made.entries}
    # With ZeRO the first shard of a stage lacks some of its tensors; without, every tensor was seen.
    if not recipe.parallel.zero:
        assert sum(math.prod(shape) for shape in seen.values()) == parameters


@pytest.mark.parametrize(("name", "stage"), [("tr11-176b", 0), ("tr11-176b", 11), ("intellect1-10b", 0)])
def test_the_shards_of_a_stage_are_the_whole_of_it(name: str, stage: int) -> None:
    recipe, degrees = load_recipe(name).recipe, degrees_at(name, RUNS[name][0])
    elements = 0
    for data in range(degrees.data):
        made = build(recipe, degrees, rank=degrees.rank_at(pipeline=stage, data=data, tensor=0))
        elements += sum(entry.box.size for entry in made.entries)
    assert elements == contents(recipe, degrees)[stage].weights


def contents(recipe: Recipe, degrees: Degrees) -> tuple[StageContents, ...]:
    assert isinstance(recipe.model.vocabulary, int)
    return contents_of(
        recipe.model,
        recipe.parallel,
        vocabulary=recipe.model.vocabulary,
        sequence_length=recipe.data.sequence_length,
        data=degrees.data,
    )


def build(recipe: Recipe, degrees: Degrees, *, rank: int) -> Built:
    """The model, masters and moments of one rank, as a start builds them, without a byte of memory."""
    assert isinstance(recipe.model.vocabulary, int)
    with fake_world(degrees, rank=rank, parallel=recipe.parallel) as mesh:
        model = build_training_model(
            recipe.model,
            vocabulary=recipe.model.vocabulary,
            sequence_length=recipe.data.sequence_length,
            optim=recipe.optim,
            loss=recipe.loss,
            loss_chunk=recipe.train.loss_chunk,
            seed=recipe.run.seed,
            mesh=mesh,
            parallel=recipe.parallel,
            compiled=False,
        )
        optimizers = Optimizers(model.weights, recipe.optim)
        moments = [entry for entry in optimizers.state_entries() if entry.global_shape]
        held = {suffix: 0 for suffix in ("first_moment", "second_moment")}
        for entry in moments:
            held[entry.name.rpartition(".")[2]] += entry.box.size
        entries = list(model.weights.state_entries())
        padding = sum(group.padding for group in model.weights.layouts)
        return Built(
            blocks=[int(name) for name, _ in model.decoder.blocks.named_children()],
            weights=sum(parameter.numel() for parameter in model.decoder.parameters()),
            masters=sum(master.numel() for master in model.weights.master),
            masters_per_moment=[size + padding for size in held.values()],
            entries=entries,
        )
