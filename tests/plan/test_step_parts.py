"""What counts to which part of a step, where another setting or another part decides."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from tests.plan.test_step_time import HARDWARE, LENGTH, MICRO_BATCH, MODEL, PARAMETERS, STREAM, held, of, step

from bloomery.plan.block_cost import Workload, attention_passes
from bloomery.plan.hardware import Hardware, Storage
from bloomery.plan.layout import Layout
from bloomery.plan.step_time import HOST_BYTES_PER_S, StepTime, stages_for, step_time, step_traffic


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
    assert update_s(offload) == pytest.approx((34 + 8) * held(offload) / HOST_BYTES_PER_S)


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


@pytest.mark.parametrize(("own", "of_phase", "exchanges"), [("full", "none", 6), ("none", "full", 4)])
def test_a_stage_sends_for_what_it_recomputes_itself(own: str, of_phase: str, exchanges: int) -> None:
    layout = Layout(tensor=2, pipeline=2, blocks=(5, 3), head_rank=1, recompute=(own, own))
    work = of(layout)
    sent = step_traffic(work, PARAMETERS, stages_for(work, PARAMETERS), micro_batches=3, recompute=of_phase)
    assert sent.tensor_bytes == pytest.approx(3 * (5 * exchanges + 1) * STREAM)
