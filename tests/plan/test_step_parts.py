"""What counts to which part of a step, where another setting or another part decides."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from tests.plan.test_step_time import (
    HARDWARE,
    LENGTH,
    LINK,
    LINK_S,
    MEMORY,
    MICRO_BATCH,
    MODEL,
    NETWORK,
    NETWORK_S,
    PARAMETERS,
    STREAM,
    held,
    of,
    ring,
    step,
)

from bloomery.plan.block_cost import Workload, attention_passes, elementwise_pass
from bloomery.plan.hardware import Hardware, Storage
from bloomery.plan.layout import Layout
from bloomery.plan.step_time import HOST_BYTES_PER_S, StepTime, step_time


def test_the_update_is_time_of_memory() -> None:
    parts = dict.fromkeys((field.name for field in fields(StepTime)), 0.0)
    made = StepTime(**{**parts, "compute_s": 3.0, "memory_s": 2.0, "update_s": 2.0})
    assert made.bottleneck == "memory"


def test_data_is_read_while_a_node_waits_for_the_slowest() -> None:
    layout = Layout(data=32)
    quick = step(layout)
    assert quick.waiting_s > 0.0
    reading_s = quick.seconds + 1.0
    bytes_read = 4 * MICRO_BATCH * 32 * LENGTH * 4
    slow = replace(HARDWARE, storage=Storage(read_gb_per_s=bytes_read / reading_s / 1e9))
    assert step(layout, hardware=slow).data_s == pytest.approx(1.0)


def taken(work: Workload, recompute: str) -> StepTime:
    return step_time(work, PARAMETERS, global_batch=4 * MICRO_BATCH, recompute=recompute)


def test_attention_is_computed_again_only_where_its_scores_were_written() -> None:
    fused = of(Layout())
    machine = replace(HARDWARE, accelerator=replace(HARDWARE.accelerator, kind="cpu"))
    forming = replace(of(Layout(), machine), model=replace(MODEL, attention_dropout=0.1))
    assert taken(fused, "selective") == taken(fused, "none")
    again = 4 * MODEL.layers * attention_passes(forming).forward.compute_s
    more = taken(forming, "selective").compute_s - taken(forming, "none").compute_s
    assert more == pytest.approx(again) and again > 0.0


@pytest.mark.parametrize(("own", "of_phase"), [("none", "full"), ("full", "none")])
def test_what_a_stage_recomputes_itself_counts_before_the_setting_of_the_phase(
    own: str, of_phase: str
) -> None:
    plain = Layout(pipeline=2, blocks=(4, 4), head_rank=1)
    by_stage = replace(plain, recompute=(own, own))
    assert step(by_stage, recompute=of_phase) == step(plain, recompute=own) != step(plain, recompute=of_phase)


def update_s(
    layout: Layout, *, precision: str = "bf16", hardware: Hardware = HARDWARE, muon: int = 0
) -> float:
    work = replace(of(layout, hardware), precision=precision, muon_iterations=muon)
    return step_time(work, PARAMETERS, global_batch=4 * MICRO_BATCH, recompute="none").update_s


def test_weights_of_32_bits_are_not_rounded_block_by_block() -> None:
    by_block = Layout(rounds_by_block=True)
    machine = replace(HARDWARE, accelerator=replace(HARDWARE.accelerator, fp32_teraflops=10.0))
    wide, plain = (update_s(layout, precision="fp32", hardware=machine) for layout in (by_block, Layout()))
    assert wide == plain
    assert update_s(by_block) > update_s(Layout())


def test_masters_in_the_cpus_memory_come_up_for_each_rounding() -> None:
    offload = Layout(offload=True)
    roundings = 2 * 4  # of each of four micro-batches, forward and backward
    more = update_s(replace(offload, rounds_by_block=True)) - update_s(offload)
    assert more == pytest.approx(4 * roundings * held(offload) / HOST_BYTES_PER_S)
    assert update_s(offload) == pytest.approx((34 + 0.8) * held(offload) / HOST_BYTES_PER_S)


def test_each_block_is_rounded_by_a_kernel_of_its_own() -> None:
    late = replace(HARDWARE, accelerator=replace(HARDWARE.accelerator, kernel_us=1e6))
    rounding = [update_s(Layout(rounds_by_block=True), hardware=machine) for machine in (HARDWARE, late)]
    plain = [update_s(Layout(), hardware=machine) for machine in (HARDWARE, late)]
    assert (rounding[1] - plain[1]) - (rounding[0] - plain[0]) == pytest.approx(2 * 4 * MODEL.layers)
    assert plain[1] - plain[0] == pytest.approx(20.0)


def test_muon_takes_as_long_as_the_stage_with_the_most_blocks() -> None:
    first, last = (Layout(pipeline=2, blocks=blocks, head_rank=1) for blocks in ((7, 1), (1, 7)))
    both = [update_s(layout, muon=5) - update_s(layout) for layout in (first, last)]
    assert both[0] == pytest.approx(both[1]) and both[0] > 0.0


def test_stages_update_and_exchange_as_long_as_the_one_that_holds_the_most() -> None:
    layout = Layout(pipeline=2, data=2, blocks=(7, 1), head_rank=1, overlaps=False)
    made = step(layout)
    assert made.update_s == pytest.approx(34 * held(layout) / MEMORY)
    reduced = ring(4 * held(layout), 2, rate=LINK, latency=LINK_S, passes=2)
    assert made.data_parallel_s == pytest.approx(reduced)


def test_shards_and_their_replicas_use_links_within_a_machine_and_share_its_network() -> None:
    size = 4 * PARAMETERS.total
    weights = 2 * PARAMETERS.total
    within = step(Layout(data=8, zero=1, shard=4, overlaps=False)).data_parallel_s
    assert within == pytest.approx(
        ring(size / 4, 2, rate=LINK, latency=LINK_S, passes=2)
        + ring(size + weights, 4, rate=LINK, latency=LINK_S)
        + 3 * LINK_S
    )
    between = step(Layout(data=16, zero=1, shard=2, overlaps=False)).data_parallel_s
    assert between == pytest.approx(
        ring(size / 2, 8, rate=NETWORK / 2, latency=NETWORK_S, passes=2)
        + ring(size + weights, 2, rate=LINK, latency=LINK_S)
        + LINK_S
    )
    wide = step(Layout(data=16, zero=1, overlaps=False)).data_parallel_s
    assert wide == pytest.approx(ring(size + weights, 16, rate=NETWORK, latency=NETWORK_S) + 15 * NETWORK_S)


def test_each_block_computes_its_elementwise_parts_again() -> None:
    work = of(Layout())
    again = 4 * MODEL.layers * elementwise_pass(work).memory_s
    more = taken(work, "elementwise").memory_s - taken(work, "none").memory_s
    assert more == pytest.approx(again) and again > 0.0


def test_muon_and_the_update_are_shared_by_all_shards() -> None:
    def muon_part(layout: Layout) -> float:
        work = of(layout)
        plain, muon = (
            step_time(
                replace(work, muon_iterations=iterations),
                PARAMETERS,
                global_batch=4 * MICRO_BATCH * layout.data,
                recompute="none",
            ).update_s
            for iterations in (0, 5)
        )
        return muon - plain

    assert muon_part(Layout(data=4, zero=1)) == pytest.approx(muon_part(Layout()) / 4)


def test_stages_of_a_machine_whose_links_nobody_described_send_a_gigabyte_a_second() -> None:
    unlinked = replace(HARDWARE, node=replace(HARDWARE.node, link_gb_per_s=0.0))
    made = step(Layout(pipeline=4, blocks=(2, 2, 2, 2), head_rank=3), hardware=unlinked)
    assert made.pipeline_transfer_s == pytest.approx(2 * (STREAM / 1e9 + LINK_S) * (3 + 0.2 * 4))
