"""Seconds of single operations, on a machine whose figures are round, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bloomery.config.model import ModelSection
from bloomery.plan.block_cost import (
    Workload,
    accumulation_s,
    attention_passes,
    block_passes,
    elementwise_pass,
    embedding_passes,
    expansion,
    head_passes,
    internode_bytes_per_s,
    matmul_s,
    moving_s,
    ring_s,
)
from bloomery.plan.hardware import Accelerator, Hardware, Network, Node
from bloomery.plan.layout import Layout

MODEL = ModelSection(layers=6, hidden=64, heads=4, kv_heads=2, ffn=96)  # SwiGLU, heads of 16, rotary
TOKENS, STREAM = 48, 6_144  # three samples of 16 tokens; bytes in bf16


def machine(*, link_gb_per_s: float = 2.0, gbit_per_s: float = 8.0, **accelerator: Any) -> Hardware:
    figures = {
        "memory_gib": 1.0,
        "memory_gb_per_s": 2.0,
        "memory_efficiency": 0.5,  # 1e9 bytes a second
        "bf16_teraflops": 1.0,
        "matmul_efficiency": 0.5,
        "matmul_half_size": 0.0,
        "attention_efficiency": 0.25,
        "kernel_us": 0.0,
    }
    return Hardware(
        name="round",
        accelerator=Accelerator(**{**figures, **accelerator}),
        node=Node(accelerators=8, link_gb_per_s=link_gb_per_s, link_efficiency=0.5, link_us=3.0),
        network=Network(gbit_per_s=gbit_per_s, efficiency=0.25, latency_us=7.0),
    )


def of(
    layout: Layout | None = None,
    *,
    hardware: Hardware | None = None,
    precision: str = "bf16",
    masks_documents: bool = False,
    **model: Any,
) -> Workload:
    return Workload(
        model=replace(MODEL, **model),
        vocabulary=101,
        sequence_length=16,
        micro_batch=3,
        precision=precision,
        layout=layout or Layout(),
        hardware=hardware or machine(memory_gb_per_s=2e9),
        masks_documents=masks_documents,
    )


SIDES = {"rows": 96, "columns": 32, "inner": 224}
OPERATIONS, MOVED = 2 * 96 * 32 * 224, 96 * 224 + 224 * 32 + 96 * 32


@pytest.mark.parametrize(
    ("accelerator", "precision", "count", "seconds"),
    [
        ({"memory_gb_per_s": 2e9}, "bf16", 1, OPERATIONS / 0.5e12),
        ({"memory_gb_per_s": 2e9}, "bf16", 3, 3 * OPERATIONS / 0.5e12),
        # each side loses by its own length: 96 of 128, 32 of 64 and 224 of 256
        (
            {"memory_gb_per_s": 2e9, "matmul_half_size": 32.0},
            "bf16",
            1,
            OPERATIONS / (0.5e12 * 3 / 4 * 1 / 2 * 7 / 8),
        ),
        ({}, "bf16", 1, 2 * MOVED / 1e9),
        ({}, "bf16", 5, 5 * 2 * MOVED / 1e9),
        ({"kernel_us": 40.0}, "bf16", 5, 5 * 2 * MOVED / 1e9 + 40e-6),
        ({"fp32_teraflops": 8.0}, "fp32", 1, 4 * MOVED / 1e9),
        (
            {"memory_gb_per_s": 2e9, "fp8_teraflops": 4.0, "fp8_efficiency": 0.1},
            "fp8",
            1,
            OPERATIONS / 0.4e12,
        ),
        ({"memory_gb_per_s": 2e9, "fp16_teraflops": 2.0}, "fp16", 1, OPERATIONS / 1e12),
        (
            {"memory_gb_per_s": 2e9, "bf16_teraflops": 0.0, "fp32_teraflops": 0.25},
            "bf16",
            1,
            OPERATIONS / 0.125e12,
        ),
    ],
)
def test_a_matmul_takes_its_arithmetic_or_its_memory_and_a_start(
    accelerator: dict[str, float], precision: str, count: int, seconds: float
) -> None:
    taken = matmul_s(machine(**accelerator), precision, count=count, **SIDES)
    assert taken == pytest.approx(seconds)


def test_each_kernel_that_moves_bytes_starts_once() -> None:
    assert moving_s(machine(kernel_us=2.0), 5e6, kernels=3) == pytest.approx(5e-3 + 6e-6)
    assert moving_s(machine(kernel_us=2.0), 5e6) == pytest.approx(5e-3 + 2e-6)
    assert accumulation_s(of(hardware=machine(kernel_us=2.0)), 700.0) == pytest.approx(7e-6 + 2e-6)


@pytest.mark.parametrize(
    ("ranks", "passes", "per_node", "sharing", "seconds"),
    [
        (1, 2, 1, 1, 0.0),
        (4, 1, 4, 2, 3 / 4 * 6e6 / 1e9 + 3 * 3e-6),  # inside a machine each has a link of its own
        (4, 2, 8, 1, 2 * 3 / 4 * 6e6 / 1e9 + 6 * 3e-6),
        (4, 2, 2, 1, 2 * 3 / 4 * 6e6 / 0.25e9 + 6 * 7e-6),
        (4, 2, 2, 3, 3 * 2 * 3 / 4 * 6e6 / 0.25e9 + 6 * 7e-6),
    ],
)
def test_a_ring_is_as_quick_as_its_slowest_link_and_its_hops(
    ranks: int, passes: int, per_node: int, sharing: int, seconds: float
) -> None:
    taken = ring_s(machine(), 6e6, ranks, passes=passes, per_node=per_node, sharing=sharing)
    assert taken == pytest.approx(seconds)


def test_a_slow_link_inside_a_machine_slows_a_ring_over_several() -> None:
    slow_inside = machine(link_gb_per_s=0.02)
    across = {"passes": 1, "sharing": 1}
    assert ring_s(slow_inside, 6e6, 4, per_node=2, **across) == pytest.approx(4.5e6 / 1e7 + 21e-6)
    assert ring_s(slow_inside, 6e6, 4, per_node=1, **across) == pytest.approx(4.5e6 / 0.25e9 + 21e-6)


@pytest.mark.parametrize(
    ("link_gb_per_s", "gbit_per_s", "speed"), [(4.0, 8.0, 0.25e9), (4.0, 0.0, 2e9), (0.0, 0.0, 1e9)]
)
def test_machines_without_a_network_are_joined_by_their_links(
    link_gb_per_s: float, gbit_per_s: float, speed: float
) -> None:
    assert internode_bytes_per_s(machine(link_gb_per_s=link_gb_per_s, gbit_per_s=gbit_per_s)) == speed


EXCHANGE = 2 * 1 / 2 * STREAM / 1e9 + 2 * 3e-6  # an all_reduce of the stream between two ranks


def test_an_embedding_moves_twice_as_much_backward_and_is_reduced_forward() -> None:
    passes = embedding_passes(of(Layout(tensor=2), hardware=machine(kernel_us=2.0)))
    assert passes.forward.memory_s == pytest.approx(2 * STREAM / 1e9 + 2e-6)
    assert passes.backward.memory_s == pytest.approx(4 * STREAM / 1e9 + 2e-6)
    assert passes.forward.tensor_s == pytest.approx(EXCHANGE)
    assert passes.backward.tensor_s == passes.forward.compute_s == passes.backward.compute_s == 0.0


def test_a_head_multiplies_once_forward_and_twice_backward_and_passes_over_its_logits() -> None:
    passes = head_passes(of(Layout(tensor=2)))
    columns = 51  # of 101, on the rank that has more
    product = 2 * TOKENS * columns * 64 / 0.5e12
    assert passes.forward.compute_s == pytest.approx(product)
    assert passes.backward.compute_s == pytest.approx(2 * product)
    assert passes.backward.tensor_s == pytest.approx(EXCHANGE) and passes.forward.tensor_s == 0.0
    slow = machine(kernel_us=2.0, exponential_ns=4.0)
    forward = head_passes(of(Layout(tensor=2), hardware=slow)).forward
    logits = TOKENS * columns
    assert forward.memory_s == pytest.approx(logits * 22 / 1e9 + 6 * 2e-6 + logits * 4e-9)
    wide = head_passes(of(hardware=machine(memory_gb_per_s=2e9, fp8_teraflops=50.0), precision="fp8"))
    assert wide.forward.compute_s == pytest.approx(2 * TOKENS * 101 * 64 / 0.5e12), "heads stay in bf16"


HEADS = 3 * 4  # of all samples
SCORES = 16 * 16


def test_fused_attention_computes_the_causal_half_and_five_matmuls_backward() -> None:
    passes = attention_passes(of(hardware=machine(attention_pass_ns=5.0, kernel_us=2.0)))
    causal = 2 * HEADS * SCORES * 16 / 0.25e12
    weights = HEADS * SCORES / 2 * 5e-9
    assert passes.forward.compute_s == pytest.approx(causal + weights + 2e-6)
    assert passes.backward.compute_s == pytest.approx(2.5 * causal + 2 * weights + 4e-6)
    split = attention_passes(of(Layout(tensor=2), hardware=machine(attention_pass_ns=5.0)))
    assert split.forward.compute_s == pytest.approx((causal + weights) / 2)


def test_attention_that_drops_weights_in_memory_passes_over_them() -> None:
    slow = {"kind": "cpu", "kernel_us": 2.0}
    passes = attention_passes(of(hardware=machine(**slow), attention_dropout=0.1))
    moved = HEADS * SCORES * 2
    assert passes.forward.memory_s == pytest.approx(6 * moved / 1e9 + 3 * 2e-6)
    assert passes.backward.memory_s == pytest.approx(8 * moved / 1e9 + 4 * 2e-6)
    quick = machine(kind="cpu", memory_gb_per_s=2e9)
    passes = attention_passes(of(Layout(tensor=2), hardware=quick, attention_dropout=0.1))
    products = 2 * 2 * HEADS / 2 * SCORES * 16 / 0.5e12  # scores, and values by their weights
    assert passes.forward.compute_s == pytest.approx(products)
    assert passes.backward.compute_s == pytest.approx(2 * products)


@pytest.mark.parametrize(
    ("layout", "model", "moved"),
    [
        (Layout(), {}, 10 * STREAM + 3 * 9_216 + 2 * 9_216),
        (Layout(), {"hidden_dropout": 0.1}, 12 * STREAM + 3 * 9_216 + 2 * 9_216),
        (Layout(), {"activation": "gelu"}, 10 * STREAM + 2 * 9_216 + 2 * 9_216),
        (Layout(), {"position": "alibi"}, 10 * STREAM + 3 * 9_216),
        (Layout(tensor=2), {}, 10 * STREAM + 3 * 4_608 + 2 * 4_608),
        (Layout(tensor=2, sequence=True), {}, 5 * STREAM + 3 * 4_608 + 2 * 4_608),
    ],
)
def test_norms_and_the_activation_pass_over_their_streams(
    layout: Layout, model: dict[str, Any], moved: int
) -> None:
    spent = elementwise_pass(of(layout, hardware=machine(kernel_us=2.0), **model))
    assert spent.memory_s == pytest.approx(moved / 1e9 + 6 * 2e-6)
    assert spent.compute_s == spent.tensor_s == 0.0


def test_a_block_multiplies_by_its_four_matrices_and_is_reduced_twice_each_way() -> None:
    work = of(Layout(tensor=2))
    passes, attention, elementwise = block_passes(work), attention_passes(work), elementwise_pass(work)
    linear = 2 * TOKENS * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 96 * 64) / 2 / 0.5e12
    assert passes.forward.compute_s == pytest.approx(linear + attention.forward.compute_s)
    assert passes.backward.compute_s == pytest.approx(2 * linear + attention.backward.compute_s)
    assert passes.backward.memory_s == pytest.approx(2 * elementwise.memory_s)
    assert passes.forward.tensor_s == passes.backward.tensor_s == pytest.approx(2 * EXCHANGE)


@pytest.mark.parametrize(
    ("kind", "precision", "model", "by_tiles"),
    [
        ("gpu", "bf16", {}, True),
        ("gpu", "fp32", {}, False),
        ("cpu", "bf16", {}, False),
        ("gpu", "bf16", {"head_dim": 128}, True),
        ("gpu", "bf16", {"head_dim": 130}, False),
    ],
)
def test_scores_and_masks_are_formed_where_no_kernel_attends_by_tiles(
    kind: str, precision: str, model: dict[str, int], by_tiles: bool
) -> None:
    hardware = machine(kind=kind, fp32_teraflops=1.0)
    plain = of(hardware=hardware, precision=precision, **model)
    dropping = replace(plain, model=replace(plain.model, attention_dropout=0.1))
    assert plain.attends_by_tiles is by_tiles
    assert not plain.forms_scores and dropping.forms_scores is not by_tiles
    alibi = replace(plain, model=replace(plain.model, position="alibi"))
    masked = replace(plain, masks_documents=True)
    assert not plain.forms_mask
    assert [work.forms_mask for work in (dropping, alibi, masked)] == [not by_tiles] * 3


@pytest.mark.parametrize(
    ("units", "precision", "teraflops"),
    [
        ({"bf16_teraflops": 1.0, "fp8_teraflops": 4.0, "fp8_efficiency": 0.25}, "fp8", 4.0 * 0.25),
        ({"bf16_teraflops": 1.0, "fp16_teraflops": 9.0}, "fp8", 1.0 * 0.55),
        ({"bf16_teraflops": 0.0, "fp16_teraflops": 3.0, "fp32_teraflops": 7.0}, "bf16", 3.0 * 0.5),
        ({"bf16_teraflops": 0.0, "fp32_teraflops": 7.0}, "bf16", 7.0 * 0.5),
        ({"bf16_teraflops": 1.0, "fp32_teraflops": 7.0}, "fp32", 7.0 * 0.5),
    ],
)
def test_what_the_machine_has_no_units_for_is_computed_by_the_next_best(
    units: dict[str, float], precision: str, teraflops: float
) -> None:
    hardware = machine(memory_gb_per_s=1e9, **units)
    spent = matmul_s(hardware, precision, rows=64, columns=64, inner=64)
    assert spent == pytest.approx(2 * 64**3 / (teraflops * 1e12))


def test_machines_without_links_reduce_over_their_network() -> None:
    unlinked = machine(link_gb_per_s=0.0)
    sent = 2 * 3 / 4 * 1e6
    across = ring_s(unlinked, 1e6, 4, passes=2, per_node=2, sharing=1)
    assert across == pytest.approx(sent / 0.25e9 + 6 * 7e-6)
    assert ring_s(unlinked, 1e6, 1, passes=2, per_node=2, sharing=1) == 0.0
    assert ring_s(unlinked, 1e6, 2, passes=2, per_node=2, sharing=1) == pytest.approx(2 * 3e-6)


@pytest.mark.parametrize(("scaling", "speed"), [("row", 0.95), ("block", 0.75), ("mx", 0.95)])
def test_products_in_8_bits_are_slower_with_many_scales_and_others_are_as_fast(
    scaling: str, speed: float
) -> None:
    machines = machine(memory_gb_per_s=2e9, fp8_teraflops=4.0)
    plain, fine = (
        replace(of(hardware=machines, precision="fp8"), fp8_scaling=name) for name in ("tensor", scaling)
    )
    attention = attention_passes(plain)
    for part in ("forward", "backward"):
        one, many = (getattr(block_passes(work), part).compute_s for work in (plain, fine))
        others = getattr(attention, part).compute_s
        assert many - others == pytest.approx((one - others) / speed)
    assert expansion(fine).compute_s == pytest.approx(expansion(plain).compute_s / speed)
    assert head_passes(fine) == head_passes(plain)
    assert block_passes(replace(fine, precision="bf16")) == block_passes(replace(plain, precision="bf16"))
