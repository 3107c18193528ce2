"""The whole run as it will go: stretches of equal steps, and where a position or a moment falls in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bloomery.config.recipe import Recipe
from bloomery.plan.blockcost import Workload
from bloomery.plan.schedule import Phase, stretches, total_samples
from bloomery.plan.shapes import ModelParameters
from bloomery.plan.steptime import StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that are alike: `steps` of them from `first_step` (0 is the first) and `first_sample` on."""

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
        """Training through it."""
        return self.steps * self.step.seconds

    @property
    def end_sample(self) -> int:
        """Samples used when it is over."""
        return self.first_sample + self.steps * self.global_batch


def walk_run(recipe: Recipe, work: Workload, parameters: ModelParameters) -> tuple[Stretch, ...]:
    """Every stretch of the run, the ramp-up exactly as training takes it. `work` gives layout and machine."""
    until = total_samples(recipe.train, sequence_length=recipe.data.sequence_length)
    # Peers share the samples; the course is one peer's.
    return tuple(_walk(recipe, work, parameters, -(-until // peers_of(recipe))))


def peers_of(recipe: Recipe) -> int:
    """Replicas that train apart and average now and then: 1 where the recipe has no rounds."""
    return recipe.elastic.peers if recipe.elastic.inner_steps else 1


def _walk(recipe: Recipe, work: Workload, parameters: ModelParameters, until: int) -> Iterator[Stretch]:
    step = sample = 0
    for steps, phase in stretches(recipe.train, until):
        now = at_phase(work, phase)
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


def at_phase(work: Workload, phase: Phase) -> Workload:
    """The workload of a phase, its precision resolved for the machine."""
    precision = phase.precision
    if precision == "auto":
        precision = "bf16" if work.hardware.peak_flops("bf16") else "fp32"
    return replace(work, micro_batch=phase.micro_batch, precision=precision)


def seconds_at_step(course: Sequence[Stretch], step: int) -> float:
    """Training time until `step` steps are made."""
    passed = 0.0
    for stretch in course:
        taken = min(stretch.steps, step - stretch.first_step)
        if taken <= 0:
            break
        passed += taken * stretch.step.seconds
    return passed


def step_at_sample(course: Sequence[Stretch], sample: int) -> int:
    """Steps after which at least `sample` samples are used; the run's last where it ends before."""
    for stretch in course:
        if sample <= stretch.end_sample:
            behind = max(0, sample - stretch.first_sample)
            return stretch.first_step + -(-behind // stretch.global_batch)
    return course[-1].first_step + course[-1].steps


def total_steps(course: Sequence[Stretch]) -> int:
    """Steps of the run."""
    return course[-1].first_step + course[-1].steps


def total_seconds(course: Sequence[Stretch]) -> float:
    """Training time of the run, without saving and evaluating."""
    return sum(stretch.seconds for stretch in course)
