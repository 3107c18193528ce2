"""Searches the layouts of a model on some accelerators: ranks those that fit, and says why each is slower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from bloomery.config.findings import divisors
from bloomery.config.parallel import RECOMPUTATIONS
from bloomery.config.recipe import Recipe
from bloomery.config.validate_layout import (
    batch_mistakes,
    layout_mistakes,
    pipeline_mistakes,
    sharding_mistakes,
)
from bloomery.config.validate_precision import scaling_mistakes
from bloomery.frozen import dataclass
from bloomery.plan.block_cost import Workload
from bloomery.plan.hardware import GIB
from bloomery.plan.layout import Layout
from bloomery.plan.memory import Training, stage_memory
from bloomery.plan.overview import base_workload
from bloomery.plan.parameters import (
    ModelParameters,
    TokenCost,
    count_parameters,
    ffn_width,
    kv_heads,
    teraflops,
    token_cost,
)
from bloomery.plan.request import MOST_ACCELERATORS, Request, refuse_impossible
from bloomery.plan.schedule import phases
from bloomery.plan.step_time import StepTime, stages_for, step_time
from bloomery.plan.timeline import workload_at_phase

MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4, 8)
MOST_STAGES = 64


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that fits.

    reason: why it is slower than the best.
    memory_bytes: what its largest stage needs.
    """

    layout: Layout
    micro_batch: int
    recompute: str
    step: StepTime
    mfu: float
    memory_bytes: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search, the quickest layout first.

    indivisible: number of layouts that a training would refuse.
    """

    recipe: str
    hardware: str
    accelerators: int
    ranked: tuple[Candidate, ...]
    too_large: int
    indivisible: int
    nearest: str
    """If nothing fits, the layout that comes nearest, and what it lacks."""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What all candidates of a search have in common."""

    recipe: Recipe
    work: Workload
    parameters: ModelParameters
    accelerators: int
    room_bytes: int
    costs: dict[str, TokenCost]


def search_layouts(request: Request) -> SearchResult:
    """Search all layouts of the recipe's full batch. Raises ConfigError if the request is impossible.

    A layout has to pass the checks with which a training begins, including those of the batches of a ramp-up;
    the recipe's own degrees and micro-batches do not bind it. The schedules are 1F1B and interleaved. Every
    stage has to fit its accelerator.
    """
    accelerators = _accelerators(request)
    setting = _setting(request, accelerators)
    fitting: list[Candidate] = []
    too_large = indivisible = 0
    least: tuple[int, Candidate] | None = None
    for work, recomputations in _choices(setting):
        if _would_be_refused(setting.recipe, work):
            indivisible += len(recomputations)
            continue
        for recompute in recomputations:
            memory = _peak(setting, work, recompute)
            if memory > setting.room_bytes:
                too_large += 1
                if least is None or memory < least[0]:
                    least = (memory, _timed(setting, work, recompute, memory))
                continue
            fitting.append(_timed(setting, work, recompute, memory))
    fitting.sort(key=lambda candidate: (candidate.step.seconds, candidate.memory_bytes))
    ranked = tuple(
        replace(candidate, reason=_reason(setting, candidate, fitting[0])) for candidate in fitting
    )
    return SearchResult(
        recipe=setting.recipe.run.name,
        hardware=request.hardware.name,
        accelerators=accelerators,
        ranked=ranked,
        too_large=too_large,
        indivisible=indivisible,
        nearest="" if ranked or least is None else _nearest(setting, least[1]),
    )


def as_rows(result: SearchResult) -> dict[str, Any]:
    """Return the result of a search as JSON."""
    return {
        "recipe": result.recipe,
        "hardware": result.hardware,
        "accelerators": result.accelerators,
        "too_large": result.too_large,
        "indivisible": result.indivisible,
        "nearest": result.nearest,
        "ranked": [
            asdict(candidate.layout)
            | {
                "micro_batch": candidate.micro_batch,
                "recompute": candidate.recompute,
                "step_s": candidate.step.seconds,
                "step_low_s": candidate.step.low_s,
                "step_high_s": candidate.step.high_s,
                "mfu": candidate.mfu,
                "memory_bytes": candidate.memory_bytes,
                "reason": candidate.reason,
            }
            for candidate in result.ranked
        ],
    }


def _accelerators(request: Request) -> int:
    """Return the number of accelerators; the recipe's own layout need not divide them."""
    recipe, parallel = request.recipe, request.recipe.parallel
    own = parallel.tensor * parallel.pipeline * (1 if parallel.data == "auto" else int(parallel.data))
    count = own if request.accelerators is None else request.accelerators
    alone = replace(parallel, tensor=1, pipeline=1, data="auto", sequence=False, async_tensor=False)
    loaded = replace(request.loaded, recipe=replace(recipe, parallel=alone))
    # The search chooses degrees and batches, so only the count is refused here.
    possible = 1 <= count <= MOST_ACCELERATORS
    refuse_impossible(replace(request, loaded=loaded, accelerators=None if possible else count))
    return count


def _setting(request: Request, accelerators: int) -> _Setting:
    recipe = request.recipe
    layout = Layout(data=accelerators, per_node=request.hardware.node.accelerators)
    work = workload_at_phase(base_workload(request, layout), phases(recipe.train)[-1][1])
    costs = {
        recompute: token_cost(
            recipe.model,
            vocabulary=work.vocabulary,
            sequence_length=work.sequence_length,
            recompute=recompute,
        )
        for recompute in RECOMPUTATIONS
    }
    return _Setting(
        recipe=recipe,
        work=work,
        parameters=count_parameters(
            recipe.model, vocabulary=work.vocabulary, sequence_length=work.sequence_length
        ),
        accelerators=accelerators,
        room_bytes=int(request.hardware.accelerator.memory_gib * GIB),
        costs=costs,
    )


def _choices(setting: _Setting) -> Iterator[tuple[Workload, tuple[str, ...]]]:
    """Yield every workload to try, with its recomputations."""
    recomputations = (
        RECOMPUTATIONS
        if setting.work.forms_scores
        else tuple(recompute for recompute in RECOMPUTATIONS if recompute != "selective")
    )
    for layout in _layouts(setting):
        for micro_batch in MICRO_BATCHES:
            yield replace(setting.work, layout=layout, micro_batch=micro_batch), recomputations


def _would_be_refused(recipe: Recipe, work: Workload) -> bool:
    """Return whether `train` would refuse this layout at its start, as by sizes that it does not divide."""
    layout = work.layout
    parallel = replace(
        recipe.parallel,
        data=layout.data,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        schedule=layout.schedule,
        chunks=layout.chunks,
        blocks_per_stage=(),
        recompute_per_stage=(),
        sequence=layout.sequence,
        async_tensor=layout.async_tensor,
        zero=layout.zero,
        working="by-block" if layout.rounds_by_block else "kept",
        fp8_copies=layout.keeps_fp8,
        shard_degree="auto",
        ranks_per_node=layout.per_node if layout.tensor > 1 else "auto",
    )
    train = replace(recipe.train, micro_batch=work.micro_batch, micro_batch_changes=())
    if any(batch_mistakes(train, parallel, data_degree=layout.data)):
        return True
    chosen = replace(recipe, parallel=parallel, train=train)
    return (
        any(layout_mistakes(chosen))
        or any(scaling_mistakes(chosen))
        or any(sharding_mistakes(chosen, data_degree=layout.data))
        or any(pipeline_mistakes(parallel, recipe.model, train, data_degree=layout.data))
    )


def _layouts(setting: _Setting) -> Iterator[Layout]:
    model, count = setting.recipe.model, setting.accelerators
    per_node = setting.work.layout.per_node
    for tensor in divisors(count):
        sides = (model.heads, kv_heads(model), ffn_width(model), model.hidden)
        if tensor > per_node or per_node % tensor or any(side % tensor for side in sides):
            continue
        for pipeline in divisors(count // tensor):
            if pipeline > min(MOST_STAGES, model.layers):
                break
            data = count // tensor // pipeline
            for chunks in CHUNKS if pipeline > 1 else (1,):
                if chunks > 1 and model.layers < pipeline * chunks:
                    continue
                for zero in _zero_stages(data, pipeline):
                    yield Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        sequence=tensor > 1,
                        async_tensor=tensor > 1 and setting.recipe.parallel.async_tensor,
                        zero=zero,
                        overlaps=setting.recipe.parallel.overlap,
                        prefetch_blocks=setting.recipe.parallel.prefetch_blocks,
                        schedule="interleaved" if chunks > 1 else "1f1b",
                        chunks=chunks,
                        per_node=per_node,
                    )


def _zero_stages(data: int, pipeline: int) -> tuple[int, ...]:
    """Return the ZeRO stages to try: 0 if there is nobody to shard with; 3 only without a pipeline.

    ZeRO 3 gathers weights for each micro-batch, which a pipeline would repeat for all of them.
    """
    if data == 1:
        return (0,)
    return (0, 1, 3) if pipeline == 1 else (0, 1)


def _peak(setting: _Setting, work: Workload, recompute: str) -> int:
    training = Training(
        micro_batches=setting.recipe.train.global_batch // (work.micro_batch * work.layout.data),
        recompute=recompute,
        optimizer=setting.recipe.optim.name,
        loss_chunk=setting.recipe.train.loss_chunk,
        fused=setting.recipe.train.compile != "off",
    )
    stages = stages_for(work, setting.parameters)
    # Stages with equal blocks differ only in micro-batches in flight, and the first of them holds the most.
    candidates = sorted({0, 1, len(stages) - 1} & set(range(len(stages))))
    candidates += [
        index for index, stage in enumerate(stages) if index > 1 and stage.blocks > stages[index - 1].blocks
    ]
    return max(
        stage_memory(work, setting.parameters, stages, index, training).total for index in set(candidates)
    )


def _timed(setting: _Setting, work: Workload, recompute: str, memory: int) -> Candidate:
    batch = setting.recipe.train.global_batch
    step = step_time(work, setting.parameters, global_batch=batch, recompute=recompute)
    reached = teraflops(
        setting.costs[recompute].model,
        tokens=batch * work.sequence_length,
        seconds=step.seconds,
        accelerators=setting.accelerators,
    )
    return Candidate(
        layout=work.layout,
        micro_batch=work.micro_batch,
        recompute=recompute,
        step=step,
        mfu=reached * 1e12 / work.hardware.peak_flops(work.precision),
        memory_bytes=memory,
    )


NAMES = {
    "compute_s": "compute",
    "memory_s": "memory passes",
    "tensor_s": "TP traffic",
    "pipeline_bubble_s": "bubble",
    "pipeline_transfer_s": "PP messages",
    "data_parallel_s": "DP traffic",
    "update_s": "update",
    "waiting_s": "waiting",
    "data_s": "data",
}


def _reason(setting: _Setting, candidate: Candidate, best: Candidate) -> str:
    """Return the largest item on which the candidate spends more than the best."""
    if candidate is best:
        return "the best"
    behind = candidate.step.seconds - best.step.seconds
    beyond = {part: getattr(candidate.step, part) - getattr(best.step, part) for part in NAMES}
    worst = max(beyond, key=lambda name: beyond[name])
    if behind <= 0 or beyond[worst] <= 0:
        return "memory: as quick, but fuller"
    cost = setting.costs
    name = NAMES[worst]
    if worst == "compute_s" and cost[candidate.recompute].hardware > cost[best.recompute].hardware:
        name = "recomputation"
    share = behind / best.step.seconds
    return f"{name} +{beyond[worst]:.2f} s ({share:+.0%})"


def _nearest(setting: _Setting, candidate: Candidate) -> str:
    lacking = (candidate.memory_bytes - setting.room_bytes) / GIB
    return (
        f"Nothing fits. Nearest: {candidate.layout}, micro-batch {candidate.micro_batch}, recompute "
        f"{candidate.recompute}, lacks {lacking:.1f} GiB of {candidate.memory_bytes / GIB:.1f}. Use more "
        f"accelerators, or accelerators with more memory."
    )
