"""Makes the plan of a run (memory, speed, duration, cost) from a recipe, a machine and its accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bloomery.config.recipe import Recipe
from bloomery.frozen import dataclass
from bloomery.plan.advice import advice
from bloomery.plan.block_cost import Workload
from bloomery.plan.checkpoint_plan import DAY_S, MOST_LOST, CheckpointPlan, plan_checkpoints
from bloomery.plan.collectives import StepShape, step_shape
from bloomery.plan.hardware import GIB, SiteLink
from bloomery.plan.layout import Layout, StageParameters, bubble_share, layout_of
from bloomery.plan.memory import StageMemory, offloaded_memory, rank_parameters
from bloomery.plan.parameters import ModelParameters, count_parameters, forward_cost, teraflops, token_cost
from bloomery.plan.peer_round import Round, plan_round
from bloomery.plan.ranks import Degrees
from bloomery.plan.recomputation import AUTO, choose_recomputation, memory_of, resolved
from bloomery.plan.request import Request, data_degrees, refuse_impossible, vocabulary_of
from bloomery.plan.schedule import phases
from bloomery.plan.step_time import HIGH, LOW, stages_for
from bloomery.plan.timeline import (
    Milestone,
    Stretch,
    milestones,
    peers_of,
    total_seconds,
    total_steps,
    walk_run,
    workload_at_phase,
)
from bloomery.plan.traffic import Traffic, step_traffic


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed at the full batch.

    TFLOPs are of one accelerator; mfu and hfu are shares of its peak.
    """

    step_s: float
    step_low_s: float
    step_high_s: float
    bottleneck: str
    bubble_share: float
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_per_accelerator: float
    hardware_teraflops: float
    model_teraflops: float
    hardware_teraflops_range: tuple[float, float]
    model_teraflops_range: tuple[float, float]
    mfu: float
    hfu: float


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """The totals of a whole run. Days are days of the calendar, with saves, evaluations and allocation
    hours.
    """

    steps: int
    samples: int
    tokens: int
    training_days: float
    saving_hours: float
    evaluation_hours: float
    failure_hours: float
    exchange_hours: float
    """The hours of exchanges between peers."""
    days: float
    days_low: float
    days_high: float
    accelerator_hours: float
    energy_mwh: float
    cost: float | None
    currency: str
    model_flops: float


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan without its advice, which is computed from it."""

    request: Request
    work: Workload
    parameters: ModelParameters
    stages: tuple[StageParameters, ...]
    memory: tuple[StageMemory, ...]
    course: tuple[Stretch, ...]
    checkpoints: CheckpointPlan

    @property
    def worst_stage(self) -> int:
        """The index of the stage that needs the most memory."""
        return max(range(len(self.memory)), key=lambda index: self.memory[index].total)

    @property
    def peak_bytes(self) -> int:
        """The bytes that the worst stage needs."""
        return self.memory[self.worst_stage].total

    @property
    def room_bytes(self) -> int:
        """The bytes that an accelerator has."""
        return int(self.request.hardware.accelerator.memory_gib * GIB)

    def peak_with(self, layout: Layout) -> int:
        """Return the bytes that the worst stage would need in another layout."""
        return max(
            memory.total for memory in memory_of(self.request.recipe, replace(self.work, layout=layout))
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `bloomery plan` reports."""

    draft: Draft
    assumptions: tuple[str, ...]
    speed: Speed
    traffic: Traffic
    whole: RunTotals
    between_peers: Round | None
    calendar: tuple[Milestone, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage fits its accelerator."""
        return self.draft.peak_bytes <= self.draft.room_bytes


def make_plan(request: Request) -> Plan:
    """Plan a run. Raises ConfigError that lists everything impossible in the request."""
    refuse_impossible(request)
    request, assumptions = _settled(request)
    recipe = request.recipe
    accelerators = request.accelerators or 1
    layout = layout_of(
        recipe,
        accelerators=accelerators,
        per_node=request.hardware.node.accelerators,
        vocabulary=vocabulary_of(recipe),
    )
    work = base_workload(request, layout)
    if recipe.train.recompute == AUTO:
        room = request.hardware.accelerator.memory_gib * GIB
        recipe, choice = resolved(recipe, work, room_bytes=room)
        request = replace(request, loaded=replace(request.loaded, recipe=recipe))
        assumptions.append(f"train.recompute = auto is {choice.mode}: {choice.why}.")
    parameters = _parameters(recipe, work.vocabulary)
    course = walk_run(recipe, work, parameters)
    work = workload_at_phase(work, phases(recipe.train)[-1][1])
    stages = stages_for(work, parameters)
    if layout.offload and request.hardware.accelerator.kind == "gpu":
        assumptions.append(_offloaded(recipe, work, parameters, stages))
    draft = Draft(
        request=request,
        work=work,
        parameters=parameters,
        stages=stages,
        memory=memory_of(recipe, work),
        course=course,
        checkpoints=plan_checkpoints(
            recipe.checkpoint,
            course,
            parameters=parameters.total,
            optimizer_bytes=_optimizer_bytes(recipe, parameters),
            hardware=request.hardware,
            accelerators=accelerators,
            failures_per_week=request.failures_per_week,
            reach_steps=recipe.guard.reach_steps,
            evaluate=recipe.evaluate,
            peers=peers_of(recipe),
        ),
    )
    whole = _whole(draft)
    pace = whole.days / total_seconds(course)
    return Plan(
        draft=draft,
        assumptions=tuple(assumptions),
        speed=_speed(draft),
        traffic=step_traffic(shape_of(draft)),
        whole=whole,
        between_peers=round_of(draft),
        calendar=tuple(milestones(recipe, course, pace=pace, data_tokens=request.data_tokens)),
        warnings=tuple(advice(draft)),
    )


def shape_of(draft: Draft) -> StepShape:
    """Return what the collectives of a step of the full batch depend on."""
    recipe, work, layout = draft.request.recipe, draft.work, draft.work.layout
    return step_shape(
        recipe,
        Degrees(pipeline=layout.pipeline, data=layout.data, tensor=layout.tensor, shard=layout.shards),
        replace(
            phases(recipe.train)[-1][1],
            global_batch=draft.course[-1].micro_batches * work.micro_batch * layout.data,
            precision=work.precision,
        ),
        vocabulary=work.vocabulary,
    )


def base_workload(request: Request, layout: Layout) -> Workload:
    """Return the run's workload with the micro-batch of its first phase."""
    recipe = request.recipe
    work = Workload(
        model=recipe.model,
        vocabulary=vocabulary_of(recipe),
        sequence_length=recipe.data.sequence_length,
        micro_batch=recipe.train.micro_batch,
        precision="bf16",
        layout=layout,
        hardware=request.hardware,
        muon_iterations=recipe.optim.muon_iterations if recipe.optim.name == "muon" else 0,
        masks_documents=recipe.data.mask_documents,
        fp8_scaling=recipe.train.fp8_scaling,
    )
    return workload_at_phase(work, phases(recipe.train)[0][1])


def _parameters(recipe: Recipe, vocabulary: int) -> ModelParameters:
    return count_parameters(recipe.model, vocabulary=vocabulary, sequence_length=recipe.data.sequence_length)


def _offloaded(
    recipe: Recipe, work: Workload, parameters: ModelParameters, stages: tuple[StageParameters, ...]
) -> str:
    each = [offloaded_memory(work, parameters, stage, recipe.optim.name) for stage in stages]
    most = max(each, key=lambda memory: memory.pinned)
    return (
        f"parallel.offload = cpu takes {(most.pinned + most.moments) / GIB:.1f} GiB of main memory for each "
        f"accelerator, {most.pinned / GIB:.1f} of them pinned."
    )


def _optimizer_bytes(recipe: Recipe, parameters: ModelParameters) -> float:
    if recipe.optim.name != "muon":
        return 8.0
    matrices = parameters.layers * parameters.block.matrices
    return 8.0 - 4.0 * matrices / parameters.total


def _settled(request: Request) -> tuple[Request, list[str]]:
    """Return the request with a number of accelerators, and the assumptions made for it."""
    recipe = request.recipe
    replica = recipe.parallel.tensor * recipe.parallel.pipeline
    if request.accelerators is not None:
        return request, []
    if recipe.parallel.data != "auto":
        return replace(request, accelerators=replica * recipe.parallel.data), []
    per_node = request.hardware.node.accelerators
    degrees = data_degrees(recipe) or [1]
    whole_nodes = [degree for degree in degrees if degree * replica % per_node == 0 or replica == 1]
    layout = layout_of(recipe, accelerators=replica, per_node=per_node, vocabulary=vocabulary_of(recipe))
    for degree in whole_nodes or degrees:
        work = base_workload(request, replace(layout, data=degree))
        room = request.hardware.accelerator.memory_gib * GIB
        if recipe.train.recompute == AUTO:
            fits = choose_recomputation(recipe, work, room_bytes=room).fits
        else:
            fits = max(stage.total for stage in memory_of(recipe, work)) <= room
        if fits:
            break
    assumed = f"parallel.data is 'auto' and --gpus was not given: {degree * replica} accelerators, "
    return replace(request, accelerators=degree * replica), [f"{assumed}the fewest that fit and divide."]


def _speed(draft: Draft) -> Speed:
    recipe, last, work = draft.request.recipe, draft.course[-1], draft.work
    tokens = last.global_batch * work.sequence_length
    seconds, ranks = last.step.seconds, work.layout.world
    cost = token_cost(
        work.model,
        vocabulary=work.vocabulary,
        sequence_length=work.sequence_length,
        recompute=recipe.train.recompute,
    )
    hardware, model = (
        teraflops(flops, tokens=tokens, seconds=seconds, accelerators=ranks)
        for flops in (cost.hardware, cost.model)
    )
    peak = draft.request.hardware.peak_flops(work.precision) / 1e12
    return Speed(
        step_s=seconds,
        step_low_s=last.step.low_s,
        step_high_s=last.step.high_s,
        bottleneck=last.step.bottleneck,
        bubble_share=bubble_share(work.layout, last.micro_batches),
        samples_per_s=last.global_batch / seconds,
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_accelerator=tokens / seconds / ranks,
        hardware_teraflops=hardware,
        model_teraflops=model,
        hardware_teraflops_range=(hardware / HIGH, hardware / LOW),
        model_teraflops_range=(model / HIGH, model / LOW),
        mfu=model / peak,
        hfu=hardware / peak,
    )


def _whole(draft: Draft) -> RunTotals:
    request, course, work = draft.request, draft.course, draft.work
    hardware, ranks = request.hardware, work.layout.world
    training = total_seconds(course)
    evaluation = _evaluation_s(request.recipe, course, work)
    saving = draft.checkpoints.saving_s
    failures = _failure_s(draft, training)
    rounds = _rounds_s(draft)
    running = training + evaluation + saving + failures + rounds
    days = running / DAY_S * 24 / request.hours_per_day
    hours = running / 3600 * ranks * peers_of(request.recipe)
    peers = peers_of(request.recipe)
    samples = course[-1].end_sample * peers
    power = hardware.accelerator.power_w + hardware.node.overhead_power_w / hardware.node.accelerators
    price = request.price_per_accelerator_hour
    price = hardware.operation.price_per_accelerator_hour if price is None else price
    cost = token_cost(work.model, vocabulary=work.vocabulary, sequence_length=work.sequence_length)
    return RunTotals(
        steps=total_steps(course),
        samples=samples,
        tokens=samples * work.sequence_length,
        training_days=training / DAY_S,
        saving_hours=saving / 3600,
        evaluation_hours=evaluation / 3600,
        failure_hours=failures / 3600,
        exchange_hours=rounds / 3600,
        days=days,
        days_low=days * LOW,
        days_high=days * HIGH,
        accelerator_hours=hours,
        energy_mwh=hours * power * hardware.operation.power_usage_effectiveness / 1e6,
        cost=hours * price if price else None,
        currency=hardware.operation.currency,
        model_flops=float(cost.model) * samples * work.sequence_length,
    )


def round_of(draft: Draft) -> Round | None:
    """Return one outer step, or None if the run has no peers."""
    elastic = draft.request.recipe.elastic
    if not elastic.inner_steps:
        return None
    link = draft.request.link or SiteLink()
    parameters = draft.parameters
    per_parameter = 4 + _optimizer_bytes(draft.request.recipe, parameters)
    return plan_round(
        elastic,
        link,
        parameters=parameters.total,
        step_s=draft.course[-1].step.seconds,
        state_bytes=per_parameter * parameters.total,
    )


def _rounds_s(draft: Draft) -> float:
    exchange = round_of(draft)
    return total_steps(draft.course) // exchange.inner_steps * exchange.exchange_s if exchange else 0.0


def _failure_s(draft: Draft, training_s: float) -> float:
    """Return the seconds that failures cost: repeated work, restarts and loads.

    A run that would lose more than MOST_LOST of its time is given the seconds of one that loses MOST_LOST;
    `advice` says that it does not end.
    """
    figures = draft.checkpoints
    if figures.lost_share is None:
        return 0.0
    with_failures_s = training_s / (1 - min(figures.lost_share, MOST_LOST))
    return max(0.0, with_failures_s - training_s * (1 + figures.blocking_s / figures.interval_s))


def _evaluation_s(recipe: Recipe, course: Sequence[Stretch], work: Workload) -> float:
    """Return the seconds of the forward passes over held-out samples, at the run's own speed."""
    if not recipe.evaluate.every_steps:
        return 0.0
    forward = forward_cost(work.model, vocabulary=work.vocabulary, sequence_length=work.sequence_length)
    cost = token_cost(
        work.model,
        vocabulary=work.vocabulary,
        sequence_length=work.sequence_length,
        recompute=recipe.train.recompute,
    )
    last = course[-1]
    sample_s = last.step.seconds / last.global_batch * forward / cost.hardware
    times = total_steps(course) // recipe.evaluate.every_steps + recipe.evaluate.at_end
    return times * recipe.evaluate.samples * sample_s


def parameters_of_stage(draft: Draft, index: int) -> float:
    """Return the number of parameters that one rank of a stage computes with."""
    return rank_parameters(draft.parameters, draft.stages[index], draft.work)
