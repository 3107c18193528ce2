"""The time of a step on a machine whose figures make it arithmetic, against the same arithmetic written anew.

Kernels start at once and products reach their share of the peak at any size, so each part of a step is
operations over a rate, or bytes over a rate and messages times a latency.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from bloomery.config.model import ModelSection
from bloomery.plan.block_cost import Workload, muon_s
from bloomery.plan.hardware import Accelerator, Hardware, Network, Node, Operation, Storage
from bloomery.plan.layout import Layout
from bloomery.plan.memory import (
    StageMemory,
    Training,
    eager_activation_bytes,
    mask_bytes,
    rank_parameters,
    stage_memory,
)
from bloomery.plan.parameters import ModelParameters, count_parameters, ffn_width
from bloomery.plan.step_time import StepTime, stages_for, step_time

PRODUCTS, ATTENTION = 50e12, 25e12  # operations a second
MEMORY, LINK, NETWORK = 1e15, 1e11, 2e10  # bytes a second: of a rank, of a rank's link, of a machine
LINK_S, NETWORK_S = 3e-6, 7e-6  # of one message
JITTER = 0.05
HARDWARE = Hardware(
    name="arithmetic",
    accelerator=Accelerator(
        memory_gib=1e6,
        memory_gb_per_s=2 * MEMORY / 1e9,
        memory_efficiency=0.5,
        bf16_teraflops=100.0,
        matmul_efficiency=0.5,
        matmul_half_size=0.0,
        attention_efficiency=0.25,
        kernel_us=0.0,
    ),
    node=Node(accelerators=8, link_gb_per_s=2 * LINK / 1e9, link_efficiency=0.5, link_us=LINK_S * 1e6),
    network=Network(gbit_per_s=2 * 8 * NETWORK / 1e9, efficiency=0.5, latency_us=NETWORK_S * 1e6),
    storage=Storage(read_gb_per_s=1e9),
    operation=Operation(step_jitter=JITTER),
)
HIDDEN, LAYERS, VOCABULARY, LENGTH, MICRO_BATCH = 1024, 8, 32_000, 512, 2
TOKENS = MICRO_BATCH * LENGTH
MODEL = ModelSection(layers=LAYERS, hidden=HIDDEN, heads=16, activation="gelu")
PARAMETERS = count_parameters(MODEL, vocabulary=VOCABULARY, sequence_length=LENGTH)
STREAM = TOKENS * HIDDEN * 2  # bytes of the activations between two blocks, in bf16


def of(layout: Layout, hardware: Hardware = HARDWARE) -> Workload:
    return Workload(
        model=MODEL,
        vocabulary=VOCABULARY,
        sequence_length=LENGTH,
        micro_batch=MICRO_BATCH,
        precision="bf16",
        layout=layout,
        hardware=hardware,
    )


def step(layout: Layout, *, micro_batches: int = 4, recompute: str = "none", **more: Hardware) -> StepTime:
    batch = micro_batches * MICRO_BATCH * layout.data
    return step_time(of(layout, **more), PARAMETERS, global_batch=batch, recompute=recompute)


def held(layout: Layout) -> float:
    """The parameters of the rank that has the most."""
    work = of(layout)
    return max(rank_parameters(PARAMETERS, stage, work) for stage in stages_for(work, PARAMETERS))


def ring(size: float, ranks: int, *, rate: float, latency: float, passes: int = 1) -> float:
    return passes * (ranks - 1) * (size / ranks / rate + latency)


def block(tensor: int, *, forwards: int = 1) -> float:
    """Seconds of a block's products in one micro-batch: a backward is two forwards, of attention 2.5."""
    linear = 2 * 12 * HIDDEN**2 * TOKENS / tensor / PRODUCTS
    attention = 2 * MICRO_BATCH * LENGTH**2 * HIDDEN / tensor / ATTENTION
    return (forwards + 2) * linear + (forwards + 2.5) * attention


def head(tensor: int) -> float:
    return 3 * 2 * TOKENS * HIDDEN * VOCABULARY / tensor / PRODUCTS


def moved(layout: Layout, blocks: int, parameters: float, *, forwards: int = 1) -> float:
    """Bytes that a rank of one stage moves in one micro-batch, with embedding and head."""
    tensor = layout.tensor
    residual = 10 * STREAM / (tensor if layout.sequence else 1)
    inner = 2 * 4 * STREAM / tensor
    rotated = 2 * 2 * STREAM / tensor
    ends = 3 * 2 * STREAM + TOKENS * VOCABULARY / tensor * (4 * 4 + 3 * 2)
    return (forwards + 2) * blocks * (residual + inner + rotated) + ends + 10 * parameters


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [1, 4, 16])
def test_computing_moving_and_reducing_within_a_stage(tensor: int, sequence: bool, recompute: str) -> None:
    layout = Layout(tensor=tensor, sequence=sequence)
    taken = step(layout, micro_batches=3, recompute=recompute)
    forwards = 2 if recompute == "full" else 1
    assert taken.compute_s == pytest.approx(3 * (LAYERS * block(tensor, forwards=forwards) + head(tensor)))
    bytes_moved = moved(layout, LAYERS, held(layout), forwards=forwards)
    assert taken.memory_s == pytest.approx(3 * bytes_moved / MEMORY)
    rate, latency = (LINK, LINK_S) if tensor <= 8 else (NETWORK, NETWORK_S)
    exchange = ring(STREAM, tensor, rate=rate, latency=latency, passes=2)
    exchanges = LAYERS * 2 * (forwards + 1) + 2
    assert taken.tensor_s == pytest.approx(3 * exchanges * exchange)
    assert taken.update_s == pytest.approx(34 * held(layout) / MEMORY)
    assert taken.pipeline_bubble_s == taken.pipeline_transfer_s == taken.data_parallel_s == 0
    done = taken.compute_s + taken.memory_s + taken.tensor_s + taken.update_s
    machines = max(1, tensor // 8)
    assert taken.waiting_s == pytest.approx(done * JITTER * math.sqrt(2 * math.log(machines)))
    assert taken.seconds == pytest.approx(done + taken.waiting_s)
    assert taken.low_s == pytest.approx(0.83 * taken.seconds)
    assert taken.high_s == pytest.approx(1.2 * taken.seconds)
    by_time = {"compute": taken.compute_s, "memory": taken.memory_s + taken.update_s, "TP": taken.tensor_s}
    assert taken.bottleneck == max(by_time, key=lambda name: by_time[name])


@pytest.mark.parametrize("recompute", ["none", "full", "mlp"])
@pytest.mark.parametrize("link", [LINK, LINK / 1000])
def test_products_hide_the_exchanges_of_blocks_but_for_one_ranks_part(link: float, recompute: str) -> None:
    gpu = replace(HARDWARE.accelerator, kind="gpu", exponential_ns=0.0, attention_pass_ns=0.0)
    node = replace(HARDWARE.node, link_gb_per_s=2 * link / 1e9, overlap=0.8)
    hardware = replace(HARDWARE, accelerator=gpu, node=node)
    layout = Layout(tensor=4, sequence=True)

    def tensor_s(*, overlaps: bool) -> float:
        chosen = replace(layout, async_tensor=overlaps)
        return step(chosen, micro_batches=3, recompute=recompute, hardware=hardware).tensor_s

    exchange = ring(STREAM, 4, rate=link, latency=LINK_S, passes=2)
    forward_s = 2 * 12 * HIDDEN**2 * TOKENS / 4 / PRODUCTS
    forwards = 2 if recompute == "full" else 1
    # A backward's products by inputs take as long as a forward's.
    visible = (forwards + 1) * max(2 * exchange - 0.8 * forward_s, 2 * exchange / 4)
    gather = 0.0
    if recompute == "mlp":
        # MLP's two products are two thirds of a forward's, and one exchange is a gather and a scatter.
        gather = max(exchange - 0.8 * forward_s * 2 / 3, exchange / 4)
    ends = 2 * exchange
    assert tensor_s(overlaps=True) == pytest.approx(3 * (LAYERS * (visible + gather) + ends))
    # What 'mlp' repeats of it may cost more than it hides, over slow links.
    assert recompute == "mlp" or tensor_s(overlaps=True) < tensor_s(overlaps=False)


@pytest.mark.parametrize(
    ("schedule", "chunks", "left"), [("1f1b", 1, 1.0), ("interleaved", 2, 0.5), ("zero-bubble", 1, 1 / 3)]
)
def test_filling_a_pipeline_costs_each_other_stage_once(schedule: str, chunks: int, left: float) -> None:
    layout = Layout(pipeline=4, schedule=schedule, chunks=chunks, blocks=(3, 2, 2, 1), head_rank=3)
    taken = step(layout)
    work = of(layout)
    stages = stages_for(work, PARAMETERS)
    of_stage = [
        block(1) * stage.blocks
        + (head(1) if stage.has_head else 0)
        + (moved(layout, stage.blocks, rank_parameters(PARAMETERS, stage, work)) - between(stage)) / MEMORY
        for stage in stages
    ]
    assert taken.compute_s + taken.memory_s == pytest.approx(4 * max(of_stage))
    assert taken.pipeline_bubble_s == pytest.approx(left * (sum(of_stage) - max(of_stage)))
    message = STREAM / LINK + LINK_S
    assert taken.pipeline_transfer_s == pytest.approx(2 * message * (3 + 0.2 * 4 * chunks))


def between(stage: object) -> float:
    """Bytes of embedding and head that a stage without them does not move."""
    embedding, logits = 3 * 2 * STREAM, TOKENS * VOCABULARY * (4 * 4 + 3 * 2)
    return embedding * (not stage.has_embedding) + logits * (not stage.has_head)


def test_stages_on_several_machines_share_the_network_of_one() -> None:
    taken = step(Layout(pipeline=4, tensor=4, blocks=(2, 2, 2, 2), head_rank=3))
    message = STREAM / (NETWORK / 8) + NETWORK_S
    assert taken.pipeline_transfer_s == pytest.approx(2 * message * (3 + 0.2 * 4))
    split = step(Layout(pipeline=4, tensor=4, sequence=True, blocks=(2, 2, 2, 2), head_rank=3))
    message = STREAM / 4 / (NETWORK / 8) + NETWORK_S
    assert split.pipeline_transfer_s == pytest.approx(2 * message * (3 + 0.2 * 4))


@pytest.mark.parametrize(
    ("layout", "rate"),
    [
        (Layout(pipeline=4, blocks=(2, 2, 2, 2), head_rank=3), LINK),
        (Layout(pipeline=2, data=4, zero=1), LINK),  # each rank has a quarter of the gradient
        (Layout(pipeline=4, tensor=4, blocks=(2, 2, 2, 2), head_rank=3), NETWORK / 8),
        (Layout(pipeline=2, schedule="zbv", chunks=2, head_rank=0), math.inf),  # one rank has both ends
        (Layout(data=4), math.inf),
    ],
)
def test_a_pipelines_ends_sum_a_tied_embedding_once_a_step(layout: Layout, rate: float) -> None:
    tied, untied = (
        step_time(
            replace(of(layout), model=replace(MODEL, tied=tied)),
            PARAMETERS,
            global_batch=4 * MICRO_BATCH * layout.data,
            recompute="none",
        ).pipeline_transfer_s
        for tied in (True, False)
    )
    latency = {LINK: LINK_S, NETWORK / 8: NETWORK_S, math.inf: 0.0}[rate]
    size = 4 * VOCABULARY * HIDDEN / layout.tensor / layout.shards
    assert tied - untied == pytest.approx(ring(size, 2, rate=rate, latency=latency, passes=2))


OVERLAP = HARDWARE.node.overlap


def exposed(exchange: float, *, beside: float) -> float:
    """What computing for so many seconds beside an exchange leaves of it: a tenth at least."""
    return max(exchange - OVERLAP * beside, 0.1 * exchange)


def slot_s(taken: StepTime, micro_batches: int) -> float:
    return (taken.compute_s + taken.memory_s + taken.tensor_s) / micro_batches


def test_plain_data_parallelism_reduces_beside_the_last_backward() -> None:
    for layout, per_link in (
        (Layout(data=8), LINK),
        (Layout(data=16), NETWORK),
        (Layout(data=16, tensor=4), NETWORK / 4),  # four groups share each machine's network
    ):
        latency = LINK_S if per_link == LINK else NETWORK_S
        reduced = ring(4 * held(layout), layout.data, rate=per_link, latency=latency, passes=2)
        taken = step(layout)
        beside = 2 / 3 * slot_s(taken, 4)
        assert taken.data_parallel_s == pytest.approx(exposed(reduced, beside=beside))
        one_after_the_other = step(replace(layout, overlaps=False))
        assert one_after_the_other.data_parallel_s == pytest.approx(reduced)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_hide_what_computing_can_hide(zero: int) -> None:
    layout = Layout(data=8, zero=zero)
    micro_batches = 4
    taken = step(layout, micro_batches=micro_batches)
    scattered = ring(4 * PARAMETERS.total, 8, rate=LINK, latency=LINK_S)
    scattered *= micro_batches if zero >= 2 else 1
    gathered = ring(2 * PARAMETERS.total, 8, rate=LINK, latency=LINK_S)
    slot = slot_s(taken, micro_batches)
    if zero == 3:
        gathered *= 2 * micro_batches
        expected = exposed(scattered + gathered, beside=slot * micro_batches)
    else:  # weights are gathered after the update, beside the first forward
        expected = exposed(gathered, beside=1 / 3 * slot)
        expected += exposed(scattered, beside=2 / 3 * slot * (micro_batches if zero == 2 else 1))
    assert taken.data_parallel_s == pytest.approx(expected)
    bare = step(replace(layout, overlaps=False), micro_batches=micro_batches)
    assert bare.data_parallel_s == pytest.approx(scattered + gathered)
    assert taken.update_s == pytest.approx(34 * PARAMETERS.total / 8 / MEMORY)
    offloaded = step(replace(layout, offload=True))
    assert offloaded.update_s == pytest.approx((34 + 0.1 * 8) * PARAMETERS.total / 8 / 20e9)


@pytest.mark.parametrize("zero", [1, 2])
def test_sums_that_take_longer_than_backwards_hide_beside_backwards_alone(zero: int) -> None:
    layout, rate = Layout(data=8, zero=zero), LINK / 10
    node = replace(HARDWARE.node, link_gb_per_s=2 * rate / 1e9)
    taken = step(layout, hardware=replace(HARDWARE, node=node))
    times = 4 if zero == 2 else 1
    scattered = times * ring(4 * PARAMETERS.total, 8, rate=rate, latency=LINK_S)
    gathered = ring(2 * PARAMETERS.total, 8, rate=rate, latency=LINK_S)
    hidden = OVERLAP * 2 / 3 * slot_s(taken, 4) * times
    hidden_gathers = OVERLAP * 1 / 3 * slot_s(taken, 4)
    assert 0.1 * scattered < scattered - hidden < scattered
    assert 0.1 * gathered < gathered - hidden_gathers < gathered
    assert taken.data_parallel_s == pytest.approx(gathered - hidden_gathers + scattered - hidden)


def test_the_machines_own_overlap_is_taken() -> None:
    layout = Layout(data=8, zero=2)
    node = replace(HARDWARE.node, overlap=0.0)
    unhidden = step(layout, hardware=replace(HARDWARE, node=node))
    assert unhidden.data_parallel_s == pytest.approx(step(replace(layout, overlaps=False)).data_parallel_s)


def test_shards_within_machines_reduce_between_them_once() -> None:
    layout = Layout(data=32, zero=1, shard=8)
    taken = step(layout)
    across = ring(4 * PARAMETERS.total / 8, 4, rate=NETWORK / 8, latency=NETWORK_S, passes=2)
    scattered = ring(4 * PARAMETERS.total, 8, rate=LINK, latency=LINK_S)
    gathered = ring(2 * PARAMETERS.total, 8, rate=LINK, latency=LINK_S)
    slot = slot_s(taken, 4)
    shown = exposed(gathered, beside=1 / 3 * slot) + exposed(scattered, beside=2 / 3 * slot)
    assert taken.data_parallel_s == pytest.approx(across + shown)


def test_data_read_more_slowly_than_it_is_trained_on_is_waited_for() -> None:
    slow = replace(HARDWARE, storage=Storage(read_gb_per_s=1e-6))
    taken = step(Layout(), hardware=slow)
    reading = 4 * MICRO_BATCH * LENGTH * 4 / 1e3
    assert taken.seconds == pytest.approx(reading) and taken.data_s > 0.9 * reading
    assert taken.bottleneck == "data"
    assert step(Layout()).data_s == 0


def test_nodes_wait_for_the_slowest_for_a_share_of_all_that_a_step_does() -> None:
    made = step(Layout(pipeline=2, data=16, zero=1))  # 4 nodes
    done = made.seconds - made.waiting_s - made.data_s
    assert made.pipeline_bubble_s > 0.0 and made.data_parallel_s > 0.0
    assert made.waiting_s == pytest.approx(JITTER * math.sqrt(2 * math.log(4)) * done)


def test_what_a_pipeline_idles_and_sends_is_one_part_of_a_step() -> None:
    parts = dict.fromkeys((field.name for field in fields(StepTime)), 0.0)
    made = StepTime(**{**parts, "compute_s": 3.0, "pipeline_bubble_s": 2.0, "pipeline_transfer_s": 2.0})
    assert made.bottleneck == "PP bubble" and made.seconds == 7.0


def test_parameters_of_the_model_are_those_of_its_matrices() -> None:
    assert isinstance(PARAMETERS, ModelParameters)
    matrices = LAYERS * 12 * HIDDEN**2 + 2 * VOCABULARY * HIDDEN
    assert PARAMETERS.total - matrices == (2 * LAYERS + 1) * HIDDEN  # norms


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("norm", "activation", "position"), [("rmsnorm", "swiglu", "rotary"), ("layernorm", "gelu", "alibi")]
)
def test_a_block_that_nothing_fuses_keeps_its_norms_gates_and_turned_heads(
    sequence: bool, norm: str, activation: str, position: str
) -> None:
    tensor, ffn, kv_heads = 4, 2816, 4
    model = replace(MODEL, norm=norm, activation=activation, position=position, ffn=ffn, kv_heads=kv_heads)
    work = replace(of(Layout(tensor=tensor, sequence=sequence)), model=model)
    stream = TOKENS * HIDDEN / (tensor if sequence else 1)
    expected = 2 * stream * (4 - 2)  # two norms in fp32, instead of what they are made of in bf16
    if norm == "rmsnorm":
        expected += 2 * stream * 4  # and what is normalised
    if activation == "swiglu":
        expected += TOKENS * ffn * 2 / tensor
    if position == "rotary":
        expected += TOKENS * (HIDDEN + kv_heads * HIDDEN // 16) * 2 / tensor
    assert eager_activation_bytes(work) == pytest.approx(expected)


def test_the_mask_is_counted_once_where_it_is_formed() -> None:
    def bytes_of(*, kind: str = "cpu", documents: bool = False, **model: Any) -> float:
        hardware = replace(HARDWARE, accelerator=replace(HARDWARE.accelerator, kind=kind))
        work = of(Layout(tensor=4), hardware)
        return mask_bytes(replace(work, model=replace(MODEL, **model), masks_documents=documents))

    places = LENGTH**2
    assert bytes_of() == 0
    assert bytes_of(position="alibi") == places * 4 * 2  # four of sixteen heads, in bf16
    assert bytes_of(documents=True) == MICRO_BATCH * places * 2
    assert bytes_of(documents=True, position="alibi") == MICRO_BATCH * places * 4 * 2
    assert bytes_of(attention_dropout=0.1) == places  # boolean
    assert bytes_of(attention_dropout=0.1, position="alibi") == places * 4 * 4
    for documents in (False, True):
        assert bytes_of(kind="gpu", documents=documents, position="alibi") == 0  # by tiles
    cpu = replace(HARDWARE, accelerator=replace(HARDWARE.accelerator, kind="cpu"))
    works = [replace(of(Layout(), cpu), masks_documents=masks) for masks in (False, True)]
    training = Training(micro_batches=4, recompute="full", optimizer="adamw", loss_chunk=256)
    held = [
        stage_memory(work, PARAMETERS, stages_for(work, PARAMETERS), 0, training).activations
        for work in works
    ]
    assert held[1] - held[0] == MICRO_BATCH * places * 2


def test_weights_rounded_block_by_block_cost_passes_over_the_masters_and_save_all_blocks_but_one() -> None:
    kept, by_block = (of(Layout(rounds_by_block=rounds)) for rounds in (False, True))
    stages = stages_for(kept, PARAMETERS)
    training = Training(micro_batches=4, recompute="none", optimizer="adamw", loss_chunk=256)
    saved = [stage_memory(work, PARAMETERS, stages, 0, training).weights for work in (kept, by_block)]
    assert saved[0] - saved[1] == 2 * (LAYERS - 1) * PARAMETERS.block.total
    steps = [
        step_time(work, PARAMETERS, global_batch=4 * MICRO_BATCH, recompute="none")
        for work in (kept, by_block)
    ]
    passes = 2 * 4 * (4 + 2) * rank_parameters(PARAMETERS, stages[0], kept) / MEMORY
    assert steps[1].update_s - steps[0].update_s == pytest.approx(passes)


def test_a_compiled_backward_holds_the_gradients_of_all_that_was_compiled_at_once() -> None:
    def buffers(layout: Layout, *, fused: bool, tokens: int, kind: str = "cpu") -> StageMemory:
        hardware = replace(HARDWARE, accelerator=replace(HARDWARE.accelerator, kind=kind))
        work = replace(of(layout, hardware), micro_batch=1, sequence_length=tokens, vocabulary=64)
        training = Training(micro_batches=4, recompute="none", optimizer="adamw", loss_chunk=256, fused=fused)
        return stage_memory(work, parameters, stages_for(work, parameters), 0, training)

    parameters = count_parameters(MODEL, vocabulary=64, sequence_length=LENGTH)
    largest = 4 * HIDDEN**2
    alone, several = Layout(), Layout(data=8)
    for layout in (alone, several):
        assert buffers(layout, fused=False, tokens=8).buffers == 2 * largest
    few = buffers(alone, fused=True, tokens=8)
    assert few.buffers == pytest.approx(2 * parameters.total - few.activations - few.logits)
    assert few.buffers > 2 * largest
    assert buffers(alone, fused=True, tokens=2**20).buffers == 2 * largest  # activations took more before
    assert buffers(several, fused=True, tokens=8).buffers == 2 * parameters.block.total
    assert buffers(alone, fused=True, tokens=8, kind="gpu").buffers == 2 * parameters.block.total


@pytest.mark.parametrize(("activation", "matrices"), [("gelu", 2), ("swiglu", 3)])
def test_muon_multiplies_each_matrix_three_times_an_iteration(activation: str, matrices: int) -> None:
    """X·Xᵀ and its product with X take the long side, the square of X·Xᵀ the short one alone."""
    model = replace(MODEL, activation=activation, kv_heads=4)
    work = replace(of(Layout(tensor=4)), model=model, muon_iterations=5)
    inner, narrow = ffn_width(model), HIDDEN // 4
    wide = 2 * HIDDEN**3 + 2 * narrow**2 * HIDDEN + matrices * HIDDEN**2 * inner
    square = 2 * HIDDEN**3 + 2 * narrow**3 + matrices * HIDDEN**3
    operations = 2 * (2 * wide + square) * 5 * LAYERS / 4
    assert muon_s(work, LAYERS) == pytest.approx(operations / PRODUCTS)
