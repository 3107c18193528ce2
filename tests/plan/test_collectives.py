"""Collectives of a step against arithmetic by hand; tests/layouts counts them in real steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bloomery.config.load import parse_recipe
from bloomery.plan.collectives import Collective, StepShape, step_collectives, step_shape
from bloomery.plan.ranks import degrees_of
from bloomery.plan.schedule import phase_at
from bloomery.plan.traffic import step_traffic

HIDDEN, LENGTH, LAYERS, VOCABULARY = 64, 32, 4, 96
RECIPE = """
[run]
name = "made"
[data]
sources = ["python:stdlib"]
sequence_length = 32
[train]
steps = 20
global_batch = 16
micro_batch = 2
precision = "bf16"
loss_chunk = 48
[optim]
learning_rate = 1e-3
[schedule]
unit = "steps"
[model]
layers = 4
hidden = 64
heads = 8
ffn = 256
vocabulary = 96
activation = "gelu"
bias = true
norm = "layernorm"
"""
STREAM = 2 * LENGTH * HIDDEN * 2
"""The bytes of the residual stream of a micro-batch."""
BLOCK = 12 * HIDDEN**2
"""The elements of a block's matrices."""


def shape(world: int, *settings: str) -> StepShape:
    recipe = parse_recipe(RECIPE, settings, label="made").recipe
    degrees = degrees_of(recipe.parallel, world=world)
    assert degrees is not None
    return step_shape(recipe, degrees, phase_at(recipe.train, 0), vocabulary=VOCABULARY)


def on_axis(made: StepShape, axis: str, *, pipeline: int = 0) -> Counter[tuple[str, int]]:
    """(kind, payload) → times."""
    counted: Counter[tuple[str, int]] = Counter()
    for one in step_collectives(made, pipeline=pipeline):
        if one.axis == axis:
            counted[one.kind, one.payload_bytes] += one.times
    return counted


def test_one_rank_exchanges_nothing() -> None:
    made = shape(1)
    assert step_collectives(made, pipeline=0) == () and step_traffic(made).total_bytes == 0.0


@pytest.mark.parametrize(
    ("recompute", "dropout", "compiles", "forwards"),
    [
        ("none", 0.0, True, 2),
        ("selective", 0.1, False, 2),
        ("elementwise", 0.1, True, 2),
        ("mlp", 0.1, False, 2),
        ("full", 0.0, True, 3),
        ("full", 0.1, True, 3),
        ("full", 0.0, False, 3),
        ("full", 0.1, False, 4),
    ],
)
def test_blocks_computed_again_repeat_all_collectives_but_the_last(
    recompute: str, dropout: float, compiles: bool, forwards: int
) -> None:
    made = shape(2, "parallel.tensor=2", f"train.recompute={recompute}", f"model.hidden_dropout={dropout}")
    counted = on_axis(replace(made, compiles=compiles), "tensor")
    # Two of a backward, and the embedding's forward and the head's backward.
    times = 8 * (LAYERS * (forwards + 2) + 2)
    # The loss of 64 tokens in chunks of 48 and 16: two fp32 numbers a token and rank.
    chunks = {("all_gather", 2 * 2 * rows * 4): 8 for rows in (48, 16)}
    assert counted == {("all_reduce", STREAM): times, **chunks}


def test_a_split_sequence_gathers_and_scatters_and_sums_what_is_whole() -> None:
    made = shape(2, "parallel.tensor=2", "parallel.sequence=true")
    counted = on_axis(made, "tensor")
    # Norms and the biases behind split columns are summed once a step: 6 vectors a block, 2 of the last norm.
    plain = (6 * LAYERS + 2) * HIDDEN * 4
    for kind in ("all_gather", "reduce_scatter"):
        assert counted.pop((kind, STREAM)) == 8 * (4 * LAYERS + 2)
    again = on_axis(replace(made, phase=replace(made.phase, recompute="mlp")), "tensor")
    assert again["all_gather", STREAM] == 8 * (5 * LAYERS + 2), "what enters the MLP is gathered again"
    assert again["reduce_scatter", STREAM] == 8 * (4 * LAYERS + 2)
    assert counted == {("all_gather", 768): 8, ("all_gather", 256): 8, ("all_reduce", plain): 1}
    assert on_axis(replace(made, scatters=False), "tensor")["all_reduce", STREAM] == 8 * (4 * LAYERS + 2)


def test_fp8_reduces_the_scales_of_weights_once_a_step_and_those_of_split_factors_in_each_product() -> None:
    settings = ("parallel.tensor=2", "train.precision=fp8")
    counted = on_axis(shape(2, *settings), "tensor")
    # Layers with split inputs take theirs forward, those with split outputs backward.
    assert counted["all_reduce", 2] == 8 * LAYERS * 4
    assert counted["all_reduce", 4 * 4 * LAYERS] == 1
    again = on_axis(shape(2, *settings, "train.recompute=full"), "tensor")
    assert again["all_reduce", 2] == 8 * LAYERS * (4 + 2)
    assert on_axis(shape(2, *settings, "train.recompute=mlp"), "tensor")["all_reduce", 2] == 8 * LAYERS * 5
    for zero in (1, 3):
        sharded = shape(4, *settings, "parallel.data=2", f"parallel.zero={zero}")
        for axis in ("tensor", "shard"):
            assert on_axis(sharded, axis)["all_reduce", 4 * 4 * LAYERS] == 1


def test_fp8_with_scales_by_row_reduces_one_number_for_each_row_that_ranks_share() -> None:
    settings = ("parallel.tensor=2", "train.precision=fp8", "train.fp8_scaling=row")
    kept, freed = (
        on_axis(shape(2, *settings, *more), "tensor") for more in ((), ("parallel.working=by-block",))
    )
    of_tokens, of_weights = ("all_reduce", 2 * 2 * LENGTH), ("all_reduce", 4 * HIDDEN * 4 * LAYERS)
    assert kept[of_tokens] == 8 * LAYERS * 4 and kept[of_weights] == 1
    # Rows of 64 tokens and of 64 channels have as many bytes.
    assert freed[of_tokens] == 2 * 8 * LAYERS * 4 and freed[of_weights] == 0
    sharded = (*settings, "parallel.data=2", "parallel.zero=1")
    beside = on_axis(shape(4, *sharded), "tensor")  # a block rounds its weights when they have arrived
    assert beside["all_reduce", 4 * HIDDEN * 4] == LAYERS and beside[of_weights] == 0
    assert on_axis(shape(4, *sharded, "parallel.overlap=false"), "tensor")[of_weights] == 1
    plain = on_axis(shape(2, "parallel.tensor=2"), "tensor")
    for scaling in ("block", "mx"):
        made = replace(shape(2, *settings), fp8_scaling=scaling)
        assert on_axis(made, "tensor") == plain


def test_messages_pass_between_ranks_and_not_between_stages_of_one() -> None:
    between = {("send", STREAM): 8, ("receive", STREAM): 8}
    ends = shape(4, "parallel.pipeline=4")
    assert on_axis(ends, "pipeline") == on_axis(ends, "pipeline", pipeline=3) == between
    assert on_axis(ends, "pipeline", pipeline=1) == {key: 2 * n for key, n in between.items()}
    there_and_back = shape(2, "parallel.pipeline=2", "parallel.schedule=zbv", "parallel.chunks=2")
    assert on_axis(there_and_back, "pipeline") == {key: 2 * n for key, n in between.items()}


def test_zero_moves_gradients_to_shards_and_weights_from_them() -> None:
    def gathered(zero: int) -> Counter[tuple[str, int]]:
        return on_axis(shape(2, "parallel.data=2", f"parallel.zero={zero}", "parallel.bucket_mb=0"), "shard")

    blocks, tables = LAYERS * BLOCK, VOCABULARY * HIDDEN
    first = gathered(1)
    assert first["reduce_scatter", 4 * blocks] == first["all_gather", 2 * blocks] == 1
    second = gathered(2)
    assert second["reduce_scatter", 4 * BLOCK] == 4 * LAYERS
    assert second["all_gather", 2 * BLOCK] == LAYERS
    assert second["reduce_scatter", 4 * tables] == 2 * 4  # embedding and head
    third = gathered(3)
    assert third["all_gather", 2 * BLOCK] == 2 * 4 * LAYERS
    assert third["all_gather", 2 * tables] == 2


def test_updated_weights_are_gathered_in_ranges_of_four_buckets_each_part_from_its_rank() -> None:
    made = shape(2, "parallel.data=2", "parallel.zero=1", "parallel.bucket_mb=0.05")
    counted = on_axis(made, "shard")
    # A block's matrices have 3, 1, 4 and 4 squares, and 12.2 close a range. From the start these are 15, 13,
    # 16 and the last 4; of the second, the first rank holds 9.
    squares = {15: 1, 9: 1, 4: 2, 16: 1}
    sent = {size: times for (kind, size), times in counted.items() if kind == "broadcast"}
    assert sent == {2 * number * HIDDEN**2: times for number, times in squares.items()}
    assert ("all_gather", 2 * VOCABULARY * HIDDEN) in counted, "a short buffer is one range"
    gathered = on_axis(shape(2, "parallel.data=2", "parallel.zero=2", "parallel.bucket_mb=0.05"), "shard")
    assert gathered["all_gather", 2 * BLOCK] == LAYERS, "a block is one range"
    assert all(kind != "broadcast" for kind, _ in gathered)


def test_gradients_are_summed_in_ranges_that_end_at_shards_or_at_a_parameter() -> None:
    plain = on_axis(shape(2, "parallel.data=2", "parallel.bucket_mb=0.05"), "replica")
    # Of a block, from its end: the MLP's two matrices are a range each, the two of attention one together.
    assert plain["all_reduce", 4 * 4 * HIDDEN**2] == 3 * LAYERS
    made = shape(2, "parallel.data=2", "parallel.zero=1", "parallel.bucket_mb=0.05")
    assert on_axis(made, "shard")["reduce", 4 * 4 * HIDDEN**2] == 3 * LAYERS
    odd = replace(made, model=replace(made.model, layers=3))
    counted = on_axis(odd, "shard")
    # The middle of three blocks' matrices lies within a range, which two ranks hold parts of.
    assert counted["reduce", 4 * 4 * HIDDEN**2] == 8 and counted["reduce", 4 * 2 * HIDDEN**2] == 2


def test_the_ends_of_a_pipeline_sum_a_tied_embedding_and_all_ranks_a_norm_and_a_report() -> None:
    made = shape(4, "parallel.pipeline=2", "parallel.data=2", "parallel.zero=1", "model.tied=true")
    for pipeline in (0, 1):
        table = ("all_reduce", 4 * VOCABULARY * HIDDEN // 2)
        assert on_axis(made, "embedding", pipeline=pipeline) == {table: 1}
        assert on_axis(made, "world", pipeline=pipeline) == {("all_reduce", 16): 1, ("all_reduce", 112): 1}
    limited = shape(2, "parallel.data=2", "optim.clip_method=tensor", "optim.qk_clip=5.0")
    # 16 tensors a block, embedding, head and two of the last norm.
    assert on_axis(limited, "world")["all_reduce", 8 * (16 * LAYERS + 4)] == 1
    assert on_axis(limited, "data") == {("all_reduce", 4 * 8 * LAYERS): 1}


def test_a_ring_sends_all_parts_but_its_own() -> None:
    def sent(kind: str, *, times: int = 1) -> float:
        return Collective(kind=kind, axis="data", payload_bytes=400, ranks=4, times=times).sent_bytes  # type: ignore[arg-type]

    assert sent("all_reduce", times=3) == 3 * 600.0
    assert sent("all_gather") == sent("reduce_scatter") == sent("reduce") == 300.0
    assert (sent("send", times=2), sent("receive", times=2)) == (800.0, 0.0)


def test_traffic_is_that_of_the_busiest_rank_and_of_all() -> None:
    made = shape(16, "parallel.tensor=2", "parallel.pipeline=4", "parallel.data=2", "model.tied=true")
    sent = step_traffic(made)
    of_ranks = [step_collectives(made, pipeline=pipeline) for pipeline in range(4)]
    for axis, parts in (
        ("tensor", {"tensor"}),
        ("pipeline", {"pipeline"}),
        ("data", {"shard", "replica", "data"}),
        ("embedding", {"embedding"}),
        ("world", {"world"}),
    ):
        calls = [sum(one.times for one in rank if one.axis in parts) for rank in of_ranks]
        sizes = [sum(one.sent_bytes for one in rank if one.axis in parts) for rank in of_ranks]
        assert getattr(sent, f"{axis}_calls") == max(calls) > 0
        assert getattr(sent, f"{axis}_bytes") == pytest.approx(max(sizes))
        assert getattr(sent, f"all_{axis}_bytes") == pytest.approx(4 * sum(sizes))
    assert sent.total_bytes == pytest.approx(4 * sum(one.sent_bytes for rank in of_ranks for one in rank))
