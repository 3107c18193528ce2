"""What a whole run takes and costs, and its milestones, from the figures of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bloomery.config.load import load_recipe
from bloomery.plan import recomputation
from bloomery.plan.hardware import SiteLink, load_hardware
from bloomery.plan.layout import bubble_share
from bloomery.plan.overview import Plan, make_plan, shape_of
from bloomery.plan.parameters import token_cost
from bloomery.plan.peer_round import average_error, codec_of_partial_sums, outer_memory_bytes, plan_round
from bloomery.plan.request import Request
from bloomery.plan.schedule import consumed_at_end, phase_at, steps_of_peer
from bloomery.plan.timeline import ramp_up_cost, seconds_at_step, step_at_sample, total_seconds
from bloomery.plan.traffic import step_traffic

A100 = load_hardware("a100-80g")
STEPS = ("optim.name=adamw", "train.steps=1000", "train.tokens=0", "schedule.unit=steps")


def planned(*overrides: str, recipe: str = "demo", gpus: int = 1, **more: Any) -> Plan:
    loaded = load_recipe(recipe, overrides)
    return make_plan(Request(loaded=loaded, hardware=A100, accelerators=gpus, **more))


def test_days_are_those_of_all_that_a_run_does() -> None:
    plan = planned(*STEPS, "evaluate.every_steps=300", "evaluate.samples=50", hours_per_day=18.0)
    whole, step = plan.whole, plan.draft.course[-1].step
    training_s = 1000 * step.seconds
    assert whole.training_days == pytest.approx(training_s / 86_400)
    evaluation_s = (3 + 1) * 50 * step.seconds / 4 / 3  # a forward is a third of a sample of a batch of 4
    assert whole.evaluation_hours == pytest.approx(evaluation_s / 3600)
    saving_s, lost_s = plan.draft.checkpoints.saving_s, whole.failure_hours * 3600
    assert whole.saving_hours == pytest.approx(saving_s / 3600) and saving_s > 0 and lost_s > 0
    running_s = training_s + evaluation_s + saving_s + lost_s
    assert whole.days == pytest.approx(running_s / 3600 / 18)
    assert (whole.days_low, whole.days_high) == pytest.approx((0.83 * whole.days, 1.2 * whole.days))
    assert whole.accelerator_hours == pytest.approx(running_s / 3600)
    assert (whole.steps, whole.samples, whole.tokens) == (1000, 4000, 4000 * 512)
    assert whole.exchange_hours == 0.0


def test_a_run_that_evaluates_not_at_all_or_not_at_its_end() -> None:
    never = planned(*STEPS, "evaluate.every_steps=0").whole
    assert never.evaluation_hours == 0.0
    at_end, without = (
        planned(*STEPS, "evaluate.every_steps=300", f"evaluate.at_end={value}").whole.evaluation_hours
        for value in ("true", "false")
    )
    assert without == pytest.approx(3 / 4 * at_end)
    again = planned(*STEPS, "evaluate.every_steps=300", "evaluate.samples=50", "train.recompute=full")
    costs = token_cost(again.draft.work.model, vocabulary=again.draft.work.vocabulary, sequence_length=512,
                       recompute="full")  # fmt: skip
    sample_s = again.draft.course[-1].step.seconds / 4 * (costs.model / 3) / costs.hardware
    assert again.whole.evaluation_hours == pytest.approx((3 + 1) * 50 * sample_s / 3600)


def test_held_out_samples_take_as_long_as_those_of_the_full_batch() -> None:
    ramp_up = ("train.global_batch=32", "train.ramp_up=[4,4,80]", "train.micro_batch=4")
    plan = planned("optim.name=adamw", *ramp_up, "evaluate.every_steps=10", "evaluate.samples=50", gpus=1)
    first, last = plan.draft.course[0].step.seconds / 4, plan.draft.course[-1].step.seconds / 32
    times = plan.whole.steps // 10 + 1
    assert plan.whole.evaluation_hours == pytest.approx(times * 50 * last / 3 / 3600) and first > 1.1 * last


def test_energy_and_cost_are_those_of_all_accelerators_hours() -> None:
    operation = replace(
        A100.operation, price_per_accelerator_hour=2.5, power_usage_effectiveness=1.5, currency="EUR"
    )
    accelerator = replace(A100.accelerator, power_w=400.0)
    node = replace(A100.node, accelerators=8, overhead_power_w=1600.0)
    machine = replace(A100, operation=operation, accelerator=accelerator, node=node)
    request = Request(loaded=load_recipe("demo", STEPS), hardware=machine, accelerators=4)
    request = replace(request, loaded=load_recipe("demo", [*STEPS, "train.global_batch=16"]))
    whole = make_plan(request).whole
    assert whole.accelerator_hours == pytest.approx(4 * 24 * whole.days)
    assert whole.energy_mwh == pytest.approx(whole.accelerator_hours * (400 + 200) * 1.5 / 1e6)
    assert whole.cost == pytest.approx(2.5 * whole.accelerator_hours) and whole.currency == "EUR"
    asked = make_plan(replace(request, price_per_accelerator_hour=7.0)).whole
    assert asked.cost == pytest.approx(7.0 * whole.accelerator_hours)
    assert make_plan(replace(request, price_per_accelerator_hour=0.0)).whole.cost is None


def test_speeds_are_those_of_the_full_batch_and_shares_of_the_peak() -> None:
    plan = planned(*STEPS, "train.global_batch=16", "train.recompute=full", gpus=4)
    speed, step = plan.speed, plan.draft.course[-1].step
    assert speed.samples_per_s == pytest.approx(16 / step.seconds)
    assert speed.tokens_per_s == pytest.approx(16 * 512 / step.seconds)
    assert speed.tokens_per_s_per_accelerator == pytest.approx(4 * 512 / step.seconds)
    assert plan.whole.model_flops / plan.whole.tokens == pytest.approx(
        speed.model_teraflops * 1e12 * 4 / speed.tokens_per_s
    )
    assert (speed.mfu, speed.hfu) == pytest.approx(
        (speed.model_teraflops / 312, speed.hardware_teraflops / 312)
    )
    assert speed.hardware_teraflops > 1.2 * speed.model_teraflops
    slow, quick = speed.model_teraflops_range
    assert (slow, quick) == pytest.approx((speed.model_teraflops / 1.2, speed.model_teraflops / 0.83))
    assert speed.hardware_teraflops_range[0] == pytest.approx(speed.hardware_teraflops / 1.2)


def test_bubble_and_traffic_are_those_of_the_full_batch_too() -> None:
    ramp_up = ("train.global_batch=16", "train.ramp_up=[4,4,80]", "train.micro_batch=1")
    split = ("optim.name=adamw", "parallel.pipeline=2", "parallel.tensor=2", "train.recompute=full")
    plan = planned(*ramp_up, *split, "train.micro_batch_changes=[[40,2]]", gpus=8)
    draft, (first, *_, last) = plan.draft, plan.draft.course
    assert (first.micro_batches, last.micro_batches) == (2, 4)
    assert plan.speed.bubble_share == bubble_share(draft.work.layout, 4) == pytest.approx(1 / 5)
    assert plan.speed.step_s == last.step.seconds != first.step.seconds
    shape = shape_of(draft)
    assert (shape.micro_batches, shape.phase.micro_batch, shape.phase.recompute) == (4, 2, "full")
    assert plan.traffic == step_traffic(shape) and draft.work.micro_batch == 2


def test_the_worst_stage_is_the_one_that_needs_most() -> None:
    draft = planned(recipe="tr11-176b", gpus=384).draft
    needed = [memory.total for memory in draft.memory]
    assert len(set(needed)) > 2
    assert (draft.worst_stage, draft.peak_bytes) == (needed.index(max(needed)), max(needed))


def test_the_phase_that_needs_most_memory_is_the_one_that_counts() -> None:
    small = (*STEPS, "train.global_batch=16", "train.micro_batch=2", "model.embedding_init=normal")
    changing = planned(*small)
    later = planned(*small, "train.micro_batch_changes=[[32,8],[64,1]]")
    largest = planned(*small, "train.micro_batch=8")
    assert later.draft.memory == largest.draft.memory != changing.draft.memory


def test_memory_is_that_of_the_most_micro_batches_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[Any, ...]] = set()
    stage_memory = recomputation.stage_memory

    def noted(work: Any, parameters: Any, stages: Any, index: int, training: Any) -> Any:
        asked.add((work.micro_batch, training.micro_batches, training.recompute, training.loss_chunk))
        assert (training.fused, training.optimizer) == (False, "adamw")
        return stage_memory(work, parameters, stages, index, training)

    monkeypatch.setattr(recomputation, "stage_memory", noted)
    batches = ("train.global_batch=16", "train.ramp_up=[4,4,60]", "train.micro_batch=2")
    later = ("train.micro_batch_changes=[[100,4]]", "train.tokens=0", "train.samples=800")
    usual = ("optim.name=adamw", "train.compile=off", "train.recompute=full", "train.loss_chunk=64")
    planned(*batches, *later, *usual, gpus=2)
    assert asked == {(2, 4, "full", 64), (4, 2, "full", 64)}


def test_rounds_take_their_exchanges_once_in_so_many_steps() -> None:
    plan = planned(recipe="intellect1-10b", gpus=8)
    rounds = plan.between_peers
    assert rounds is not None
    assert plan.whole.exchange_hours == pytest.approx(
        plan.whole.steps // rounds.inner_steps * rounds.exchange_s / 3600
    )
    assert rounds.utilisation == pytest.approx(rounds.inner_s / (rounds.inner_s + rounds.exchange_s))


def milestones_of(*overrides: str, recipe: str = "demo", **more: Any) -> dict[str, int]:
    return {event.what: event.step for event in planned(*overrides, recipe=recipe, **more).calendar}


def test_a_cooldown_and_a_floor_are_milestones_at_their_steps() -> None:
    wsd = (*STEPS, "schedule.shape=wsd", "schedule.cooldown_share=0.2", "schedule.warmup=100")
    assert milestones_of(*wsd) == {"warm-up ends": 100, "cooldown begins": 800, "the run ends": 1000}
    early = milestones_of(*wsd, "schedule.decay=900")
    assert early["cooldown begins"] == 720 and early["learning rate reaches its floor"] == 900
    cosine = milestones_of(*STEPS, "schedule.shape=cosine", "schedule.warmup=0", "schedule.decay=900")
    assert cosine == {"learning rate reaches its floor": 900, "the run ends": 1000}
    constant = milestones_of(*STEPS, "schedule.shape=constant", "schedule.warmup=7")
    assert constant == {"warm-up ends": 7, "the run ends": 1000}


@pytest.mark.parametrize(
    ("unit", "warmup", "step"), [("samples", 40, 10), ("samples", 41, 11), ("tokens", 40 * 512 + 1, 11)]
)
def test_a_warm_up_in_samples_or_tokens_ends_with_the_step_that_completes_it(
    unit: str, warmup: int, step: int
) -> None:
    told = milestones_of(*STEPS[:3], f"schedule.unit={unit}", f"schedule.warmup={warmup}")
    assert told["warm-up ends"] == step


def test_epochs_end_within_the_last_step_that_lies_whole_in_them() -> None:
    each = 250.5 * 4 * 512  # steps of 4 samples of 512 tokens
    told = milestones_of(*STEPS, "schedule.warmup=0", "schedule.shape=constant", data_tokens=each)
    assert told == {"epoch 1 ends": 251, "epoch 2 ends": 501, "epoch 3 ends": 752, "the run ends": 1000}
    many = milestones_of(*STEPS, data_tokens=4 * 512.0)
    assert [f"epoch {number} ends" in many for number in (20, 21)] == [True, False]


def test_milestones_count_the_samples_of_all_peers_and_their_days_with_all_pauses() -> None:
    peers = ("elastic.inner_steps=10", "elastic.peers=2", "train.samples=6400", "train.tokens=0")
    plan = planned("optim.name=adamw", *peers, "schedule.unit=samples", "schedule.warmup=800")
    first, last = plan.calendar[0], plan.calendar[-1]
    assert (first.what, first.step, first.sample) == ("warm-up ends", 100, 800)
    assert first.days == pytest.approx(plan.whole.days / 8)
    assert (last.what, last.step, last.sample, last.tokens) == ("the run ends", 800, 6400, 6400 * 512)
    assert last.days == pytest.approx(plan.whole.days)


def test_a_ramp_up_is_walked_batch_by_batch() -> None:
    course = planned("train.global_batch=8", "train.ramp_up=[4,4,80]", "train.micro_batch=1").draft.course
    assert [(one.first_step, one.first_sample, one.steps, one.global_batch) for one in course[:1]] == [
        (0, 0, 20, 4)
    ]
    assert (course[1].first_step, course[1].first_sample) == (20, 80)
    four, eight = (one.step.seconds for one in course)
    assert seconds_at_step(course, 23) == pytest.approx(20 * four + 3 * eight)
    assert seconds_at_step(course, 7) == pytest.approx(7 * four)
    assert seconds_at_step(course, 10**6) == pytest.approx(total_seconds(course))
    assert [step_at_sample(course, sample) for sample in (0, 1, 4, 5, 80, 81, 88, 89)] == [
        0, 1, 1, 2, 20, 21, 21, 22,
    ]  # fmt: skip
    assert step_at_sample(course, 10**9) == course[1].first_step + course[1].steps
    cost = ramp_up_cost(course)
    split = planned("train.global_batch=8", "train.ramp_up=[4,4,80]", "train.micro_batch=2", gpus=2)
    assert [one.micro_batches for one in split.draft.course] == [1, 2]
    assert (cost.samples, cost.seconds) == (80, pytest.approx(20 * four))
    assert cost.penalty_s == pytest.approx(20 * four - 10 * eight)
    later = ("train.micro_batch=1", "train.micro_batch_changes=[[400,2]]")
    longer = planned("train.global_batch=8", "train.ramp_up=[4,4,80]", *later).draft.course
    assert len(longer) == 3 and ramp_up_cost(longer).samples == 80, "a later micro-batch ramps up nothing"


def test_changes_of_batch_and_precision_are_milestones_with_their_samples() -> None:
    ramp_up = ("train.global_batch=8", "train.ramp_up=[4,4,80]", "train.micro_batch=1")
    changes = (
        "train.micro_batch_changes=[[84,2]]",
        "train.precision=fp32",
        "train.precision_changes=[[96,'bf16']]",
    )
    plan = planned(*ramp_up, *changes)
    told = {event.what: (event.step, event.sample) for event in plan.calendar}
    assert told["full batch of 8"] == (20, 80)
    assert told["micro-batch becomes 2"] == (21, 88)
    assert told["precision becomes bf16"] == (22, 96)
    course = plan.draft.course
    assert [one.precision for one in course] == ["fp32", "fp32", "fp32", "bf16"]
    assert [(one.steps, one.micro_batch) for one in course[:3]] == [(20, 1), (1, 1), (1, 2)]
    assert plan.draft.work.precision == "bf16" and plan.draft.work.micro_batch == 2


def test_a_peers_steps_are_those_of_its_part_of_the_samples() -> None:
    loaded = load_recipe("diloco-internet", ["elastic.peers=3", "train.tokens=1280000"])
    train, elastic = loaded.recipe.train, loaded.recipe.elastic  # 10,000 samples of 128 tokens
    batch = train.global_batch
    assert not train.ramp_up
    assert steps_of_peer(train, elastic, sequence_length=128) == -(-3334 // batch)
    alone = replace(elastic, inner_steps=0)
    assert steps_of_peer(train, alone, sequence_length=128) == -(-10_000 // batch)
    ramped = replace(train, samples=4000, tokens=0, global_batch=16, ramp_up=(4, 4, 1200))
    consumed = steps = 0
    while consumed < 4000:  # as training counts: each step reads the samples of all peers
        consumed += 3 * phase_at(ramped, consumed).global_batch
        steps += 1
    assert steps_of_peer(ramped, elastic, sequence_length=128) == steps
    counted = replace(train, steps=50, tokens=0)
    assert consumed_at_end(counted, sequence_length=128) == 50 * batch


@pytest.mark.parametrize(
    ("codec", "average", "kept", "made"),
    [
        ("fp32", "weights", 8.0, 4.0),
        ("bf16", "weights", 8.0, 2.0),
        ("int8", "weights", 8.0, 1.0),
        ("int4", "weights", 12.0, 4.5),  # with what rounding left, and what it will leave
        ("int4", "gradients", 0.0, 0.5),
        ("fp32", "gradients", 0.0, 4.0),
    ],
)
def test_a_peer_keeps_base_and_momentum_and_what_its_codec_needs(
    codec: str, average: str, kept: float, made: float
) -> None:
    elastic = load_recipe("diloco-internet").recipe.elastic
    elastic = replace(elastic, codec=codec, average=average, overlap_steps=0)
    assert outer_memory_bytes(elastic, parameters=1000) == (1000 * kept, 1000 * (kept + made) + 4000)
    many = 1 << 28
    assert outer_memory_bytes(elastic, parameters=many)[1] == many * (kept + made) + 4 * (1 << 27)


def test_the_sparse_average_is_kept_as_places_and_values_up_to_what_all_take() -> None:
    elastic = load_recipe("diloco-internet").recipe.elastic
    sparse = replace(elastic, codec="sparse", average="weights", overlap_steps=0, density=0.01, peers=5)
    assert outer_memory_bytes(sparse, parameters=1000) == (12_000, 12_000 + 400 + 4000 + 4000)
    dense = replace(sparse, density=0.5)
    assert outer_memory_bytes(dense, parameters=1000)[1] == 12_000 + 4000 + 4000 + 4000


@pytest.mark.parametrize(
    ("codec", "peers", "chosen"),
    [
        ("fp32", 1000, "fp32"), ("int8", 2, "int8"), ("int8", 87, "int8"), ("int8", 89, "bf16"),
        ("int4", 2, "int4"), ("int4", 4, "int4"), ("int4", 5, "int8"), ("int4", 900, "int8"),
        ("int4", 1000, "bf16"),
    ],
)  # fmt: skip
def test_partial_sums_are_wider_where_peers_are_many(codec: str, peers: int, chosen: str) -> None:
    assert codec_of_partial_sums(codec, peers) == chosen


def test_the_error_of_an_average_adds_partial_sums_to_the_complete_one() -> None:
    assert average_error("int4", 9, reduce_codec="int8") == pytest.approx((0.0075**2 * 4 + 0.117**2) ** 0.5)
    assert average_error("int8", 3) == pytest.approx(0.0075 * 2**0.5)
    assert average_error("int8", 1) == average_error("sparse", 50) == 0.0


def test_a_peer_alone_exchanges_nothing_and_steps_its_outer_optimizer() -> None:
    elastic = replace(load_recipe("diloco-internet").recipe.elastic, peers=1, codec="int8")
    link = SiteLink(gbit_per_s=2.0, efficiency=0.5, latency_ms=10.0, outer_step_s=3.0)
    alone = plan_round(elastic, link, parameters=1000, step_s=0.5, state_bytes=70.0)
    assert (alone.exchange_s, alone.sent_bytes) == (3.0, 0.0)
    inner_s = 0.5 * elastic.inner_steps
    assert alone.utilisation == pytest.approx(inner_s / (inner_s + 3.0))
    assert alone.copy_bytes == 70.0 + 8000 + 4000
