"""A plan whose every figure is another number, so that a text that shows the wrong one is another text."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bloomery.config.load import parse_recipe
from bloomery.plan.block_cost import Workload
from bloomery.plan.checkpoint_plan import CheckpointPlan
from bloomery.plan.hardware import GIB, load_hardware
from bloomery.plan.layout import Layout, StageParameters
from bloomery.plan.memory import StageMemory
from bloomery.plan.overview import Draft, Plan, RunTotals, Speed
from bloomery.plan.parameters import BlockParameters, ModelParameters
from bloomery.plan.peer_round import Round
from bloomery.plan.request import Request
from bloomery.plan.step_time import StepTime
from bloomery.plan.timeline import Milestone, Stretch
from bloomery.plan.traffic import Traffic

RECIPE = """
[run]
name = "made"
[model]
layers = 4
hidden = 64
heads = 2
[data]
sequence_length = 32
[train]
samples = 5_000
global_batch = 16
micro_batch = 2
recompute = "full"
[optim]
learning_rate = 1e-3
"""
DAY_S = 86_400


def of(kind: type, *values: object) -> Any:
    """Return an object of a kind whose fields have these values, in their order."""
    return kind(**{field.name: value for field, value in zip(fields(kind), values, strict=False)})


def step(seconds: float) -> StepTime:
    """Return a step whose parts are all unlike; together they take `seconds`."""
    shares = (0.4, 0.2, 0.12, 0.1, 0.07, 0.05, 0.03, 0.026, 0.004)
    return of(StepTime, *(share * seconds for share in shares))


def memory(first_gib: float) -> StageMemory:
    """Return a stage that holds `first_gib` of weights, and 0.25 GiB more of each following kind."""
    return of(StageMemory, *(int((first_gib + 0.25 * place) * GIB) for place in range(8)))


def stretch(number: int, *, days: float, batch: int, precision: str = "bf16") -> Stretch:
    """Return a stretch of 1,000 steps that takes so many days."""
    return Stretch(
        first_step=1_000 * number, first_sample=7_000 * number, steps=1_000, global_batch=batch,
        micro_batch=number + 1, micro_batches=number + 2, precision=precision,
        step=step(days * DAY_S / 1_000),
    )  # fmt: skip


PEERS = Round(
    peers=5, inner_steps=64, inner_s=1_230.0, payload_bytes=1.5e9, sent_bytes=2.5e9, codec="int8",
    reduce_codec="int8", quantisation_error=0.034, exchange_s=45.0, utilisation=0.965, host_bytes=3.5e9,
    host_peak_bytes=4.5e9, copy_bytes=5.5e9, part_of_int8=0.123,
)  # fmt: skip
CHECKPOINTS = CheckpointPlan(
    stored_bytes=1_250_000_000, full_bytes=2_250_000_000, weights_bytes=325_000, save_s=41.5, blocking_s=2.5,
    load_s=33.5, restart_s=660.0, saves=1_234, interval_steps=150.0, interval_s=5_400.0, kept_at_end=7,
    storage_bytes=8_250_000_000_000, saving_s=99.0, mean_time_between_failures_s=3.5 * DAY_S,
    best_interval_s=2_700.0, best_interval_steps=75.0, lost_share=0.0432, best_lost_share=0.0321,
    worst_loss_hours=1.6, failures=9.0,
)  # fmt: skip


def made_plan(**changes: object) -> Plan:
    """Return the plan, with some of its fields changed."""
    loaded = parse_recipe(RECIPE, (), label="made")
    hardware = load_hardware("a100-80g")
    layout = Layout(
        tensor=2, pipeline=3, data=4, zero=1, sequence=True, schedule="interleaved", chunks=2, per_node=8
    )
    draft = Draft(
        request=Request(loaded=loaded, hardware=hardware, hours_per_day=20.0),
        work=Workload(
            layout=layout, hardware=hardware, micro_batch=6, sequence_length=32, vocabulary=512,
            precision="bf16", model=loaded.recipe.model,
        ),
        parameters=ModelParameters(
            embedding=1_001, positions=0, embedding_norm=303, layers=4, final_norm=505, head=0,
            block=BlockParameters(
                attention_norm=11, query_key_norm=12, attention=1_300, mlp_norm=14, mlp=1_500, matrices=2_700
            ),
        ),
        stages=(of(StageParameters, 1, True, False), of(StageParameters, 2, False, False),
                of(StageParameters, 1, False, True)),
        memory=(memory(1.0), memory(3.0), memory(2.0)),
        course=(stretch(0, days=1.5, batch=4, precision="fp32"), stretch(1, days=2.5, batch=8),
                stretch(2, days=4.0, batch=16)),
        checkpoints=CHECKPOINTS,
    )  # fmt: skip
    plan = Plan(
        draft=draft,
        assumptions=("One is assumed.", "Another <is>."),
        speed=Speed(
            step_s=345.6, step_low_s=311.0, step_high_s=399.0, bottleneck="compute & more", bubble_share=0.1,
            samples_per_s=1_234.5, tokens_per_s=22_345.6, tokens_per_s_per_accelerator=931.5,
            hardware_teraflops=120.5, model_teraflops=90.5, hardware_teraflops_range=(101.0, 141.0),
            model_teraflops_range=(81.0, 99.0), mfu=0.2905, hfu=0.3865,
        ),
        traffic=of(
            Traffic, 1_234, 22, 33, 1, 2, 1.1e3, 2.2e6, 3.3e9, 5.5e9, 112.0,
            4.4e12, 999.0, 6.6e6, 7.7e6, 500.0,
        ),
        whole=RunTotals(
            steps=3_000, samples=28_000, tokens=896_000, training_days=6.1, saving_hours=1.2,
            evaluation_hours=2.3, failure_hours=3.4, exchange_hours=4.5, days=7.1, days_low=1.5,
            days_high=9.9,
            accelerator_hours=4_321.0, energy_mwh=5_432.0, cost=6_543.0, currency="EUR", model_flops=1.23e20,
        ),
        between_peers=PEERS,
        calendar=(of(Milestone, "the run starts", 0, 0, 0, 0.0),
                  of(Milestone, "warm-up < ends", 1_500, 10_500, 336_000_000, 1.25),
                  of(Milestone, "the run ends", 3_000, 28_000, 896_000_000, 31.5)),
        warnings=("Beware of this.", "And of <that>."),
    )  # fmt: skip
    return replace(plan, **changes)
