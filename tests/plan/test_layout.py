"""Degrees, machines, bubbles and even stages of layouts, by hand."""

from __future__ import annotations

import pytest

from bloomery.config.load import load_recipe
from bloomery.plan.layout import (
    Layout,
    StageParameters,
    bubble_share,
    bubble_slots,
    even_stages,
    layout_of,
    stage_parameters,
)
from bloomery.plan.parameters import count_parameters


def test_ranks_of_all_replicas_lie_on_whole_machines() -> None:
    layout = Layout(tensor=2, pipeline=3, data=5, per_node=8)
    assert (layout.replica, layout.world, layout.nodes) == (6, 30, 4)
    assert layout.leaves_node
    assert Layout(tensor=8, pipeline=2, per_node=8).leaves_node, "one stage on each of two machines"
    assert not Layout(tensor=4, pipeline=2).leaves_node, "8 ranks on one machine"
    assert not Layout(data=16).leaves_node, "there are no stages"


@pytest.mark.parametrize(("tensor", "data", "inside"), [(2, 5, 4), (2, 3, 3), (8, 5, 1), (16, 5, 1)])
def test_a_machine_holds_the_data_parallel_neighbours_that_tensor_ranks_leave_room_for(
    tensor: int, data: int, inside: int
) -> None:
    assert Layout(tensor=tensor, data=data, per_node=8).data_in_node == inside


@pytest.mark.parametrize(
    ("zero", "shard", "shards", "told"),
    [(0, 4, 1, "Z0"), (1, 0, 6, "Z1"), (1, 4, 4, "Z1/4"), (3, 8, 6, "Z3"), (2, 6, 6, "Z2")],
)
def test_zero_shards_over_all_replicas_or_some_neighbours(
    zero: int, shard: int, shards: int, told: str
) -> None:
    layout = Layout(data=6, zero=zero, shard=shard)
    assert layout.shards == shards and str(layout).endswith(f"DP6·{told}")


def test_a_layout_names_chunks_and_what_is_offloaded() -> None:
    layout = Layout(tensor=2, pipeline=4, chunks=3, data=5, zero=1, offload=True)
    assert str(layout) == "TP2·PP4×3·DP5·Z1+CPU"


@pytest.mark.parametrize(
    ("schedule", "chunks", "slots"),
    [("1f1b", 1, 6.0), ("gpipe", 1, 6.0), ("interleaved", 2, 3.0), ("zero-bubble", 1, 2.0), ("zbv", 2, 1.0)],
)
def test_a_pipeline_of_seven_idles_by_its_schedule(schedule: str, chunks: int, slots: float) -> None:
    layout = Layout(pipeline=7, schedule=schedule, chunks=chunks)
    assert bubble_slots(layout) == pytest.approx(slots)
    assert bubble_share(layout, 9) == pytest.approx(slots / (9 + slots))


def blocks_of(layers: int, pipeline: int, head_in_blocks: float) -> list[int]:
    model = load_recipe("demo", [f"model.layers={layers}"]).recipe.model
    parameters = count_parameters(model, vocabulary=100, sequence_length=8)
    return [stage.blocks for stage in even_stages(parameters, pipeline, head_in_blocks)]


@pytest.mark.parametrize(
    ("layers", "pipeline", "head_in_blocks", "blocks"),
    [
        (10, 1, 3.0, [10]),
        (10, 4, 0.0, [2, 3, 3, 2]),
        (10, 4, 1.5, [2, 3, 3, 2]),
        (10, 4, 3.0, [1, 4, 4, 1]),
        (4, 4, 9.0, [1, 1, 1, 1]),
        (11, 3, 0.0, [4, 4, 3]),
        (11, 3, 2.0, [3, 5, 3]),
        (7, 2, 0.0, [3, 4]),
    ],
)
def test_the_ends_hold_fewer_blocks_where_embedding_and_head_weigh_some(
    layers: int, pipeline: int, head_in_blocks: float, blocks: list[int]
) -> None:
    assert blocks_of(layers, pipeline, head_in_blocks) == blocks


def of(*overrides: str, accelerators: int = 24) -> Layout:
    loaded = load_recipe("demo", ["model.layers=8", *overrides])
    return layout_of(loaded.recipe, accelerators=accelerators, per_node=4, vocabulary=8192)


def test_a_recipes_layout_has_its_settings() -> None:
    layout = of(
        "parallel.tensor=2", "parallel.sequence=true", "parallel.zero=2", "parallel.shard_degree=3",
        "parallel.offload=cpu", "parallel.working=by-block", "parallel.overlap=false",
        "parallel.prefetch_blocks=5", "parallel.async_tensor=true",
    )  # fmt: skip
    assert (layout.tensor, layout.data, layout.zero, layout.shard, layout.per_node) == (2, 12, 2, 3, 4)
    assert layout.sequence and layout.offload and layout.rounds_by_block and not layout.overlaps
    assert layout.prefetch_blocks == 5 and layout.async_tensor
    plain = of("parallel.sequence=true", "parallel.chunks=2", "parallel.async_tensor=true")
    assert not plain.sequence and not plain.async_tensor, "one tensor rank splits nothing"
    assert (plain.chunks, plain.blocks, plain.recompute, plain.data) == (1, (), (), 24)
    assert plain.shard == 0 and plain.overlaps and not plain.offload and not plain.rounds_by_block
    assert of("parallel.tensor=2", "parallel.pipeline=4", accelerators=4).data == 1, "at least one replica"
    assert str(of("parallel.tensor=2", accelerators=25)).endswith("DP12·Z0"), "one accelerator is left over"
    assert of("parallel.pipeline=2").blocks == (5, 3), "a vocabulary of 8192 weighs more than a block"


def test_a_rank_holds_all_its_chunks_and_recomputes_the_least_that_one_of_them_does() -> None:
    layout = of(
        "parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved",
        "parallel.blocks_per_stage=[3,1,2,2]",
        "parallel.recompute_per_stage=['full','full','elementwise','full']",
    )  # fmt: skip
    assert (layout.blocks, layout.recompute) == ((5, 3), ("elementwise", "full"))
    assert (layout.head_rank, layout.chunks, layout.data) == (1, 2, 12)
    model = load_recipe("demo").recipe.model
    stages = stage_parameters(layout, count_parameters(model, vocabulary=8192, sequence_length=8))
    assert stages == (
        StageParameters(blocks=5, has_embedding=True, has_head=False, recompute="elementwise"),
        StageParameters(blocks=3, has_embedding=False, has_head=True, recompute="full"),
    )


def test_under_zbv_the_first_rank_holds_the_head_too() -> None:
    layout = of("parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=zbv")
    assert layout.head_rank == 0 and sum(layout.blocks) == 8


def test_the_last_rank_holds_the_head_where_nothing_says_otherwise() -> None:
    parameters = count_parameters(load_recipe("demo").recipe.model, vocabulary=1000, sequence_length=64)
    stages = stage_parameters(Layout(pipeline=3, blocks=(2, 1, 1)), parameters)
    assert [(one.has_embedding, one.has_head) for one in stages] == [
        (True, False),
        (False, False),
        (False, True),
    ]
