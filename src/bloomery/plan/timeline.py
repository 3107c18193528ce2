"""Predicts the course of a run: stretches of equal steps, and milestones such as the ends of epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bloomery.config.recipe import Recipe
from bloomery.frozen import dataclass
from bloomery.plan.block_cost import Workload
from bloomery.plan.parameters import ModelParameters
from bloomery.plan.schedule import Phase, length_in_unit, stretches, total_samples
from bloomery.plan.step_time import StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of `steps` equal steps, beginning at `first_step` and `first_sample`, both counted from 0."""

    first_step: int
    first_sample: int
    steps: int
    global_batch: int
    micro_batch: int
    micro_batches: int
    precision: str
    step: StepTime

    @property
    def seconds(self) -> float:
        """The seconds of training through it."""
        return self.steps * self.step.seconds

    @property
    def end_sample(self) -> int:
        """The number of samples used when it is over."""
        return self.first_sample + self.steps * self.global_batch


def walk_run(recipe: Recipe, work: Workload, parameters: ModelParameters) -> tuple[Stretch, ...]:
    """Return every stretch of the run, the ramp-up exactly as training takes it.

    work: gives layout and machine.
    """
    until = total_samples(recipe.train, sequence_length=recipe.data.sequence_length)
    return tuple(_walk(recipe, work, parameters, until))


def peers_of(recipe: Recipe) -> int:
    """Return the number of replicas that train apart and average now and then: 1 if the recipe has no
    rounds.
    """
    return recipe.elastic.peers if recipe.elastic.inner_steps else 1


def _walk(recipe: Recipe, work: Workload, parameters: ModelParameters, until: int) -> Iterator[Stretch]:
    # Phases count the samples of all peers; stretches have the steps and samples of one of them.
    step = sample = 0
    for steps, phase in stretches(recipe.train, until, peers=peers_of(recipe)):
        now = workload_at_phase(work, phase)
        yield Stretch(
            first_step=step,
            first_sample=sample,
            steps=steps,
            global_batch=phase.global_batch,
            micro_batch=phase.micro_batch,
            micro_batches=phase.global_batch // (phase.micro_batch * work.layout.data),
            precision=now.precision,
            step=step_time(now, parameters, global_batch=phase.global_batch, recompute=phase.recompute),
        )
        step, sample = step + steps, sample + steps * phase.global_batch


def workload_at_phase(work: Workload, phase: Phase) -> Workload:
    """Return the workload of a phase, with its precision resolved for the machine."""
    precision = phase.precision
    if precision == "auto":
        precision = "bf16" if work.hardware.peak_flops("bf16") else "fp32"
    return replace(work, micro_batch=phase.micro_batch, precision=precision)


def seconds_at_step(course: Sequence[Stretch], step: int) -> float:
    """Return the training time until `step` steps are made, in seconds."""
    passed = 0.0
    for stretch in course:
        taken = min(stretch.steps, step - stretch.first_step)
        if taken <= 0:
            break
        passed += taken * stretch.step.seconds
    return passed


def step_at_sample(course: Sequence[Stretch], sample: int) -> int:
    """Return the steps after which at least `sample` samples are used; the run's last step if it ends
    before.
    """
    for stretch in course:
        if sample <= stretch.end_sample:
            behind = max(0, sample - stretch.first_sample)
            return stretch.first_step + -(-behind // stretch.global_batch)
    return course[-1].first_step + course[-1].steps


def total_steps(course: Sequence[Stretch]) -> int:
    """Return the number of steps of the run."""
    return course[-1].first_step + course[-1].steps


def total_seconds(course: Sequence[Stretch]) -> float:
    """Return the training time of the run in seconds, without saving and evaluating."""
    return sum(stretch.seconds for stretch in course)


@dataclass(frozen=True, kw_only=True)
class RampUpCost:
    """What the run spends until its full batch. penalty_s: beyond what its samples take at the full batch."""

    samples: int
    seconds: float
    penalty_s: float


def ramp_up_cost(course: Sequence[Stretch]) -> RampUpCost:
    """Return the time spent in steps with other batches than the run's last; zeros where there are none."""
    full = course[-1]
    ramping = [stretch for stretch in course if stretch.global_batch != full.global_batch]
    samples = sum(stretch.steps * stretch.global_batch for stretch in ramping)
    seconds = sum(stretch.seconds for stretch in ramping)
    at_full_s = samples / full.global_batch * full.step.seconds
    return RampUpCost(samples=samples, seconds=seconds, penalty_s=seconds - at_full_s)


def last_step_words(recipe: Recipe, course: Sequence[Stretch]) -> str:
    """Return how the run's length is rounded to whole steps: up, because its last step is whole.

    Megatron-LM leaves the rest out instead, which makes one step less. "" where nothing is rounded.
    """
    until = total_samples(recipe.train, sequence_length=recipe.data.sequence_length)
    beyond = course[-1].end_sample * peers_of(recipe) - until
    if recipe.train.steps or beyond <= 0:
        return ""
    steps = total_steps(course)
    return (
        f"up: the last step is whole, {beyond:,} samples beyond the length; Megatron-LM rounds down, to "
        f"{steps - 1:,} steps"
    )


MOST_EPOCHS = 20


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """Something that happens when `step` steps are made.

    days: since the start, with all pauses.
    """

    what: str
    step: int
    sample: int
    tokens: int
    days: float


def milestones(
    recipe: Recipe, course: Sequence[Stretch], *, pace: float, data_tokens: float | None
) -> list[Milestone]:
    """Return the milestones of the run, in order.

    pace: days of the calendar for each second of training.
    data_tokens: number of tokens in one epoch; None leaves out the ends of epochs.
    """
    events = [*_batch_events(recipe, course), *_schedule_events(recipe, course)]
    events += _epoch_events(recipe, course, data_tokens)
    last = total_steps(course)
    events.append(("the run ends", last))
    reached = [
        Milestone(
            what=what,
            step=step,
            sample=_sample_at(course, step) * peers_of(recipe),
            tokens=_sample_at(course, step) * peers_of(recipe) * recipe.data.sequence_length,
            days=seconds_at_step(course, step) * pace,
        )
        for what, step in events
        if 0 < step <= last
    ]
    return sorted(reached, key=lambda milestone: (milestone.step, milestone.what == "the run ends"))


def _batch_events(recipe: Recipe, course: Sequence[Stretch]) -> Iterator[tuple[str, int]]:
    train, peers = recipe.train, peers_of(recipe)
    changes = [(train.ramp_up[2], f"full batch of {train.global_batch:,}")] if train.ramp_up else []
    changes += [(sample, f"micro-batch becomes {size}") for sample, size in train.micro_batch_changes]
    changes += [(sample, f"precision becomes {precision}") for sample, precision in train.precision_changes]
    for sample, what in changes:
        step = step_at_sample(course, -(-sample // peers))
        if step < total_steps(course):  # otherwise no step follows that it would change
            yield what, step


def _schedule_events(recipe: Recipe, course: Sequence[Stretch]) -> Iterator[tuple[str, int]]:
    schedule, sequence_length = recipe.schedule, recipe.data.sequence_length
    length = length_in_unit(recipe.train, schedule, sequence_length=sequence_length)

    def step_of(progress: float) -> int:
        if schedule.unit == "steps":
            return round(progress)
        samples = progress / sequence_length if schedule.unit == "tokens" else progress
        return step_at_sample(course, -int(-samples // peers_of(recipe)))

    if schedule.warmup:
        yield "warm-up ends", step_of(schedule.warmup)
    if schedule.shape == "constant":
        return
    end = length if schedule.decay == "auto" else schedule.decay
    if schedule.shape == "wsd":
        yield "cooldown begins", step_of(end * (1 - schedule.cooldown_share))
    if end < length:
        yield "learning rate reaches its floor", step_of(end)


def _epoch_events(
    recipe: Recipe, course: Sequence[Stretch], data_tokens: float | None
) -> Iterator[tuple[str, int]]:
    if not data_tokens:
        return
    sequence_length = recipe.data.sequence_length
    peers = peers_of(recipe)
    total = total_samples(recipe.train, sequence_length=sequence_length) / peers
    each = data_tokens / sequence_length / peers
    for epoch in range(1, min(int(total / each), MOST_EPOCHS) + 1):
        # The last step that lies whole within the epoch: its checkpoint has seen the data once at most.
        step = step_at_sample(course, int(epoch * each))
        yield f"epoch {epoch} ends", step


def _sample_at(course: Sequence[Stretch], step: int) -> int:
    for stretch in course:
        if step <= stretch.first_step + stretch.steps:
            return stretch.first_sample + (step - stretch.first_step) * stretch.global_batch
    return course[-1].end_sample
