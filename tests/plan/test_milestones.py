"""Which milestones a run has, at which steps, and in which order they are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.test_run_totals import A100, STEPS, planned

from bloomery.plan.schedule import phase_at
from bloomery.plan.timeline import workload_at_phase

PEERS = (
    "optim.name=adamw",
    "elastic.inner_steps=10",
    "elastic.peers=2",
    "train.tokens=0",
    "train.samples=800",
)


def test_what_comes_with_the_last_step_is_told_before_the_end() -> None:
    calendar = planned(
        *STEPS, "schedule.shape=constant", "schedule.warmup=1000", data_tokens=4 * 512 * 1000.0
    ).calendar
    assert [event.what for event in calendar] == ["warm-up ends", "epoch 1 ends", "the run ends"]
    assert {event.step for event in calendar} == {1000}


def test_an_epoch_that_ends_before_the_first_step_is_no_milestone() -> None:
    told = {event.what: event.step for event in planned(*STEPS, data_tokens=256.0).calendar}
    assert "epoch 1 ends" not in told and told["epoch 2 ends"] == 1


def test_changes_of_a_run_of_peers_come_when_all_of_them_have_read_so_many_samples() -> None:
    ramp_up = ("train.global_batch=8", "train.micro_batch=1", "train.ramp_up=[4,4,81]")
    changes = ("train.micro_batch_changes=[[121,2]]", "train.precision=fp32")
    later = "train.precision_changes=[[185,'bf16']]"
    told = {event.what: event.step for event in planned(*PEERS, *ramp_up, *changes, later).calendar}
    assert told["full batch of 8"] == 11, "ten steps read 80 samples"
    assert told["micro-batch becomes 2"] == 11 + -(-(121 - 88) // 16)
    assert told["precision becomes bf16"] == 11 + -(-(185 - 88) // 16)


def test_the_precision_that_is_left_to_the_machine_is_one_that_it_computes() -> None:
    draft = planned("train.precision=auto").draft
    phase = phase_at(draft.request.recipe.train, 0)
    assert workload_at_phase(draft.work, phase).precision == "bf16"
    without = replace(A100, accelerator=replace(A100.accelerator, bf16_teraflops=0.0))
    assert workload_at_phase(replace(draft.work, hardware=without), phase).precision == "fp32"


def test_a_cooldown_whose_share_no_float_holds_begins_with_its_own_step() -> None:
    wsd = planned(*STEPS, "schedule.shape=wsd", "schedule.warmup=0", "schedule.cooldown_share=0.9")
    assert wsd.calendar[0].what == "cooldown begins" and wsd.calendar[0].step == 100


def test_a_constant_rate_reaches_no_floor_whatever_its_decay_would_be() -> None:
    told = planned(*STEPS, "schedule.shape=constant", "schedule.warmup=0", "schedule.decay=900").calendar
    assert [event.what for event in told] == ["the run ends"]


def test_peers_read_the_data_together() -> None:
    plan = planned(*PEERS, "train.global_batch=4", data_tokens=200 * 512.0)
    told = {event.what: event.step for event in plan.calendar if event.what.startswith("epoch")}
    assert told == {f"epoch {number} ends": 25 * number for number in (1, 2, 3, 4)}


def test_peers_that_make_no_rounds_read_nothing_together() -> None:
    plan = planned(*STEPS, "elastic.inner_steps=0", "elastic.peers=2", data_tokens=1000 * 512.0)
    told = {event.what: (event.step, event.sample) for event in plan.calendar}
    assert (told["epoch 1 ends"], told["the run ends"]) == ((250, 1000), (1000, 4000))


def test_steps_of_a_run_take_as_long_as_what_its_recipe_recomputes() -> None:
    plain, full = (
        planned(*STEPS, f"train.recompute={recompute}").draft.course[-1].step.compute_s
        for recompute in ("none", "full")
    )
    assert full > 1.1 * plain


@pytest.mark.parametrize(("at", "comes"), [(3996, True), (3997, False), (9000, False)])
def test_changes_that_no_step_follows_are_no_milestones(at: int, comes: bool) -> None:
    length = ("optim.name=adamw", "train.tokens=0", "train.samples=4000", "train.precision=fp32")
    changes = (f"train.micro_batch_changes=[[{at},2]]", f"train.precision_changes=[[{at},'bf16']]")
    ramp_up = ("train.global_batch=8", "train.micro_batch=1", f"train.ramp_up=[4,4,{at}]")
    for changed, what in (
        (changes, {"micro-batch becomes 2", "precision becomes bf16"}),
        (ramp_up, {"full batch of 8"}),
    ):
        plan = planned(*length, *changed)
        told = {event.what: event.step for event in plan.calendar if event.what in what}
        assert told == (dict.fromkeys(what, 999) if comes else {})
        assert (plan.draft.course[-1].first_step == 999) is comes
