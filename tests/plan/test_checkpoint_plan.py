"""When a run saves, what that costs, and what it keeps, for a short run that was worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bloomery.config.checkpoint import CheckpointSection, EvaluateSection
from bloomery.config.load import load_recipe
from bloomery.plan.checkpoint_plan import CheckpointPlan, lost_share, plan_checkpoints
from bloomery.plan.hardware import Accelerator, Hardware, Node, Operation, Storage, load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request
from bloomery.plan.step_time import StepTime
from bloomery.plan.timeline import Stretch

MACHINE = Hardware(
    name="round",
    accelerator=Accelerator(memory_gib=1.0, memory_gb_per_s=1.0),
    node=Node(accelerators=8),
    storage=Storage(write_gb_per_s=2.0, read_gb_per_s=4.0),
    operation=Operation(detection_s=10.0, restart_s=20.0, failures_per_1000_accelerator_days=25.0),
)
DAY_S = 86_400.0
USUAL = CheckpointSection(
    every_steps=20, every_minutes=0.0, background="off", keep_last=2, keep_tenths=False, keep_best=0
)


def stretch(first: int, steps: int, batch: int, seconds: float, *, sample: int = 0) -> Stretch:
    step = StepTime(
        compute_s=seconds, memory_s=0.0, tensor_s=0.0, pipeline_bubble_s=0.0, pipeline_transfer_s=0.0,
        data_parallel_s=0.0, update_s=0.0, waiting_s=0.0, data_s=0.0,
    )  # fmt: skip
    return Stretch(
        first_step=first, first_sample=sample, steps=steps, global_batch=batch, micro_batch=1,
        micro_batches=batch, precision="bf16", step=step,
    )  # fmt: skip


COURSE = (stretch(0, 10, 4, 3.0), stretch(10, 100, 8, 2.0, sample=40))  # 110 steps in 230 seconds


def planned(
    section: CheckpointSection = USUAL, *, course: tuple[Stretch, ...] = COURSE, **more: Any
) -> CheckpointPlan:
    usual: dict[str, Any] = {
        "parameters": 1_000_000_000, "optimizer_bytes": 6.0, "hardware": MACHINE, "accelerators": 40,
        "failures_per_week": None, "reach_steps": (), "evaluate": EvaluateSection(every_steps=20),
    }  # fmt: skip
    return plan_checkpoints(section, course, **{**usual, **more})


def test_sizes_times_and_costs_of_saves_that_stop_the_training() -> None:
    plan = planned()
    assert (plan.stored_bytes, plan.full_bytes, plan.weights_bytes) == (10**10, 14 * 10**9, 2 * 10**9)
    assert (plan.save_s, plan.blocking_s, plan.load_s) == (5.0, 5.0, 2.5)
    assert plan.restart_s == 10.0 + 20.0 + 2.5
    assert plan.saves == 6 and plan.saving_s == 30.0  # steps 20, 40, 60, 80, 100 and the last, 110
    assert (plan.interval_steps, plan.interval_s) == (20.0, 40.0)
    assert plan.kept_at_end == 2 and plan.storage_bytes == 3 * 10**10
    assert plan.worst_loss_hours == pytest.approx(40 / 3600)
    assert plan.mean_time_between_failures_s == DAY_S and plan.failures == pytest.approx(230 / DAY_S)
    assert plan.best_interval_s == pytest.approx((2 * 5 * DAY_S) ** 0.5)
    assert plan.best_interval_steps == pytest.approx((2 * 5 * DAY_S) ** 0.5 / 2)
    assert plan.lost_share == pytest.approx(0.11167678, rel=1e-6)
    assert plan.best_lost_share == pytest.approx(0.011, rel=0.02) and plan.ends


def test_twice_as_many_accelerators_fail_twice_as_often() -> None:
    assert planned(accelerators=80).mean_time_between_failures_s == DAY_S / 2
    calm = replace(MACHINE, operation=replace(MACHINE.operation, failures_per_1000_accelerator_days=0.0))
    assert planned(hardware=calm).mean_time_between_failures_s is None


def test_two_failures_a_week_come_as_often_on_any_number_of_accelerators() -> None:
    for accelerators in (8, 40):
        plan = planned(accelerators=accelerators, failures_per_week=2.0)
        assert plan.mean_time_between_failures_s == 3.5 * DAY_S
    calm = planned(failures_per_week=0.0)
    assert (calm.mean_time_between_failures_s, calm.failures) == (None, 0.0)
    assert calm.lost_share is calm.best_lost_share is calm.best_interval_s is calm.best_interval_steps is None
    assert calm.ends


def test_no_save_is_best_made_before_the_one_before_it_is_durable() -> None:
    often = planned(failures_per_week=7 * DAY_S)  # each second
    assert often.best_interval_s == 5.0 and not often.ends
    quick = planned(failures_per_week=7 * DAY_S, parameters=1_000_000)
    assert quick.best_interval_s == 2.0, "nor before the end of a step"


@pytest.mark.parametrize(("share", "ends"), [(None, True), (0.999, True), (0.9991, False)])
def test_a_run_that_loses_all_but_a_thousandth_ends(share: float | None, ends: bool) -> None:
    assert replace(planned(), lost_share=share).ends is ends


def test_a_save_beside_the_training_stops_it_for_its_copy_or_for_the_save_before() -> None:
    beside = replace(USUAL, background="on")
    assert planned(beside).blocking_s == 10**10 / 40 / 20e9
    every_step = planned(replace(beside, every_steps=1))
    assert every_step.blocking_s == 3.0, "5 seconds to be durable, and 2 of them to the next save"
    copied_alone = lost_share(
        interval_s=40.0, save_s=0.0125, restart_s=32.5, mean_time_between_failures_s=DAY_S
    )
    assert planned(beside).lost_share - copied_alone == pytest.approx((5 - 0.0125) / DAY_S, rel=1e-2)
    assert planned(beside, accelerators=1, parameters=10**12).blocking_s == pytest.approx(5_000 - 40)


@pytest.mark.parametrize(("fewer", "is_beside"), [(0, True), (1, False)])
def test_saves_run_beside_the_training_where_a_rank_has_64_mib(fewer: int, is_beside: bool) -> None:
    parameters = 4 * (64 << 20) // 8 - fewer
    auto = replace(USUAL, background="auto")
    plan = planned(auto, parameters=parameters, optimizer_bytes=4.0, accelerators=4)
    assert (plan.blocking_s < plan.save_s) is is_beside


@pytest.mark.parametrize(
    ("cadence", "interval_steps", "saves"),
    [
        ({"every_steps": 0}, 110.0, 1),  # only at the end
        ({"every_steps": 55}, 55.0, 2),  # the last of them is the end's
        ({"every_steps": 0, "every_minutes": 1.0}, 30.0, 4),
        ({"every_minutes": 1.0}, 20.0, 6),  # whichever comes first
        ({"every_steps": 0, "every_minutes": 0.01}, 1.0, 110),
        ({"every_steps": 0, "every_samples": 200}, 25.0, 5),
        ({"at_end": False}, 20.0, 5),
        ({"every_steps": 10, "at_end": False}, 10.0, 11),  # also where a stretch ends, and at the end
    ],
)
def test_the_first_of_steps_samples_and_minutes_saves(
    cadence: dict[str, Any], interval_steps: float, saves: int
) -> None:
    plan = planned(replace(USUAL, **cadence))
    assert (plan.interval_steps, plan.saves) == (interval_steps, saves)


def test_the_samples_between_saves_are_those_of_all_peers() -> None:
    overrides = ["checkpoint.every_steps=0", "checkpoint.every_minutes=0", "checkpoint.every_samples=4_096"]
    loaded = load_recipe("diloco-internet", [*overrides, "elastic.peers=4", "train.global_batch=64"])
    plan = make_plan(Request(loaded=loaded, hardware=load_hardware("a100-80g"), accelerators=1))
    assert plan.draft.checkpoints.interval_steps == 4_096 / (64 * 4)


def test_a_run_that_never_saves_stores_what_it_would_write_and_loses_all() -> None:
    plan = planned(replace(USUAL, every_steps=0, at_end=False))
    assert (plan.saves, plan.kept_at_end, plan.storage_bytes, plan.saving_s) == (0, 0, 10**10, 0.0)
    assert plan.interval_s == 220.0


def test_what_retention_keeps_is_stored_at_the_end() -> None:
    assert planned(replace(USUAL, keep_every_steps=40)).kept_at_end == 2 + 2  # 40 and 80 beside 100, 110
    assert planned(replace(USUAL, keep_tenths=True)).kept_at_end == 6
    assert planned(reach_steps=(30,)).kept_at_end == 3  # from 110 back to 80


def test_the_best_checkpoints_take_storage_as_far_as_others_are_evaluated() -> None:
    best = replace(USUAL, keep_best=2)
    plan = planned(best)  # saves at 20, 40, 60, 80, 100 and 110, of which the last two are kept in any case
    assert (plan.kept_at_end, plan.storage_bytes) == (2 + 2, 5 * 10**10)
    assert planned(replace(best, keep_best=9)).kept_at_end == 2 + 4
    assert planned(best, evaluate=EvaluateSection(every_steps=60)).kept_at_end == 2 + 1
    assert planned(best, evaluate=EvaluateSection(every_steps=0)).kept_at_end == 2


def test_the_time_that_is_lost_is_dalys_with_what_was_not_durable_yet() -> None:
    facts = {"interval_s": 100.0, "save_s": 10.0, "mean_time_between_failures_s": 1_000.0}
    assert lost_share(**facts) == pytest.approx(0.139992609)
    assert lost_share(**facts, durable_s=30.0, restart_s=50.0) == pytest.approx(0.196675160)
    assert lost_share(**facts, durable_s=5.0) == lost_share(**facts), "it is durable when training goes on"
    for often_s in (1.0, 100.0, 20_000.0):
        share = lost_share(interval_s=1e6, save_s=1.0, mean_time_between_failures_s=often_s)
        assert 0.999 < share < 1.0
