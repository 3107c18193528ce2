"""How many accelerators a plan takes where none are named, the energy it costs, what a peer holds besides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bloomery.config.elastic import ElasticSection
from bloomery.config.load import load_recipe
from bloomery.plan.hardware import SiteLink, load_hardware
from bloomery.plan.layout import Layout
from bloomery.plan.overview import Plan, base_workload, make_plan
from bloomery.plan.peer_round import outer_memory_bytes, plan_round, sparse_bytes
from bloomery.plan.request import Request

A100 = load_hardware("a100-80g")


def planned(*overrides: str, gpus: int | None = None, overhead_power_w: float = 0.0, **more: Any) -> Plan:
    machine = replace(A100, node=replace(A100.node, overhead_power_w=overhead_power_w))
    loaded = load_recipe("demo", ["optim.name=adamw", "train.global_batch=64", *overrides])
    return make_plan(Request(loaded=loaded, hardware=machine, accelerators=gpus, **more))


@pytest.mark.parametrize(("tensor", "accelerators"), [(1, 1), (2, 8)])
def test_a_model_that_fits_one_accelerator_is_planned_on_one_and_a_larger_one_on_whole_nodes(
    tensor: int, accelerators: int
) -> None:
    plan = planned("parallel.data=auto", f"parallel.tensor={tensor}")
    assert A100.node.accelerators == 8 and f": {accelerators} accelerators" in plan.assumptions[0]


def test_what_a_node_draws_besides_its_accelerators_is_part_of_the_energy() -> None:
    as_much_again = A100.node.accelerators * A100.accelerator.power_w
    alone, doubled = (planned(gpus=8, overhead_power_w=power) for power in (0.0, as_much_again))
    assert alone.whole.energy_mwh > 0.0
    assert doubled.whole.energy_mwh == pytest.approx(2 * alone.whole.energy_mwh)


def test_a_ramp_up_is_warned_of_with_the_micro_batch_of_the_full_batch() -> None:
    ramp_up = ["train.ramp_up=[8,4,480]", "train.micro_batch=1", "train.micro_batch_changes=[[480,4]]"]
    (warning,) = [text for text in planned(*ramp_up, gpus=4).warnings if "ramp-up" in text]
    assert "start it; 8, 16 accelerators" in warning


def test_overlapped_steps_hold_two_copies_of_a_fragment_more() -> None:
    plain = ElasticSection(peers=2)
    kept, made = outer_memory_bytes(replace(plain, overlap_steps=0), parameters=1000)
    assert kept == 8.0 * 1000
    for fragments in (1, 4):
        beside = replace(plain, overlap_steps=1, fragments=fragments)
        more = 8.0 * 1000 / fragments
        assert outer_memory_bytes(beside, parameters=1000) == (kept + more, made + more)


def test_a_run_that_saves_at_its_end_makes_one_checkpoint_more() -> None:
    every = ("checkpoint.every_steps=7", "checkpoint.every_minutes=0", "train.steps=100", "train.tokens=0")
    last, without = (
        planned(*every, f"checkpoint.at_end={at_end}", gpus=1).draft.checkpoints
        for at_end in ("true", "false")
    )
    assert (last.saves, without.saves) == (100 // 7 + 1, 100 // 7)


def test_the_hours_of_all_peers_are_paid_for() -> None:
    peers = ("elastic.inner_steps=10", "train.samples=6400", "train.steps=0", "schedule.unit=samples")
    hours = [planned(*peers, f"elastic.peers={count}", gpus=1).whole for count in (1, 2)]
    assert hours[1].accelerator_hours == pytest.approx(2 * 24 * hours[1].days)
    assert hours[0].accelerator_hours == pytest.approx(24 * hours[0].days)


def test_a_checkpoint_holds_both_moments_of_adam_and_one_of_muons_matrices() -> None:
    adamw = planned(gpus=1).draft
    total = adamw.parameters.total
    assert adamw.checkpoints.stored_bytes == 12 * total
    muon = planned("optim.name=muon", gpus=1).draft
    matrices = muon.parameters.layers * muon.parameters.block.matrices
    assert muon.checkpoints.stored_bytes == pytest.approx(12 * total - 4 * matrices, abs=1)
    assert adamw.room_bytes == 80 * 2**30


def test_failures_take_what_they_lose_beyond_the_saves() -> None:
    plan = planned("train.steps=1000", "train.tokens=0", gpus=8, failures_per_week=50.0)
    kept, training_s = plan.draft.checkpoints, plan.whole.training_days * 86_400
    assert kept.lost_share is not None and 0.0 < kept.lost_share < 0.9
    lost_s = training_s / (1 - kept.lost_share) - training_s * (1 + kept.blocking_s / kept.interval_s)
    assert plan.whole.failure_hours * 3600 == pytest.approx(lost_s)


def test_milestones_of_samples_come_at_each_peers_part_of_them() -> None:
    plan = planned(
        "elastic.inner_steps=10", "elastic.peers=2", "train.samples=6400", "train.tokens=0",
        "schedule.unit=samples", "schedule.warmup=0", "train.global_batch=8", "train.ramp_up=[4,4,80]",
        "train.micro_batch=1", "train.micro_batch_changes=[[84,2]]", gpus=1, data_tokens=160 * 512.0,
    )  # fmt: skip
    told = {event.what: (event.step, event.sample) for event in plan.calendar}
    # Ten steps of 4 samples on both peers are 80; then each step is 16 samples of both.
    assert told["full batch of 8"] == (10, 80) and told["micro-batch becomes 2"] == (11, 96)
    assert told["epoch 1 ends"] == (15, 160) and told["epoch 2 ends"] == (25, 320)
    assert plan.whole.samples == 6400


@pytest.mark.parametrize(("average", "kept", "apart"), [("weights", 8.0, 4.0), ("gradients", 0.0, 0.0)])
def test_a_newcomer_needs_a_copy_of_all_and_the_weights_apart_where_weights_are_averaged(
    average: str, kept: float, apart: float
) -> None:
    elastic = ElasticSection(inner_steps=1, peers=2, codec="fp32", average=average)
    told = plan_round(elastic, SiteLink(), parameters=1000, step_s=1.0, state_bytes=12_000.0)
    assert told.host_bytes == 1000 * kept and told.copy_bytes == 12_000.0 + 1000 * (kept + apart)


@pytest.mark.parametrize(("optimizer", "iterations"), [("muon", 7), ("adamw", 0)])
@pytest.mark.parametrize("masks", ["true", "false"])
def test_the_work_of_a_run_is_that_of_its_recipe(optimizer: str, iterations: int, masks: str) -> None:
    settings = [f"optim.name={optimizer}", "optim.muon_iterations=7", f"data.mask_documents={masks}"]
    settings += ["train.micro_batch=2", "train.micro_batch_changes=[[64,4]]", "train.precision=bf16"]
    loaded = load_recipe("demo", [*settings, "train.global_batch=64", "data.sequence_length=96"])
    work = base_workload(Request(loaded=loaded, hardware=A100, accelerators=1), Layout(data=1))
    recipe = loaded.recipe
    assert (work.model, work.vocabulary) == (recipe.model, recipe.data.tokenizer_vocabulary)
    assert (work.sequence_length, work.micro_batch, work.precision) == (96, 2, "bf16"), "of the first phase"
    assert (work.muon_iterations, work.masks_documents) == (iterations, masks == "true")
    assert (work.layout, work.hardware) == (Layout(data=1), A100)


def test_a_sparse_round_waits_once_for_each_other_peer_and_sends_by_its_density() -> None:
    elastic = ElasticSection(inner_steps=10, peers=4, codec="sparse", density=0.25, outer_momentum=0.0)
    link = SiteLink(gbit_per_s=8.0, efficiency=0.5, latency_ms=100.0, outer_step_s=2.0)
    told = plan_round(elastic, link, parameters=4096 * 1000, step_s=1.0, state_bytes=0.0)
    code = 4096 * 1000 * sparse_bytes(0.25)
    assert (told.payload_bytes, told.sent_bytes) == (code, 3 * code)
    assert told.exchange_s == pytest.approx(3 * code / 0.5e9 + 3 * 0.1 + 2.0)
    assert (told.codec, told.reduce_codec, told.quantisation_error) == ("sparse", "sparse", 0.0)


def test_peers_of_a_plan_exchange_over_the_link_that_is_named() -> None:
    peers = ("elastic.inner_steps=10", "elastic.peers=2", "train.ramp_up=[32,32,320]")
    slow = SiteLink(gbit_per_s=0.01)
    named, usual = (planned(*peers, gpus=1, link=link) for link in (slow, None))
    for plan, link in ((named, slow), (usual, SiteLink())):
        draft = plan.draft
        assert plan.between_peers == plan_round(
            draft.request.recipe.elastic,
            link,
            parameters=draft.parameters.total,
            step_s=draft.course[-1].step.seconds,
            state_bytes=12.0 * draft.parameters.total,
        )
    assert draft.course[0].step.seconds < draft.course[-1].step.seconds, "it is that of the full batch"
