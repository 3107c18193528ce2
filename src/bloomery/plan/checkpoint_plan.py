"""Predicts a run's checkpoints: their size, duration, interval, number kept, and what failures cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloomery.checkpoint.format.retention import steps_to_keep
from bloomery.config.checkpoint import CheckpointSection
from bloomery.plan.formulas import (
    DAY_S,
    FULL_CHECKPOINT_BYTES,
    WEIGHTS_BYTES,
    best_interval_s,
    lost_share,
    lost_work_hours,
)
from bloomery.plan.hardware import Hardware
from bloomery.plan.timeline import Stretch, total_steps

MOST_SAVES_LISTED = 100_000


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """The figures of a run's checkpoints."""

    stored_bytes: int
    """The bytes that bloomery writes: fp32 weights and the optimizer's moments."""
    full_bytes: int
    """The bytes with the 16-bit weights beside them, as other trainers store them: 14 for each parameter."""
    weights_bytes: int
    """The bytes of 16-bit weights alone: 2 for each parameter."""
    save_s: float
    load_s: float
    saves: int
    interval_steps: float
    """The seconds between two saves at the full batch."""
    interval_s: float
    kept_at_end: int
    storage_bytes: int
    """The most bytes stored at one time: all checkpoints that are kept, and one that is being written."""
    saving_s: float
    """The seconds that all saves of the run take, if nothing overlaps them."""
    mean_time_between_failures_s: float | None
    best_interval_s: float | None
    best_interval_steps: float | None
    lost_share: float | None
    """The share of the time that saving takes and failures undo, at the recipe's interval."""
    best_lost_share: float | None
    worst_loss_hours: float
    failures: float


def plan_checkpoints(
    section: CheckpointSection,
    course: Sequence[Stretch],
    *,
    parameters: int,
    optimizer_bytes: float,
    hardware: Hardware,
    accelerators: int,
    failures_per_week: float | None,
    reach_steps: int,
) -> CheckpointPlan:
    """Return what the recipe's saving and retention amount to.

    course: the run as stretches of equal steps.
    failures_per_week: failures of the whole run in a week; None takes the hardware file's rate.
    reach_steps: see `reasons_to_keep`.
    """
    stored = round(parameters * (4 + optimizer_bytes))
    save_s = stored / (hardware.storage.write_gb_per_s * 1e9)
    steps = _save_steps(section, course)
    last = course[-1]
    interval = _interval_steps(section, last.step.seconds) or float(total_steps(course))
    interval_s = interval * last.step.seconds
    kept = steps_to_keep(
        steps,
        section=section,
        run_length_steps=total_steps(course),
        newest_intact=steps[-1] if steps else None,
        reach_steps=reach_steps,
    )
    between = _time_between_failures_s(hardware, accelerators, failures_per_week)
    best = best_interval_s(save_s=save_s, mean_time_between_failures_s=between) if between else None
    seconds = sum(stretch.seconds for stretch in course)
    return CheckpointPlan(
        stored_bytes=stored,
        full_bytes=parameters * FULL_CHECKPOINT_BYTES,
        weights_bytes=parameters * WEIGHTS_BYTES,
        save_s=save_s,
        load_s=stored / (hardware.storage.read_gb_per_s * 1e9),
        saves=len(steps),
        interval_steps=interval,
        interval_s=interval_s,
        kept_at_end=len(kept),
        storage_bytes=(len(kept) + 1) * stored,
        saving_s=len(steps) * save_s,
        mean_time_between_failures_s=between,
        best_interval_s=best,
        best_interval_steps=best / last.step.seconds if best else None,
        lost_share=_lost(interval_s, save_s, between),
        best_lost_share=_lost(best, save_s, between) if best else None,
        worst_loss_hours=lost_work_hours(steps_between_saves=interval, step_s=last.step.seconds),
        failures=seconds / between if between else 0.0,
    )


def _lost(interval_s: float, save_s: float, between_s: float | None) -> float | None:
    if not between_s:
        return None
    return lost_share(interval_s=interval_s, save_s=save_s, mean_time_between_failures_s=between_s)


def _time_between_failures_s(
    hardware: Hardware, accelerators: int, failures_per_week: float | None
) -> float | None:
    if failures_per_week is not None:
        return 7 * DAY_S / failures_per_week if failures_per_week else None
    rate = hardware.operation.failures_per_1000_accelerator_days * accelerators / 1000
    return DAY_S / rate if rate else None


def _interval_steps(section: CheckpointSection, step_s: float) -> float:
    """Return the steps between saves, whichever of steps and minutes comes first; 0 if neither is set."""
    by_minutes = max(1.0, section.every_minutes * 60 / step_s) if section.every_minutes else 0.0
    intervals = [interval for interval in (float(section.every_steps), by_minutes) if interval]
    return min(intervals) if intervals else 0.0


def _save_steps(section: CheckpointSection, course: Sequence[Stretch]) -> list[int]:
    """Return the steps at which the run saves, at most MOST_SAVES_LISTED of them."""
    steps: list[int] = []
    for stretch in course:
        interval = _interval_steps(section, stretch.step.seconds)
        end = stretch.first_step + stretch.steps
        if not interval:
            continue
        at = (steps[-1] if steps else 0) + interval
        if section.every_steps and interval == section.every_steps:
            at = float(-(-(stretch.first_step + 1) // section.every_steps) * section.every_steps)
        while at <= end and len(steps) < MOST_SAVES_LISTED:
            steps.append(int(at))
            at += interval
    last = total_steps(course)
    if section.at_end and (not steps or steps[-1] != last):
        steps.append(last)
    return steps
