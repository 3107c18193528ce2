"""Stages, schedules and micro-batches that do not fit are refused before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.validate import check_recipe
from bloomery.config.validate_layout import batch_pairs, pipeline_mistakes, rounds_fit
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


@pytest.mark.parametrize(
    ("settings", "degree", "key", "words"),
    [
        (("shard_degree=2",), 2, "parallel.shard_degree", "shards nothing"),
        (("zero=1", "shard_degree=2", "data=3"), 3, "parallel.shard_degree", "3 data-parallel ranks"),
        (("pipeline=4", "schedule=gpipe", "chunks=2"), 1, "parallel.chunks", "'gpipe' has 1 on each rank"),
        (("pipeline=4", "schedule=zbv", "chunks=1"), 1, "parallel.chunks", "'zbv' has 2 on each rank"),
        (("pipeline=4", "schedule=interleaved"), 1, "parallel.chunks", "has 2 or more on each rank"),
        (
            ("pipeline=2", "blocks_per_stage=[3, 6]"),
            1,
            "parallel.blocks_per_stage",
            "2 stages 9 blocks, 3 to",
        ),
        (
            ("pipeline=2", "schedule=zero-bubble", "zero=3", "data=2"),
            2,
            "parallel.zero",
            "which 'zero-bubble'",
        ),
        (
            ('recompute_per_stage=["full", "none", "none"]',),
            1,
            "parallel.recompute_per_stage",
            "there is 1 stage",
        ),
        (("data=3",), 3, "train.global_batch", "16 is not divisible by micro-batch 2 × data degree 3"),
    ],
)
def test_each_mistake_of_a_layout_is_told_with_its_numbers(
    settings: tuple[str, ...], degree: int, key: str, words: str
) -> None:
    found = refused("tensor=1", *settings, data_degree=degree)
    mistake = found.pop(key)
    assert words in mistake.problem and set(found) <= {"optim.name", "parallel.zero", "train.global_batch"}


@pytest.mark.parametrize(
    "settings",
    [
        ("offload=cpu",),
        ("data=4", "zero=1", "shard_degree=2"),
        ("data=4", "zero=1", "shard_degree=4"),
        ("pipeline=2", "zero=3", "data=2"),
        ("pipeline=2", "schedule=interleaved", "chunks=4"),
        ("working=by-block",),
    ],
)
def test_layouts_at_the_edge_of_what_works_are_taken(settings: tuple[str, ...]) -> None:
    degree = next((int(one.removeprefix("data=")) for one in settings if one.startswith("data=")), 1)
    loaded = load_recipe("demo", [*SETTINGS, "optim.name=adamw", *(f"parallel.{one}" for one in settings)])
    check_recipe(loaded.recipe, loaded.sources, data_degree=degree)


@pytest.mark.parametrize(
    ("model", "tensor", "per_node", "told"),
    [
        (("model.heads=8", "model.kv_heads=2"), 4, "auto", "2 key/value heads"),
        (("model.heads=8", "model.ffn=1022"), 4, "auto", "1022 channels of the MLP"),
        (("model.heads=8", "model.kv_heads=8", "model.ffn=1024"), 4, "auto", ""),
        (("model.heads=8", "model.kv_heads=8", "model.ffn=1024"), 4, "4", ""),
        (("model.heads=8", "model.kv_heads=8", "model.ffn=1024"), 4, "8", ""),
        (("model.heads=8", "model.kv_heads=8", "model.ffn=1024"), 4, "6", "the 6 ranks of a node"),
        (("model.heads=8", "model.kv_heads=8", "model.ffn=1024"), 4, "2", "the 2 ranks of a node"),
    ],
)
def test_a_tensor_degree_divides_all_that_is_split_and_stays_inside_a_node(
    model: tuple[str, ...], tensor: int, per_node: str, told: str
) -> None:
    layout = (f"parallel.tensor={tensor}", f"parallel.ranks_per_node={per_node}", "optim.name=adamw")
    loaded = load_recipe("demo", [*SETTINGS, *model, "model.hidden=256", *layout])
    try:
        check_recipe(loaded.recipe, loaded.sources, data_degree=1)
    except ConfigError as error:
        assert told and told in error.mistakes[0].problem and error.mistakes[0].key == "parallel.tensor"
    else:
        assert told == ""


def test_rounds_are_equal_where_micro_batches_divide_into_them() -> None:
    fitting = {n for n in range(1, 17) if rounds_fit(n, pipeline=4)}
    assert fitting == {*range(1, 9), 10, 12, 15, 16}
    assert not rounds_fit(9, pipeline=4) and not rounds_fit(13, pipeline=4) and rounds_fit(9, pipeline=3)


def test_the_batches_of_a_ramp_up_begin_evenly_over_its_samples() -> None:
    train = load_recipe("demo", ["train.global_batch=10", "train.ramp_up=[4, 3, 101]"]).recipe.train
    assert batch_pairs(train) == [(4, train.micro_batch), (7, train.micro_batch), (10, train.micro_batch)]
    changes = replace(train, micro_batch=1, micro_batch_changes=((50, 3), (51, 2), (101, 5)))
    assert batch_pairs(changes) == [(4, 1), (4, 3), (7, 2), (10, 5)], "from sample 51 and 101 on"
    assert batch_pairs(replace(train, ramp_up=(10, 3, 101))) == [(10, train.micro_batch)]
    assert batch_pairs(changes, consumed=50) == [(4, 3), (7, 2), (10, 5)]
    assert batch_pairs(changes, consumed=100) == [(7, 2), (10, 5)]
    assert batch_pairs(changes, consumed=101) == batch_pairs(changes, consumed=999) == [(10, 5)]


def test_batches_that_a_run_is_past_need_not_fit_its_ranks() -> None:
    growing = ("train.global_batch=16", "train.ramp_up=[4, 4, 300]", "train.micro_batch=1")
    recipe = load_recipe("demo", [*SETTINGS, *growing, "optim.name=adamw", "parallel.data=8"]).recipe
    check_recipe(recipe, {}, data_degree=8, consumed=300)
    with pytest.raises(ConfigError) as refused:
        check_recipe(recipe, {}, data_degree=8, consumed=299)
    (mistake,) = refused.value.mistakes
    assert mistake.key == "train.ramp_up" and mistake.problem.startswith("a global batch of 12 ")
    when = "Or resume the run like this once it has used the 300 samples of its ramp-up."
    assert mistake.remedy.endswith(when)


@pytest.mark.parametrize(("consumed", "batch"), [(0, 5), (99, 5), (100, 15), (299, 15), (300, 0)])
def test_rounds_of_batches_that_a_run_is_past_need_not_be_equal(consumed: int, batch: int) -> None:
    growing = ("train.global_batch=20", "train.ramp_up=[5, 5, 300]", "train.micro_batch=1")
    layout = ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2")
    recipe = load_recipe("demo", [*SETTINGS, *growing, *layout]).recipe
    found = pipeline_mistakes(recipe.parallel, recipe.model, recipe.train, data_degree=1, consumed=consumed)
    told = [one.problem.partition(" has ")[0] for one in found]
    assert told == ([f"a batch of {batch}"] if batch else [])


def test_the_batches_of_a_long_ramp_up_are_not_compared_with_one_another() -> None:
    train = load_recipe("demo", ["train.global_batch=1601", "train.ramp_up=[1, 1, 5000]"]).recipe.train
    executed = []
    for intervals in (400, 1600):
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        ramping = replace(train, global_batch=intervals + 1)
        former = sys.gettrace()
        sys.settrace(trace)
        try:
            pairs = batch_pairs(ramping)
        finally:
            sys.settrace(former)
        assert pairs == [(batch, train.micro_batch) for batch in range(1, intervals + 2)]
        executed.append(count)
    assert executed[1] < 5 * executed[0], "four times the intervals take four times the work"
