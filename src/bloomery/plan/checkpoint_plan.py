"""Predicts a run's checkpoints: their size, duration, interval, number kept, and what failures cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from bloomery.checkpoint.format.retention import steps_to_keep
from bloomery.config.checkpoint import BACKGROUND_BYTES, CheckpointSection, EvaluateSection
from bloomery.frozen import dataclass
from bloomery.plan.hardware import Hardware
from bloomery.plan.step_time import HOST_BYTES_PER_S
from bloomery.plan.timeline import Stretch, total_steps

FULL_CHECKPOINT_BYTES = 14
"""Bytes of one parameter in a full checkpoint: 8 for Adam's moments, 4 for fp32, 2 for the bf16 weight."""

WEIGHTS_BYTES = 2
"""Bytes of one parameter in a checkpoint of only bf16 weights."""

DAY_S = 86_400.0
MOST_SAVES_LISTED = 100_000
MOST_LOST = 0.999
"""The largest share of time lost to failures with which a run is planned; beyond it, it does not end."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """The figures of a run's checkpoints."""

    stored_bytes: int
    """The bytes that bloomery writes: fp32 weights and the optimizer's moments."""
    full_bytes: int
    """The bytes with the 16-bit weights beside them, as other trainers store them: 14 for each parameter."""
    weights_bytes: int
    """The bytes of only 16-bit weights: 2 for each parameter."""
    save_s: float
    """The seconds until a save is durable."""
    blocking_s: float
    """The seconds for which a save stops the training; less than save_s where saves run beside it."""
    load_s: float
    restart_s: float
    """The seconds from a failure until the training goes on: to notice it, start again and load."""
    saves: int
    interval_steps: float
    interval_s: float
    """The seconds between two saves at the full batch."""
    kept_at_end: int
    storage_bytes: int
    """The most bytes stored at one time: all checkpoints that are kept, and one that is being written."""
    saving_s: float
    """The seconds for which all saves of the run stop the training."""
    mean_time_between_failures_s: float | None
    best_interval_s: float | None
    best_interval_steps: float | None
    lost_share: float | None
    """The share of the time that saves, restarts and repeated work take at the recipe's interval, below 1."""
    best_lost_share: float | None
    worst_loss_hours: float
    failures: float

    @property
    def ends(self) -> bool:
        """Whether a run with these saves and failures ends in a time that is worth a number."""
        return self.lost_share is None or self.lost_share <= MOST_LOST


def plan_checkpoints(
    section: CheckpointSection,
    course: Sequence[Stretch],
    *,
    parameters: int,
    optimizer_bytes: float,
    hardware: Hardware,
    accelerators: int,
    failures_per_week: float | None,
    reach_steps: Collection[int],
    evaluate: EvaluateSection,
    peers: int = 1,
) -> CheckpointPlan:
    """Return the checkpoints that the recipe's saving and retention give.

    course: the run as stretches of equal steps.
    peers: they train apart, and checkpoint.every_samples counts the samples of all of them.
    failures_per_week: failures of the whole run in a week; None takes the hardware file's rate.
    reach_steps: see `reasons_to_keep`.
    evaluate: when the held-out loss is measured, by which `keep_best` chooses.
    """
    stored = round(parameters * (4 + optimizer_bytes))
    save_s = stored / (hardware.storage.write_gb_per_s * 1e9)
    load_s = stored / (hardware.storage.read_gb_per_s * 1e9)
    restart_s = hardware.operation.detection_s + hardware.operation.restart_s + load_s
    steps, saves = _save_steps(section, course, peers=peers)
    last = course[-1]
    interval = _interval_steps(section, last, peers=peers) or float(total_steps(course))
    interval_s = interval * last.step.seconds
    blocking_s = save_s
    if _saves_in_background(section, rank_bytes=stored / accelerators):
        # The copy to host memory stops the training, and so does a save that is not durable at the next one.
        blocking_s = min(save_s, max(stored / accelerators / HOST_BYTES_PER_S, save_s - interval_s))
    kept_steps = steps_to_keep(
        steps,
        section=section,
        run_length_steps=total_steps(course),
        newest_intact=steps[-1] if steps else None,
        reach_steps=reach_steps,
    )
    # The checkpoints with the lowest held-out losses are not known yet. At most, nothing else keeps them.
    evaluated = [step for step in steps if evaluate.every_steps and step % evaluate.every_steps == 0]
    kept = len(kept_steps) + min(section.keep_best, len(set(evaluated) - kept_steps))
    between = _time_between_failures_s(hardware, accelerators, failures_per_week)
    best = best_interval_s(save_s=blocking_s, mean_time_between_failures_s=between) if between else None
    best = max(best, save_s, last.step.seconds) if best else None  # no save begins before the last is durable

    def lost(interval_s: float | None) -> float | None:
        if not between or not interval_s:
            return None
        return lost_share(
            interval_s=interval_s,
            save_s=blocking_s,
            durable_s=save_s,
            restart_s=restart_s,
            mean_time_between_failures_s=between,
        )

    seconds = sum(stretch.seconds for stretch in course)
    return CheckpointPlan(
        stored_bytes=stored,
        full_bytes=parameters * FULL_CHECKPOINT_BYTES,
        weights_bytes=parameters * WEIGHTS_BYTES,
        save_s=save_s,
        blocking_s=blocking_s,
        load_s=load_s,
        restart_s=restart_s,
        saves=saves,
        interval_steps=interval,
        interval_s=interval_s,
        kept_at_end=kept,
        storage_bytes=(kept + 1) * stored,
        saving_s=saves * blocking_s,
        mean_time_between_failures_s=between,
        best_interval_s=best,
        best_interval_steps=best / last.step.seconds if best else None,
        lost_share=lost(interval_s),
        best_lost_share=lost(best),
        worst_loss_hours=lost_work_hours(steps_between_saves=interval, step_s=last.step.seconds),
        failures=seconds / between if between else 0.0,
    )


def best_interval_s(*, save_s: float, mean_time_between_failures_s: float) -> float:
    """Return the seconds of work between saves that lose least time: sqrt(2·save·MTBF) (Young, 1974)."""
    return math.sqrt(2.0 * save_s * mean_time_between_failures_s)


_LARGEST_EXPONENT = 500.0
"""With larger ones the mean times are no floats any more, and no such run ends."""
_BELOW_ONE = math.nextafter(1.0, 0.0)


def lost_share(
    *,
    interval_s: float,
    save_s: float,
    mean_time_between_failures_s: float,
    durable_s: float | None = None,
    restart_s: float = 0.0,
) -> float:
    """Return the share of the time that saves, restarts and repeated work take, below 1.

    With failures at a constant rate, an interval of work and its save take
    M·exp(R/M)·(exp((interval + save)/M) − 1) on average (Daly, 2006, without the approximations that follow
    there). M is the mean time between failures. R is the time until training goes on after a failure, and the
    work that is repeated because the newest save was not durable yet.

    interval_s: seconds of work between two saves.
    save_s: seconds for which a save stops the training.
    durable_s: seconds from a save's begin until a restart can load it; None: save_s.
    restart_s: seconds from a failure until training goes on from the newest save.
    """
    between_s = mean_time_between_failures_s
    undurable_s = max(0.0, (durable_s or save_s) - save_s) * interval_s / (interval_s + save_s)
    exponents = (restart_s + undurable_s) / between_s, (interval_s + save_s) / between_s
    if sum(exponents) > _LARGEST_EXPONENT:
        return _BELOW_ONE
    taken_s = between_s * math.exp(exponents[0]) * math.expm1(exponents[1])
    return min(_BELOW_ONE, 1.0 - interval_s / taken_s)


def lost_text(share: float, *, form: str) -> str:
    """Return a lost share as text in a format such as ".1%", which would round the largest to 100%."""
    return format(share, form) if share <= MOST_LOST else "nearly all"


def lost_work_hours(*, steps_between_saves: float, step_s: float) -> float:
    """Return the hours of work that a failure just before a save loses."""
    return steps_between_saves * step_s / 3600


def _saves_in_background(section: CheckpointSection, *, rank_bytes: float) -> bool:
    """Say whether saves run beside the training, as the trainer decides it."""
    return section.background == "on" or (section.background == "auto" and rank_bytes >= BACKGROUND_BYTES)


def _time_between_failures_s(
    hardware: Hardware, accelerators: int, failures_per_week: float | None
) -> float | None:
    if failures_per_week is not None:
        return 7 * DAY_S / failures_per_week if failures_per_week else None
    rate = hardware.operation.failures_per_1000_accelerator_days * accelerators / 1000
    return DAY_S / rate if rate else None


def _interval_steps(section: CheckpointSection, stretch: Stretch, *, peers: int) -> float:
    """Return the steps between saves, by steps, samples or minutes, whichever comes first; 0 for none."""
    intervals = (
        float(section.every_steps),
        section.every_samples / (stretch.global_batch * peers),
        section.every_minutes * 60 / stretch.step.seconds,
    )
    return min((max(1.0, interval) for interval in intervals if interval), default=0.0)


def _save_steps(
    section: CheckpointSection, course: Sequence[Stretch], *, peers: int
) -> tuple[list[int], int]:
    """Return the steps at which the run saves, as `guard/basic_guards.py` asks for it, and their number.

    The first MOST_SAVES_LISTED are listed; those after them are counted by the shortest interval.
    """
    steps: list[int] = []
    more, newest, last = 0, 0.0, total_steps(course)
    sample, clock_s, saved_s = (
        0,
        0.0,
        0.0,
    )  # of all peers, at the begin of a stretch; clock at the newest save
    for stretch in course:
        step_s, batch = stretch.step.seconds, stretch.global_batch * peers
        step, end = stretch.first_step, stretch.first_step + stretch.steps
        while len(steps) < MOST_SAVES_LISTED:
            due: list[int] = []
            if section.every_steps:
                due.append((step // section.every_steps + 1) * section.every_steps)
            if section.every_samples:
                used = sample + (step - stretch.first_step) * batch
                at_sample = (used // section.every_samples + 1) * section.every_samples
                due.append(stretch.first_step - (sample - at_sample) // batch)
            if section.every_minutes:
                left_s = saved_s + section.every_minutes * 60 - clock_s
                due.append(max(step + 1, stretch.first_step + math.ceil(left_s / step_s)))
            if not due or min(due) > end:
                break
            step = min(due)
            saved_s = clock_s + (step - stretch.first_step) * step_s
            newest = step
            steps.append(step)
        else:
            interval = _interval_steps(section, stretch, peers=peers)
            more += int((end - step) / interval)
            newest = step + int((end - step) / interval) * interval
        sample, clock_s = sample + stretch.steps * batch, clock_s + stretch.seconds
    if section.at_end and newest != last:
        steps.append(last)
    return steps, len(steps) + more
