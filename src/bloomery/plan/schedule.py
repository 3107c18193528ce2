"""Computes batch, precision (the phase) and learning rate at a position of the run, and the run's length.

Samples are counted in integers, so that every rank and every resume get exactly the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from bloomery.config.elastic import ElasticSection
from bloomery.config.optim import OptimSection, ScheduleSection
from bloomery.config.recipe import TrainSection
from bloomery.frozen import dataclass

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How one step is computed. It is hashable, because it is the key of the compiled step."""

    global_batch: int
    micro_batch: int
    precision: str
    recompute: str


def phase_at(train: TrainSection, consumed: int) -> Phase:
    """Return the phase of the step that begins after `consumed` samples.

    A ramp-up of `[start, increment, samples]` has (global_batch − start)/increment intervals of
    samples/intervals each, and the batch grows by one increment with each interval consumed.
    """
    return Phase(
        global_batch=_global_batch(train, consumed),
        micro_batch=_latest(train.micro_batch, train.micro_batch_changes, consumed),
        precision=_latest(train.precision, train.precision_changes, consumed),
        recompute=train.recompute,
    )


def phases(train: TrainSection) -> tuple[tuple[int, Phase], ...]:
    """Return every phase of the run, with the consumed samples from which it holds; the first holds from
    0.
    """
    changes = {0, *(at for at, _ in train.micro_batch_changes), *(at for at, _ in train.precision_changes)}
    count = _intervals(train)
    changes |= {-(-index * train.ramp_up[2] // count) for index in range(1, count + 1)}
    return tuple((at, phase_at(train, at)) for at in sorted(changes))


def total_samples(train: TrainSection, *, sequence_length: int) -> int:
    """Return the run's length in samples; tokens round up to whole samples.

    A run counted in steps has steps × global_batch samples, as long as its batch stays as it is; it ends by
    its steps (see `is_done`).
    """
    if train.steps:
        return train.steps * train.global_batch
    return train.samples or -(-train.tokens // sequence_length)


def is_done(train: TrainSection, *, step: int, consumed: int, sequence_length: int) -> bool:
    """Return whether a run that made `step` steps and used `consumed` samples has reached its length.

    The last step is as large as any other, so a run may use up to one global batch more than it asks for.
    """
    if train.steps:
        return step >= train.steps
    return consumed >= total_samples(train, sequence_length=sequence_length)


def steps_of_run(train: TrainSection, *, sequence_length: int) -> int:
    """Return the exact number of steps of the whole run over all phases, without iterating over the steps."""
    if train.steps:
        return train.steps
    return steps_until(train, total_samples(train, sequence_length=sequence_length))


def steps_of_peer(train: TrainSection, elastic: ElasticSection, *, sequence_length: int) -> int:
    """Return the steps that each peer makes if the planned number of peers shares the run; for one peer,
    all steps.
    """
    if not elastic.inner_steps:
        return steps_of_run(train, sequence_length=sequence_length)
    return steps_left(train, sequence_length=sequence_length, consumed=0, peers=elastic.peers)


def steps_at_end(train: TrainSection, *, sequence_length: int, step: int, consumed: int, peers: int) -> int:
    """Return the number of the last step of a run that goes on from a position.

    Where batches were changed since the run began, the steps so far are not those that the recipe would make.

    step, consumed: the steps of this peer and the samples of all peers so far.
    peers: they share what is left.
    """
    if train.steps and peers == 1:
        return max(train.steps, step)
    return step + steps_left(train, sequence_length=sequence_length, consumed=consumed, peers=peers)


def steps_left(train: TrainSection, *, sequence_length: int, consumed: int, peers: int) -> int:
    """Return the steps that each of `peers` peers still makes, after all together used `consumed` samples."""
    until = total_samples(train, sequence_length=sequence_length)
    if consumed >= until:
        return 0
    return sum(steps for steps, _ in stretches(train, until, start=consumed, peers=peers))


def steps_until(train: TrainSection, consumed: int) -> int:
    """Return the steps after which a run from the start has first used at least `consumed` samples."""
    return sum(steps for steps, _ in stretches(train, consumed))


def consumed_at_end(train: TrainSection, *, sequence_length: int, step: int = 0, consumed: int = 0) -> int:
    """Return the samples that a run has used at its end, its last step whole.

    step, consumed: where the run goes on from.
    """
    if train.steps:
        return consumed_after(train, max(0, train.steps - step), start=consumed)
    until = total_samples(train, sequence_length=sequence_length)
    for steps, phase in stretches(train, until, start=consumed):
        consumed += steps * phase.global_batch
    return consumed


def consumed_after(train: TrainSection, steps: int, *, start: int = 0) -> int:
    """Return the samples that a run has used `steps` steps after it had used `start`."""
    consumed = start
    for stretch, phase in stretches(train, None, start=start):
        taken = min(stretch, steps) if stretch else steps
        consumed += taken * phase.global_batch
        steps -= taken
        if not steps:
            break
    return consumed


def stretches(
    train: TrainSection, until: int | None, *, start: int = 0, peers: int = 1
) -> Iterator[tuple[int, Phase]]:
    """Yield (steps, phase) for each stretch of equal steps that a run goes through after it has used `start`.

    until: samples at which to end; None makes the last stretch endless, with 0 as its steps.
    peers: each uses a global batch in each step, and phases count the samples of all of them.
    A step that crosses a boundary keeps the phase that it began with.
    """
    bounds = [start, *(at for at, _ in phases(train) if at > start)]
    consumed = start
    for begin, end in zip(bounds, [*bounds[1:], until], strict=True):
        phase = phase_at(train, max(begin, consumed))
        if end is None:
            yield 0, phase
            return
        limit = end if until is None else min(end, until)
        each = phase.global_batch * peers
        steps = max(0, -(-(limit - consumed) // each))
        consumed += steps * each
        if steps:
            yield steps, phase


def length_in_unit(train: TrainSection, schedule: ScheduleSection, *, sequence_length: int) -> int:
    """Return the run's length in the schedule's unit, which `learning_rate` takes as `length`."""
    if schedule.unit == "steps":
        return steps_of_run(train, sequence_length=sequence_length)
    samples = total_samples(train, sequence_length=sequence_length)
    return samples * sequence_length if schedule.unit == "tokens" else samples


def progress(schedule: ScheduleSection, *, step: int, consumed: int, sequence_length: int) -> int:
    """Return a position in the schedule's unit: steps, samples or tokens."""
    if schedule.unit == "steps":
        return step
    return consumed * sequence_length if schedule.unit == "tokens" else consumed


def learning_rate(optim: OptimSection, schedule: ScheduleSection, *, at: int, length: int) -> float:
    """Return the learning rate at a progress `at` of `length`, both in the schedule's unit.

    at: the progress at the step's *end*, so that the first step of a warm-up has a rate above 0.
    After the decay's end the rate stays at its floor. Muon's rate is this one × muon_learning_rate /
    learning_rate.
    """
    peak, floor = optim.learning_rate, schedule.floor
    if at < schedule.warmup:
        return peak * at / schedule.warmup
    if schedule.shape == "constant":
        return peak
    end = length if schedule.decay == "auto" else schedule.decay
    if at >= end:
        return floor
    begin = schedule.warmup
    if schedule.shape == "wsd":
        from fractions import Fraction  # imported here, since it takes long to load

        begin = max(begin, end - math.ceil(end * Fraction(str(schedule.cooldown_share))))
    if at < begin:
        return peak
    return floor + (peak - floor) * _decayed(schedule, (at - begin) / (end - begin))


def _decayed(schedule: ScheduleSection, share: float) -> float:
    """Return the part of the distance from peak to floor that is left after a share (0 to 1) of the decay."""
    if schedule.shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * share))
    if schedule.shape == "wsd" and schedule.cooldown_shape == "sqrt":
        return 1.0 - math.sqrt(share)
    return 1.0 - share


def _intervals(train: TrainSection) -> int:
    """Return the number of the ramp-up's intervals; 0 if there is none, or if it starts with the whole
    batch.
    """
    if not train.ramp_up:
        return 0
    start, increment, _ = train.ramp_up
    return (train.global_batch - start) // increment


def _global_batch(train: TrainSection, consumed: int) -> int:
    count = _intervals(train)
    if not count or consumed >= train.ramp_up[2]:
        return train.global_batch
    start, increment, samples = train.ramp_up
    return start + consumed * count // samples * increment


def _latest(first: T, changes: tuple[tuple[int, T], ...], consumed: int) -> T:
    """Return the value of the last change at or before `consumed`; `changes` must be in order."""
    current = first
    for at, value in changes:
        if at > consumed:
            break
        current = value
    return current
