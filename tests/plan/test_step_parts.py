"""What counts to which part of a step, where another setting or another part decides."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from tests.plan.test_step_time import HARDWARE, LENGTH, MICRO_BATCH, MODEL, PARAMETERS, of, step

from bloomery.plan.block_cost import Workload, attention_passes
from bloomery.plan.hardware import Storage
from bloomery.plan.layout import Layout
from bloomery.plan.step_time import StepTime, step_time


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
