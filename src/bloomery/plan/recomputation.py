"""Chooses what blocks compute again in the backward (`train.recompute = "auto"`), by the planned memory."""

from __future__ import annotations

from dataclasses import replace

from bloomery.config.parallel import RECOMPUTATIONS, SPLIT_BACKWARD, WITHIN_ONE_BACKWARD
from bloomery.config.recipe import Recipe
from bloomery.frozen import dataclass
from bloomery.plan.block_cost import Workload
from bloomery.plan.hardware import GIB
from bloomery.plan.memory import StageMemory, Training, stage_memory
from bloomery.plan.parameters import count_parameters
from bloomery.plan.schedule import Phase, phases
from bloomery.plan.step_time import stages_for, step_time
from bloomery.plan.timeline import workload_at_phase

AUTO = "auto"
LEFT_FREE = {"gpu": 0.02, "cpu": 0.1}
"""The share of the memory that a choice leaves free, by the accelerator's kind: beside the reserve in the
hardware file on a GPU, which holds nothing else; on a CPU other processes take from it, too.
"""


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """A choice of `train.recompute`.

    why: the reason, for people; '' where the recipe chose.
    fits: whether the planned peak leaves `LEFT_FREE` of the memory free.
    """

    mode: str
    why: str
    fits: bool = True


def choose_recomputation(recipe: Recipe, work: Workload, *, room_bytes: float) -> Recomputation:
    """Return the recomputation with the shortest planned step whose planned peak fits.

    It depends on the arguments alone, so that each start of a run on the same machines chooses alike.
    work: with the layout and the machine. room_bytes: memory that one rank may use.
    """
    if recipe.train.recompute != AUTO:
        return Recomputation(mode=recipe.train.recompute, why="")
    if recipe.parallel.recompute_per_stage:
        return Recomputation(mode="none", why="parallel.recompute_per_stage says it for each stage")
    free = LEFT_FREE[work.hardware.accelerator.kind]
    too_large: list[str] = []
    for mode in _by_step_time(recipe, work):
        peak = peak_bytes(_with(recipe, mode), work)
        if peak <= (1 - free) * room_bytes:
            return Recomputation(mode=mode, why=_needs(too_large, room_bytes, free) or "all activations fit")
        too_large.append(f"{mode} needs {peak / GIB:.1f}")
    least = min(_possible(recipe, work), key=lambda mode: peak_bytes(_with(recipe, mode), work))
    return Recomputation(mode=least, why=_needs(too_large, room_bytes, free), fits=False)


def resolved(recipe: Recipe, work: Workload, *, room_bytes: float) -> tuple[Recipe, Recomputation]:
    """Return the recipe with `train.recompute` as it is chosen, and the choice."""
    choice = choose_recomputation(recipe, work, room_bytes=room_bytes)
    return _with(recipe, choice.mode), choice


def peak_bytes(recipe: Recipe, work: Workload) -> int:
    """Return the bytes that the stage with the most needs."""
    return max(stage.total for stage in memory_of(recipe, work))


def memory_of(recipe: Recipe, work: Workload) -> tuple[StageMemory, ...]:
    """Return the memory of one rank of each stage, in the phase of the run that needs the most.

    The recipe's `train.recompute` is resolved.
    """
    parameters = count_parameters(
        recipe.model, vocabulary=work.vocabulary, sequence_length=recipe.data.sequence_length
    )
    stages = stages_for(work, parameters)
    candidates: dict[tuple[int, str], tuple[Phase, int]] = {}
    for _, phase in phases(recipe.train):
        micro_batches = max(1, phase.global_batch // (phase.micro_batch * work.layout.data))
        key = (phase.micro_batch, phase.precision)
        candidates[key] = (phase, max(micro_batches, candidates.get(key, (phase, 0))[1]))
    memories = []
    for phase, micro_batches in candidates.values():
        training = Training(
            micro_batches=micro_batches,
            recompute=phase.recompute,
            optimizer=recipe.optim.name,
            loss_chunk=recipe.train.loss_chunk,
            fused=recipe.train.compile != "off",
        )
        now = workload_at_phase(work, phase)
        memories.append(
            tuple(stage_memory(now, parameters, stages, index, training) for index in range(len(stages)))
        )
    return max(memories, key=lambda memory: max(stage.total for stage in memory))


def _possible(recipe: Recipe, work: Workload) -> list[str]:
    """Return the recomputations that change something, and that the pipeline schedule allows."""
    parallel = recipe.parallel
    splits = parallel.pipeline > 1 and parallel.schedule in SPLIT_BACKWARD
    return [
        mode
        for mode in RECOMPUTATIONS
        if (mode != "selective" or work.forms_scores) and not (splits and mode in WITHIN_ONE_BACKWARD)
    ]


def _by_step_time(recipe: Recipe, work: Workload) -> list[str]:
    parameters = count_parameters(
        recipe.model, vocabulary=work.vocabulary, sequence_length=recipe.data.sequence_length
    )
    _, phase = phases(recipe.train)[-1]
    now = workload_at_phase(work, phase)

    def seconds(mode: str) -> float:
        return step_time(now, parameters, global_batch=phase.global_batch, recompute=mode).seconds

    return sorted(_possible(recipe, work), key=seconds)


def _needs(too_large: list[str], room_bytes: float, free: float) -> str:
    if not too_large:
        return ""
    return f"{', '.join(too_large)} GiB of {room_bytes / GIB:.1f}, of which {free:.0%} are left free"


def _with(recipe: Recipe, mode: str) -> Recipe:
    return replace(recipe, train=replace(recipe.train, recompute=mode))
