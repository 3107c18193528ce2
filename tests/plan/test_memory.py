"""The bytes of a rank by part, against numbers that were worked out by hand for a small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bloomery.config.model import ModelSection
from bloomery.plan.block_cost import Workload
from bloomery.plan.hardware import Accelerator, Hardware, Node
from bloomery.plan.layout import Layout, StageParameters
from bloomery.plan.memory import (
    StageMemory,
    Training,
    block_activation_bytes,
    eager_activation_bytes,
    in_flight,
    offloaded_memory,
    rank_parameters,
    stage_memory,
)
from bloomery.plan.parameters import count_parameters
from bloomery.plan.step_time import stages_for

MODEL = ModelSection(layers=6, hidden=64, heads=4, kv_heads=2, ffn=96)  # SwiGLU, RMSNorm, heads of 16
# 48 tokens; a stream of 6,144 bytes; a block of 12,288 + 18,432 weights and two norms of 64
BLOCK, EMBEDDING, NORM = 30_848, 6_400, 64
WHOLE = 6 * BLOCK + 2 * EMBEDDING + NORM
DROPPED = {"attention_dropout": 0.1}


def of(
    layout: Layout | None = None,
    *,
    kind: str = "gpu",
    precision: str = "bf16",
    vocabulary: int = 100,
    reserved_gib: float = 0.0,
    fp8_teraflops: float = 0.0,
    **model: Any,
) -> Workload:
    machine = Hardware(
        name="a machine",
        accelerator=Accelerator(
            kind=kind,
            memory_gib=1.0,
            memory_gb_per_s=1.0,
            bf16_teraflops=1.0,
            fp8_teraflops=fp8_teraflops,
            reserved_gib=reserved_gib,
        ),
        node=Node(accelerators=8),
    )
    return Workload(
        model=replace(MODEL, **model),
        vocabulary=vocabulary,
        sequence_length=16,
        micro_batch=3,
        precision=precision,
        layout=layout or Layout(),
        hardware=machine,
    )


def held(work: Workload, index: int = 0, **training: Any) -> StageMemory:
    parameters = count_parameters(
        work.model, vocabulary=work.vocabulary, sequence_length=work.sequence_length
    )
    usual = {"micro_batches": 7, "recompute": "none", "optimizer": "adamw", "loss_chunk": 32}
    return stage_memory(
        work, parameters, stages_for(work, parameters), index, Training(**{**usual, **training})
    )


@pytest.mark.parametrize(
    ("work", "recompute", "kept"),
    [
        (of(), "none", 24_576 + 18_432 + 27_648 + 768),
        (of(), "selective", 24_576 + 18_432 + 27_648),
        (of(), "full", 6_144),
        (of(), "elementwise", 12_288 + 36_864 + 768),
        (of(), "mlp", 12_288 + 18_432 + 768),
        (of(hidden_dropout=0.1), "mlp", 31_488 + 6_144),
        (of(hidden_dropout=0.1), "elementwise", 49_920),
        (of(hidden_dropout=0.1), "none", 71_424 + 6_144),
        (of(activation="gelu"), "none", 71_424 - 9_216),
        (of(activation="gelu"), "elementwise", 49_920 - 9_216),
        (of(Layout(tensor=2)), "none", 24_576 + 9_216 + 13_824 + 384),
        (of(Layout(tensor=2, sequence=True)), "none", 18_432 + 9_216 + 13_824 + 384),
        (of(Layout(tensor=2, sequence=True)), "full", 3_072),
        (of(Layout(tensor=2)), "elementwise", 12_288 + 18_432 + 384),
        (of(Layout(tensor=2)), "mlp", 12_288 + 9_216 + 384),
        (of(Layout(tensor=2, sequence=True)), "mlp", 6_144 + 9_216 + 384),
        (of(kind="cpu", **DROPPED), "none", 70_656 + 15_360),
        (of(kind="cpu", **DROPPED), "elementwise", 49_152 + 6_144),
        (of(Layout(tensor=2), kind="cpu", **DROPPED), "elementwise", 12_288 + 18_432 + 3_072),
        (of(Layout(tensor=2), kind="cpu", **DROPPED), "none", 24_576 + 9_216 + 13_824 + 7_680),
        (of(Layout(tensor=2, sequence=True), hidden_dropout=0.1), "none", 41_856 + 3_072),
        (of(precision="fp32"), "none", 2 * (71_424 - 768) + 768 + 2 * 12_288),
        (of(precision="fp32", norm="layernorm"), "none", 2 * (71_424 - 768) + 768),
    ],
)
def test_a_block_keeps_what_backward_needs(work: Workload, recompute: str, kept: int) -> None:
    assert block_activation_bytes(work, recompute) == kept


def test_normalised_heads_are_kept_once_more_in_fp32_and_once_rounded() -> None:
    turned = 48 * (64 + 32) * 2  # queries and keys
    plain, normalised = (eager_activation_bytes(of(qk_norm=norm)) for norm in (False, True))
    assert normalised - plain == turned + 2 * turned
    one_byte_less = eager_activation_bytes(of(precision="fp32", norm="layernorm", position="alibi"))
    assert one_byte_less == 48 * 96 * 4, "nothing is cast where all is fp32"


@pytest.mark.parametrize(
    ("layout", "index", "micro_batches", "alive"),
    [
        (Layout(), 0, 7, 1.0),
        (Layout(pipeline=4), 1, 7, 3.0),
        (Layout(pipeline=4), 1, 2, 2.0),
        (Layout(pipeline=4, schedule="gpipe"), 3, 7, 7.0),
        (Layout(pipeline=4, schedule="zbv"), 2, 7, 4.0),
        (Layout(pipeline=4, schedule="zbv"), 2, 3, 3.0),
        (Layout(pipeline=4, schedule="interleaved", chunks=2), 0, 7, 5.5),
        (Layout(pipeline=4, schedule="interleaved", chunks=2), 2, 7, 2.75),
        (Layout(pipeline=4, schedule="interleaved", chunks=3), 0, 7, 5.0),
    ],
)
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_has_under_way(
    layout: Layout, index: int, micro_batches: int, alive: float
) -> None:
    training = Training(micro_batches=micro_batches, recompute="none", optimizer="adamw", loss_chunk=32)
    assert in_flight(of(layout), index, training) == alive


SHARD = WHOLE / 4
HALF = 6 * (128 + 15_360) + EMBEDDING + NORM  # of a rank of two, with its norms whole


@pytest.mark.parametrize(
    ("work", "weights", "gradients", "master", "moments"),
    [
        (of(Layout(data=4)), 2 * WHOLE, 4 * WHOLE, 4 * WHOLE, 8 * WHOLE),
        (of(Layout(data=4, zero=1)), 2 * WHOLE, 4 * WHOLE, 4 * SHARD, 8 * SHARD),
        (of(Layout(data=4, zero=2)), 2 * WHOLE, 4 * (SHARD + 2 * BLOCK), 4 * SHARD, 8 * SHARD),
        (
            of(Layout(data=4, zero=3)),
            2 * (2 * EMBEDDING + NORM + 3 * BLOCK),
            4 * (SHARD + 2 * BLOCK),
            4 * SHARD,
            8 * SHARD,
        ),
        (
            of(Layout(data=4, zero=3, prefetch_blocks=3)),
            2 * (2 * EMBEDDING + NORM + 4 * BLOCK),
            4 * (SHARD + 2 * BLOCK),
            4 * SHARD,
            8 * SHARD,
        ),
        (
            of(Layout(data=4, zero=3, overlaps=False)),
            2 * (2 * EMBEDDING + NORM + BLOCK),
            4 * (SHARD + BLOCK),
            4 * SHARD,
            8 * SHARD,
        ),
        (of(Layout(data=4, zero=1, shard=2)), 2 * WHOLE, 4 * WHOLE, 2 * WHOLE, 4 * WHOLE),
        (of(Layout(data=4, zero=2, offload=True)), 2 * WHOLE, 4 * (SHARD + 2 * BLOCK), 0, 0),
        (of(Layout(offload=True), kind="cpu"), 2 * WHOLE, 8 * WHOLE, 4 * WHOLE, 8 * WHOLE),
        (of(Layout(offload=True), precision="fp32"), 4 * WHOLE, 4 * WHOLE, 0, 0),
        (
            of(Layout(data=4, tensor=2, zero=3)),
            2 * (HALF - 3 * BLOCK / 2),
            4 * (HALF / 4 + 2 * BLOCK / 2),
            HALF,
            2 * HALF,
        ),
        (of(Layout(rounds_by_block=True), precision="fp32"), 4 * WHOLE, 4 * WHOLE, 0, 8 * WHOLE),
        (
            of(Layout(rounds_by_block=True)),
            2 * (2 * EMBEDDING + NORM + BLOCK),
            4 * WHOLE,
            4 * WHOLE,
            8 * WHOLE,
        ),
        (of(Layout(data=4), precision="fp32"), 4 * WHOLE, 4 * WHOLE, 0, 8 * WHOLE),
        (of(Layout(data=4, zero=1), precision="fp32"), 4 * WHOLE, 4 * WHOLE, 4 * SHARD, 8 * SHARD),
    ],
)
def test_shards_and_precision_decide_what_of_the_state_a_rank_holds(
    work: Workload, weights: float, gradients: float, master: float, moments: float
) -> None:
    found = held(work)
    assert (found.weights, found.gradients) == (weights, gradients)
    assert (found.master, found.optimizer) == (master, moments)


@pytest.mark.parametrize(
    ("layout", "fp8_teraflops", "copies"),
    [
        (Layout(), 2.0, 2),
        (Layout(), 0.0, 1),
        (Layout(data=4, zero=2), 2.0, 2),
        (Layout(data=4, zero=3), 2.0, 0),
        (Layout(rounds_by_block=True), 2.0, 0),
        (Layout(keeps_fp8=False), 2.0, 0),
    ],
)
def test_8_bit_copies_of_matrices_are_kept_where_working_weights_are(
    layout: Layout, fp8_teraflops: float, copies: int
) -> None:
    narrow, wide = (
        held(of(layout, precision=precision, fp8_teraflops=fp8_teraflops)) for precision in ("fp8", "bf16")
    )
    assert narrow.weights - wide.weights == copies * 6 * (BLOCK - 2 * NORM)
    halved = replace(layout, tensor=2)
    narrow, wide = (
        held(of(halved, precision=precision, fp8_teraflops=fp8_teraflops)) for precision in ("fp8", "bf16")
    )
    assert narrow.weights - wide.weights == copies * 3 * (BLOCK - 2 * NORM)


def test_offloaded_masters_and_gradients_are_pinned_and_moments_are_not() -> None:
    work = of(Layout(data=4, zero=1, offload=True))
    parameters = count_parameters(work.model, vocabulary=100, sequence_length=16)
    (stage,) = stages_for(work, parameters)
    found = offloaded_memory(work, parameters, stage, "adamw")
    assert (found.pinned, found.moments) == (8 * SHARD, 8 * SHARD)


def test_a_stage_of_one_block_gathers_and_reduces_one_under_zero_3() -> None:
    layout = Layout(pipeline=3, data=4, zero=3, blocks=(4, 1, 1), head_rank=2)
    middle = held(of(layout), 1)
    assert middle.weights == 2 * BLOCK and middle.gradients == 4 * (BLOCK / 4 + BLOCK)


def test_shards_have_either_logits_or_blocks_weights_and_gradients() -> None:
    shards = Layout(data=4, zero=3)
    backward, loss = held(of(shards)), held(of(shards, vocabulary=4_000))
    assert backward.logits == 0 < loss.logits
    embedding = 4_000 * 64
    assert loss.weights == 2 * (2 * embedding + NORM)
    # The embedding's gradient of the micro-batch before is whole until another one is reduced.
    shard = SHARD + (2 * embedding - 2 * EMBEDDING) / 4
    assert loss.gradients == 4 * (shard + embedding)
    for alone in (
        held(of(shards, vocabulary=4_000), micro_batches=1),
        held(of(replace(shards, overlaps=False), vocabulary=4_000)),
    ):
        assert alone.gradients == 4 * shard and alone.logits == loss.logits


def test_the_gradient_of_a_tied_embedding_is_whole_beside_those_of_blocks() -> None:
    shards = Layout(data=4, zero=2)
    tied, alone = held(of(shards, tied=True)), held(of(replace(shards, overlaps=False), tied=True))
    own = 4 * ((WHOLE - EMBEDDING) / 4 + BLOCK)
    # That of the micro-batch before is on its way, and that of the block before.
    assert tied.gradients == own + 4 * (2 * EMBEDDING + BLOCK)
    assert alone.gradients == own + 4 * EMBEDDING


def test_muon_keeps_one_moment_of_each_matrix_and_two_of_what_adamw_updates() -> None:
    matrices, others = 6 * 30_720, 6 * 128 + 2 * EMBEDDING
    each = (4 * matrices + 8 * others) / (matrices + others)
    assert held(of(), optimizer="muon").optimizer == round(each * WHOLE)
    middle = of(Layout(pipeline=3, blocks=(2, 2, 2), head_rank=2))
    assert held(middle, 1, optimizer="muon").optimizer == 2 * (4 * 30_720 + 8 * 128)


@pytest.mark.parametrize(
    ("work", "chunk", "logits"),
    [
        (of(), 32, 6_400 + 38_400 + 6_144),
        (of(), 10_000, 9_600 + 38_400 + 6_144),  # no chunk has more rows than there are tokens
        (of(kind="cpu"), 32, 6_400 + 38_400 + 12_288),
        (of(precision="fp32"), 32, 12_800 + 51_200 + 24_576),
        (of(Layout(tensor=2)), 32, 6_400 + 19_200 + 12_288),  # logits of two chunks
        (of(Layout(tensor=2), precision="fp32"), 32, 12_800 + 12_800 + 24_576),
        (of(Layout(tensor=8)), 32, 32 * 13 * 4 + 13 * 64 * 6 + 12_288),  # the last of 8 has fewer columns
    ],
)
def test_the_loss_holds_a_chunk_of_logits_and_the_heads_gradient(
    work: Workload, chunk: int, logits: int
) -> None:
    assert held(work, loss_chunk=chunk).logits == logits


@pytest.mark.parametrize(("precision", "logits"), [("fp32", 64_000 + 51_200), ("bf16", 32_000 + 38_400)])
def test_an_eager_loss_holds_its_logits_in_several_forms(precision: str, logits: int) -> None:
    streams = 2 * 48 * 64 * (4 if precision == "fp32" else 2)
    assert held(of(precision=precision, kind="cpu"), loss_chunk=32, fused=False).logits == logits + streams


MIDDLE = Layout(pipeline=3, blocks=(2, 2, 2), head_rank=2)  # holds two micro-batches of two blocks each


@pytest.mark.parametrize(
    ("work", "index", "training", "kept"),
    [
        (of(), 0, {}, 6 * 71_424 + 48 * 8),
        # What a block forms again lies where the logits were, and needs 20,480 bytes more than they did.
        (of(), 0, {"recompute": "full"}, 6 * 6_144 + 48 * 8 + 71_424 - 50_944),
        (of(MIDDLE), 1, {}, 2 * 2 * 71_424),
        (of(MIDDLE), 0, {}, 3 * (2 * 71_424 + 48 * 8)),
        (of(MIDDLE), 1, {"micro_batches": 1}, 2 * 71_424),
        (of(MIDDLE), 1, {"recompute": "full"}, 4 * 6_144 + 71_424),
        (of(MIDDLE), 1, {"recompute": "elementwise"}, 4 * 49_920 + 71_424 - 49_920),
        (of(MIDDLE), 1, {"recompute": "mlp"}, 4 * 31_488 + 71_424 - 31_488),
        (of(MIDDLE, kind="cpu", **DROPPED), 1, {"recompute": "selective"}, 2 * (2 * 70_656 + 256) + 15_360),
        (of(MIDDLE, position="alibi", norm="layernorm"), 1, {"fused": False}, 4 * (71_424 + 21_504)),
        (
            of(MIDDLE, position="alibi", norm="layernorm"),
            1,
            {"fused": False, "recompute": "full"},
            4 * 6_144 + 71_424 + 21_504,
        ),
    ],
)
def test_activations_are_those_of_all_blocks_and_micro_batches_under_way(
    work: Workload, index: int, training: dict[str, Any], kept: int
) -> None:
    assert held(work, index, **training).activations == kept


def test_a_stage_that_recomputes_apart_from_the_others_keeps_less() -> None:
    layout = replace(MIDDLE, recompute=("none", "full", "none"))
    assert held(of(layout), 1).activations == 4 * 6_144 + 71_424
    assert held(of(layout), 0).activations == 3 * (2 * 71_424 + 48 * 8)


@pytest.mark.parametrize(
    ("layout", "index", "buffers"),
    [
        (Layout(), 0, 2 * BLOCK),
        (MIDDLE, 1, 4 * 6_144 + 2 * BLOCK),
        (Layout(tensor=2), 0, 2 * 6_144 + BLOCK),
        (replace(MIDDLE, tensor=2), 1, 6 * 6_144 + BLOCK),
    ],
)
def test_messages_take_four_streams_between_stages_and_two_between_tensor_ranks(
    layout: Layout, index: int, buffers: int
) -> None:
    assert held(of(layout), index).buffers == buffers


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(offload=True), 4 * WHOLE),
        (Layout(offload=True, data=4, zero=1), WHOLE),
        (Layout(offload=True, rounds_by_block=True), 4 * BLOCK),
        (Layout(offload=True, data=4, zero=3), BLOCK),
    ],
)
def test_masters_that_come_from_the_cpus_memory_are_rounded_on_the_device(layout: Layout, more: int) -> None:
    kept = held(of(replace(layout, offload=False))).buffers
    assert held(of(layout)).buffers == kept + more


def test_an_eager_backward_holds_the_largest_gradient_alone() -> None:
    assert held(of(), fused=False).buffers == 2 * 2 * 96 * 64
    assert held(of(vocabulary=1_000), fused=False).buffers == 2 * 64_000  # of the embedding
    assert held(of(MIDDLE, vocabulary=1_000), 1, fused=False).buffers == 4 * 6_144 + 2 * 2 * 96 * 64
    assert held(of(MIDDLE, vocabulary=1_000, tied=True), 2, fused=False).buffers == 4 * 6_144 + 24_576
    assert held(of(ffn=64, kv_heads=4, activation="gelu"), fused=False).buffers == 2 * 3 * 64 * 64


def test_bigrams_are_counted_before_the_memory_of_a_step_is_needed() -> None:
    plain, counted = (held(of(vocabulary=1_000, embedding_init=init)) for init in ("normal", "bigram"))
    parameters = 6 * BLOCK + 2 * 64_000 + NORM
    later = 4 * parameters + plain.activations + plain.logits + plain.buffers
    assert counted.buffers == plain.buffers + 24 * 1_000**2 - later
    few = [held(of(embedding_init=init)).buffers for init in ("normal", "bigram")]
    assert few[0] == few[1], "24 bytes for each of 10,000 pairs fit where the step's memory will be"


def test_the_total_is_the_sum_of_all_parts_with_what_is_reserved() -> None:
    found = held(of(reserved_gib=1.5))
    assert found.reserved == 1.5 * 2**30
    parts = (found.weights, found.gradients, found.master, found.optimizer)
    assert found.total == sum(parts) + found.activations + found.logits + found.buffers + found.reserved


def test_tensor_ranks_share_all_but_norms_and_positions() -> None:
    shape: dict[str, Any] = {
        "position": "learned", "embedding_norm": True, "qk_norm": True, "norm": "layernorm",
    }  # fmt: skip
    work = of(Layout(tensor=2), **shape)
    parameters = count_parameters(work.model, vocabulary=100, sequence_length=16)
    block = 2 * (2 * 64) + 2 * 16 + 30_720 / 2
    both = StageParameters(blocks=3, has_embedding=True, has_head=True)
    positions, norm = 16 * 64, 2 * 64
    assert rank_parameters(parameters, both, work) == 3 * block + 3_200 + positions + norm + norm + 3_200
    last = replace(both, has_embedding=False)
    assert rank_parameters(parameters, last, work) == 3 * block + norm + 3_200
    tied = of(Layout(tensor=2), tied=True, **shape)
    parameters = count_parameters(tied.model, vocabulary=100, sequence_length=16)
    assert rank_parameters(parameters, last, tied) == 3 * block + norm + 3_200, "a copy of the embedding"
    assert rank_parameters(parameters, both, tied) == 3 * block + 3_200 + positions + norm + norm


@pytest.mark.parametrize(
    ("layout", "micro_batches", "held"),
    [
        ({"pipeline": 1, "schedule": "gpipe"}, 8, [1.0]),
        ({"pipeline": 1, "chunks": 2, "schedule": "interleaved"}, 8, [1.0]),
        ({"pipeline": 2}, 8, [2.0, 1.0]),
        ({"pipeline": 4}, 8, [4.0, 3.0, 2.0, 1.0]),
        ({"pipeline": 4}, 3, [3.0, 3.0, 2.0, 1.0]),
        ({"pipeline": 3, "schedule": "gpipe"}, 8, [8.0, 8.0, 8.0]),
        ({"pipeline": 3, "schedule": "zbv", "chunks": 2}, 8, [3.0, 3.0, 3.0]),
        ({"pipeline": 3, "schedule": "zbv", "chunks": 2}, 2, [2.0, 2.0, 2.0]),
        ({"pipeline": 4, "schedule": "interleaved", "chunks": 2}, 8, [5.5, 4.125, 2.75, 1.375]),
    ],
)
def test_a_stage_holds_the_micro_batches_that_its_schedule_has_begun(
    layout: dict[str, Any], micro_batches: int, held: list[float]
) -> None:
    work = of(Layout(**layout))
    training = Training(micro_batches=micro_batches, recompute="none", optimizer="adamw", loss_chunk=256)
    assert [in_flight(work, index, training) for index in range(len(held))] == held


@pytest.mark.parametrize(
    ("layout", "index", "buffers"),
    [
        # Gone by then are the inputs of six blocks, what one of them computed again, and the logits.
        (Layout(), 0, 2 * WHOLE - (6 * 6_144 + 48 * 8 + 71_424)),
        (MIDDLE, 1, 4 * 6_144 + 2 * 2 * BLOCK - (4 * 6_144 + 71_424) // 2),
        (Layout(data=2), 0, 2 * BLOCK),
        (Layout(tensor=2), 0, 2 * 6_144 + BLOCK),
        (Layout(rounds_by_block=True), 0, 2 * BLOCK),
    ],
)
def test_a_model_that_a_cpu_compiles_as_one_gives_all_its_gradients_at_its_end(
    layout: Layout, index: int, buffers: int
) -> None:
    assert held(of(layout, kind="cpu"), index, recompute="full").buffers == buffers
