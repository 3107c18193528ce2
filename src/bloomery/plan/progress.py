"""Predicts what is left of a run from the speed in its journal, and compares that speed with the plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from bloomery.errors import DataError
from bloomery.events.history import recent_steps
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.frozen import dataclass
from bloomery.plan.overview import Plan, base_workload, make_plan
from bloomery.plan.parameters import count_parameters
from bloomery.plan.request import (
    Request,
    data_degrees,
    refuse_impossible,
    vocabulary_of,
    with_local_vocabulary,
    with_vocabulary,
)
from bloomery.plan.schedule import consumed_at_end, phase_at, steps_at_end, stretches, total_samples
from bloomery.plan.step_time import step_time
from bloomery.plan.timeline import workload_at_phase

MEASURED_STEPS = 100  # the newest steps, whose median speed counts
FACTORS = (0.25, 0.5, 2, 4)  # of the accelerators, for `OtherScale`


@dataclass(frozen=True, kw_only=True)
class OtherScale:
    """What would be left of the run on another number of accelerators."""

    accelerators: int
    days_left: float | None
    """None if that number cannot divide the batch."""
    note: str


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """Where a run stands.

    Speeds are medians of its newest steps that have the same global batch and number of ranks. Steps and
    accelerators are this peer's; samples, tokens and their speeds are those of all peers.
    total_steps: those so far and what remains, for each peer if the number of peers stays.
    peers: number of peers that trained at the last step.
    """

    run: str
    hardware: str
    step: int
    total_steps: int
    peers: int
    consumed_samples: int
    total_samples: int
    consumed_tokens: int
    total_tokens: int
    accelerators: int
    hours_per_day: float
    steps_measured: int
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    model_teraflops: float
    hardware_teraflops: float
    mfu: float | None
    days_left: float
    elsewhere: tuple[OtherScale, ...]
    planned_step_s: float
    planned_days: float
    planned_days_left: float
    planned_tokens_per_s: float
    planned_model_teraflops: float
    planned_hardware_teraflops: float
    planned_mfu: float
    started_days_ago: float
    """The days between the journal's first event and its last."""


def progress_of(request: Request, run: Path) -> RunProgress:
    """Read the run's journal. Raises DataError if it has no steps, and ConfigError for an impossible
    request.
    """
    history = recent_steps(RunDirectory(run), most=MEASURED_STEPS)
    if not history.alike:
        raise DataError(
            f"{run} has no steps in its journal", remedy="Wait for the first, or plan its recipe."
        )
    asked = request.accelerators
    loaded = with_local_vocabulary(with_vocabulary(request.loaded, history.vocabulary))
    recipe = loaded.recipe
    recent, last = history.alike, history.alike[-1]
    request = replace(request, loaded=loaded, consumed=last.consumed_samples)
    if asked is not None:
        refuse_impossible(request)
    # What was measured belongs to the ranks that made the steps; another number is one of the other scales.
    accelerators = history.ranks if asked is None or history.are_ranks_recorded else asked
    request = replace(request, accelerators=accelerators)
    plan = make_plan(request)
    request = plan.draft.request  # with what 'auto' settings become
    step_s = median(report.seconds for report in recent)
    speed = last.global_batch * last.peers / step_s
    sequence_length = recipe.data.sequence_length
    total = total_samples(recipe.train, sequence_length=sequence_length)
    if recipe.train.steps and last.peers == 1:  # it ends by its steps, whatever its batches were so far
        total = consumed_at_end(
            recipe.train, sequence_length=sequence_length, step=last.step, consumed=last.consumed_samples
        )
    planned_s = _planned_step_s(request, plan, last)
    # What is left of the ramp-up has other batches, so another speed, than the steps that were measured.
    left_s = _planned_seconds_left(plan, last, until=total) * step_s / planned_s
    scale = planned_s / step_s
    days = left_s / 3600 / request.hours_per_day
    return RunProgress(
        run=str(run),
        hardware=request.hardware.name,
        step=last.step,
        total_steps=steps_at_end(
            recipe.train,
            sequence_length=sequence_length,
            step=last.step,
            consumed=last.consumed_samples,
            peers=last.peers,
        ),
        peers=last.peers,
        consumed_samples=last.consumed_samples,
        total_samples=total,
        consumed_tokens=last.consumed_samples * sequence_length,
        total_tokens=total * sequence_length,
        accelerators=accelerators,
        hours_per_day=request.hours_per_day,
        steps_measured=len(recent),
        step_s=step_s,
        samples_per_s=speed,
        tokens_per_s=speed * sequence_length,
        model_teraflops=median(report.model_tflops for report in recent),
        hardware_teraflops=median(report.hardware_tflops for report in recent),
        mfu=median(report.mfu for report in recent if report.mfu is not None)
        if last.mfu is not None
        else None,
        days_left=days,
        elsewhere=at_other_scales(request, plan, accelerators, days, asked=asked),
        planned_step_s=planned_s,
        planned_days=plan.whole.days,
        planned_days_left=days * scale,
        planned_tokens_per_s=last.global_batch * last.peers * sequence_length / planned_s,
        planned_model_teraflops=plan.speed.model_teraflops * _share(plan, planned_s, last),
        planned_hardware_teraflops=plan.speed.hardware_teraflops * _share(plan, planned_s, last),
        planned_mfu=plan.speed.mfu * _share(plan, planned_s, last),
        started_days_ago=history.span_s / 86_400,
    )


def as_progress_figures(progress: RunProgress) -> dict[str, Any]:
    """Return the progress as JSON."""
    return asdict(progress)


def progress_rows(progress: RunProgress) -> list[tuple[str, str, str, str]]:
    """Return (figure, planned, measured, measured ÷ planned) for each row of a table."""
    pairs: list[tuple[str, float, float | None, str]] = [
        ("s/step", progress.planned_step_s, progress.step_s, ".4g"),
        ("tokens/s", progress.planned_tokens_per_s, progress.tokens_per_s, ",.0f"),
        ("model TFLOPs each", progress.planned_model_teraflops, progress.model_teraflops, ".4g"),
        ("hardware TFLOPs each", progress.planned_hardware_teraflops, progress.hardware_teraflops, ".4g"),
        ("MFU", progress.planned_mfu, progress.mfu, ".1%"),
        ("days left", progress.planned_days_left, progress.days_left, ".4g"),
    ]
    rows = []
    for name, planned, measured, form in pairs:
        ratio = "-" if measured is None or not planned else f"{measured / planned:.2f}"
        rows.append((name, format(planned, form), "-" if measured is None else format(measured, form), ratio))
    return rows


def at_other_scales(
    request: Request, plan: Plan, accelerators: int, days: float, *, asked: int | None = None
) -> tuple[OtherScale, ...]:
    """Return the remaining days on a quarter to four times as many accelerators, scaled by the plans of
    both.

    asked: another number that is of interest; None for none.
    """
    recipe = request.recipe
    here_s = plan.draft.course[-1].step.seconds
    replica = plan.draft.work.layout.replica
    estimates = []
    counts = {accelerators * factor for factor in FACTORS} | ({asked} if asked else set())
    for count in sorted(counts - {accelerators}):
        degree = count / replica
        if degree < 1 or degree != int(degree):
            continue
        work = replace(
            plan.draft.work,
            layout=replace(plan.draft.work.layout, data=int(degree)),
        )
        batch = recipe.train.global_batch
        if batch % (work.micro_batch * int(degree)):
            estimates.append(
                OtherScale(accelerators=int(count), days_left=None, note="does not divide the batch")
            )
            continue
        there_s = step_time(
            work, plan.draft.parameters, global_batch=batch, recompute=recipe.train.recompute
        ).seconds
        fits_now = int(degree) in data_degrees(recipe, consumed=request.consumed)
        note = "" if fits_now else "once the full batch is reached"
        estimates.append(OtherScale(accelerators=int(count), days_left=days * there_s / here_s, note=note))
    return tuple(estimates)


def _share(plan: Plan, planned_s: float, last: StepReport) -> float:
    """Return the planned speed at the present batch relative to that at the full batch."""
    full = plan.draft.course[-1]
    return (last.global_batch / planned_s) / (full.global_batch / full.step.seconds)


def _planned_seconds_left(plan: Plan, last: StepReport, *, until: int) -> float:
    """Return the seconds of the planned steps after the last report, if the number of peers stays.

    until: the samples of all peers at the end of the run.
    """
    draft = plan.draft
    return sum(
        steps
        * step_time(
            workload_at_phase(draft.work, phase),
            draft.parameters,
            global_batch=phase.global_batch,
            recompute=phase.recompute,
        ).seconds
        for steps, phase in stretches(
            draft.request.recipe.train, until, start=last.consumed_samples, peers=last.peers
        )
    )


def _planned_step_s(request: Request, plan: Plan, last: StepReport) -> float:
    recipe = request.recipe
    phase = phase_at(recipe.train, max(0, last.consumed_samples - last.global_batch * last.peers))
    work = workload_at_phase(base_workload(request, plan.draft.work.layout), phase)
    parameters = count_parameters(
        recipe.model, vocabulary=vocabulary_of(recipe), sequence_length=recipe.data.sequence_length
    )
    return step_time(work, parameters, global_batch=last.global_batch, recompute=phase.recompute).seconds
