"""How many accelerators a plan takes where none are named, the energy it costs, what a peer holds besides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bloomery.config.elastic import ElasticSection
from bloomery.config.load import load_recipe
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import Plan, make_plan
from bloomery.plan.peer_round import outer_memory_bytes
from bloomery.plan.request import Request

A100 = load_hardware("a100-80g")


def planned(*overrides: str, gpus: int | None = None, overhead_power_w: float = 0.0) -> Plan:
    machine = replace(A100, node=replace(A100.node, overhead_power_w=overhead_power_w))
    loaded = load_recipe("demo", ["optim.name=adamw", "train.global_batch=64", *overrides])
    return make_plan(Request(loaded=loaded, hardware=machine, accelerators=gpus))


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


def test_overlapped_steps_hold_one_pseudo_gradient_more_while_a_round_is_made() -> None:
    plain = ElasticSection(peers=2)
    kept, made = outer_memory_bytes(replace(plain, overlap_steps=0), parameters=1000)
    kept_beside, made_beside = outer_memory_bytes(replace(plain, overlap_steps=1), parameters=1000)
    assert kept_beside == kept == 8.0 * 1000 and made_beside - made == 4.0 * 1000


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
