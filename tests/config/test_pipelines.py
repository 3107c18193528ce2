"""Stages, schedules and micro-batches that do not fit are refused before anything starts."""

from __future__ import annotations

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError, Mistake

SETTINGS = ("model.layers=8", "train.global_batch=16", "train.micro_batch=2", "train.ramp_up=[]")


def refused(*settings: str, data_degree: int = 1) -> dict[str, Mistake]:
    loaded = load_recipe("demo", [*SETTINGS, *(f"parallel.{one}" for one in settings)])
    try:
        check_recipe(loaded.recipe, loaded.sources, data_degree=data_degree)
    except ConfigError as error:
        return {one.key: one for one in error.mistakes}
    return {}


@pytest.mark.parametrize(
    "settings",
    [
        ("pipeline=4",),
        ("pipeline=4", "schedule=gpipe"),
        ("pipeline=4", "schedule=interleaved", "chunks=2"),
        ("pipeline=4", "schedule=zero-bubble"),
        ("pipeline=4", "schedule=zero-bubble", "chunks=2"),
        ("pipeline=4", "schedule=zbv", "chunks=2"),
        ("pipeline=3", "partition=embeddings"),
        ("pipeline=2", "blocks_per_stage=[3, 5]"),
        ("pipeline=1", "schedule=zbv"),
        ("pipeline=2", 'recompute_per_stage=["full", "none"]'),
        ("pipeline=2", "schedule=zbv", "chunks=2", 'recompute_per_stage=["full", "none", "none", "full"]'),
    ],
)
def test_what_fits_is_taken(settings: tuple[str, ...]) -> None:
    assert refused(*settings) == {}


@pytest.mark.parametrize(
    ("settings", "key", "remedy"),
    [
        (("pipeline=9",), "parallel.pipeline", "at least one block"),
        (("pipeline=4", "schedule=interleaved", "chunks=3"), "parallel.chunks", "at least one block"),
        (("pipeline=8", "schedule=interleaved", "chunks=2"), "parallel.chunks", "at least one block"),
        (("pipeline=4", "schedule=interleaved"), "parallel.chunks", "parallel.chunks = 2"),
        (("pipeline=4", "chunks=2"), "parallel.chunks", "'interleaved'"),
        (("pipeline=2", "schedule=zbv", "chunks=3"), "parallel.chunks", "parallel.chunks = 2"),
        (("pipeline=2", "blocks_per_stage=[3, 4]"), "parallel.blocks_per_stage", "add up to 8"),
        (
            ("pipeline=2", "schedule=zero-bubble", 'recompute_per_stage=["elementwise", "none"]'),
            "parallel.recompute_per_stage",
            "'selective' or 'full'",
        ),
        (("pipeline=2", 'recompute_per_stage=["full"]'), "parallel.recompute_per_stage", "Give 2"),
        (('recompute_per_stage=["full", "none"]',), "parallel.recompute_per_stage", "Give 1"),
        (("pipeline=2", "blocks_per_stage=[8]"), "parallel.blocks_per_stage", "Give 2 numbers"),
        (("pipeline=2", "schedule=zbv", "chunks=2", "zero=3"), "parallel.zero", "parallel.zero = 2"),
        (("pipeline=2", "blocks_per_stage=[8, 0]"), "parallel.blocks_per_stage", "from 1 on"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    settings: tuple[str, ...], key: str, remedy: str
) -> None:
    found = refused(*settings)
    assert list(found) == [key]
    assert remedy in found[key].remedy


def test_batches_that_give_unequal_rounds_are_refused_with_the_nearest_that_give_equal_ones() -> None:
    uneven = ("pipeline=3", "schedule=zero-bubble")
    found = refused(*uneven)  # 8 micro-batches: 2 rounds of 4
    assert found == {}
    loaded = load_recipe("demo", [*SETTINGS, *(f"parallel.{one}" for one in uneven), "train.global_batch=14"])
    with pytest.raises(ConfigError) as error:
        check_recipe(loaded.recipe, loaded.sources)
    (mistake,) = error.value.mistakes
    assert mistake.key == "parallel.schedule" and "7 micro-batches" in mistake.problem
    assert "12 or 16" in mistake.remedy


def test_a_compiled_stage_cannot_split_its_backward() -> None:
    loaded = load_recipe("demo", [*SETTINGS, "parallel.pipeline=2", "parallel.schedule=zero-bubble"])
    check_recipe(loaded.recipe, loaded.sources)
    loaded = load_recipe(
        "demo", [*SETTINGS, "parallel.pipeline=2", "parallel.schedule=zero-bubble", "train.compile=on"]
    )
    with pytest.raises(ConfigError, match="splits it in two"):
        check_recipe(loaded.recipe, loaded.sources)


@pytest.mark.parametrize(
    "settings", [("zero=1", "data=2"), ("zero=3", "data=2"), ("schedule=zbv", "pipeline=2", "chunks=2")]
)
def test_weights_that_are_rounded_block_by_block_are_refused_where_a_rank_lacks_them(
    settings: tuple[str, ...],
) -> None:
    both = refused(*settings, "working=by-block", data_degree=2)
    assert set(both) == {*refused(*settings, data_degree=2), "parallel.working"}
