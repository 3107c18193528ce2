"""When things happen: warm-up's end, the full batch, epochs, switches of precision, the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bloomery.config.recipe import Recipe
from bloomery.plan.course import Stretch, peers_of, seconds_at_step, step_at_sample, total_steps
from bloomery.plan.schedule import length_in_unit, total_samples

MOST_EPOCHS = 20


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """Something that happens when `step` steps are made. days: from the start, all pauses counted."""

    what: str
    step: int
    sample: int
    tokens: int
    days: float


def milestones(
    recipe: Recipe, course: Sequence[Stretch], *, pace: float, data_tokens: float | None
) -> list[Milestone]:
    """All of the run, in order. pace: days of the calendar for each second of training."""
    events = [*_batch_events(recipe, course), *_schedule_events(recipe, course)]
    events += _epoch_events(recipe, course, data_tokens)
    last = total_steps(course)
    events.append(("the run ends", last))
    found = [
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
    return sorted(found, key=lambda one: (one.step, one.what == "the run ends"))


def _batch_events(recipe: Recipe, course: Sequence[Stretch]) -> Iterator[tuple[str, int]]:
    train = recipe.train
    if train.ramp_up:
        yield f"full batch of {train.global_batch:,}", step_at_sample(course, train.ramp_up[2])
    for sample, micro_batch in train.micro_batch_changes:
        yield f"micro-batch becomes {micro_batch}", step_at_sample(course, sample)
    for sample, precision in train.precision_changes:
        yield f"precision becomes {precision}", step_at_sample(course, sample)


def _schedule_events(recipe: Recipe, course: Sequence[Stretch]) -> Iterator[tuple[str, int]]:
    schedule, sequence_length = recipe.schedule, recipe.data.sequence_length
    length = length_in_unit(recipe.train, schedule, sequence_length=sequence_length)

    def step_of(progress: float) -> int:
        if schedule.unit == "steps":
            return round(progress)
        samples = progress / sequence_length if schedule.unit == "tokens" else progress
        return step_at_sample(course, -int(-samples // 1))

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
        # The last step whole within the epoch: its checkpoint has seen one pass of the data at most.
        step = step_at_sample(course, int(epoch * each))
        yield f"epoch {epoch} ends", step


def _sample_at(course: Sequence[Stretch], step: int) -> int:
    for stretch in course:
        if step <= stretch.first_step + stretch.steps:
            return stretch.first_sample + (step - stretch.first_step) * stretch.global_batch
    return course[-1].end_sample
