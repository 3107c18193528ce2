"""Warnings about a plan: memory, batches, initialisation, dropout, checkpoints and layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from bloomery.plan.block_cost import block_passes
from bloomery.plan.checkpoint_plan import MOST_LOST, lost_text
from bloomery.plan.hardware import GIB
from bloomery.plan.layout import bubble_share
from bloomery.plan.parameters import LEAST_HIDDEN, unusual_shape
from bloomery.plan.request import data_degrees, vocabulary_of

if TYPE_CHECKING:
    from bloomery.config.recipe import Recipe
    from bloomery.plan.overview import Draft

BUBBLE = 0.1  # share of a step above which the pipeline bubble is warned of
TIGHT = 0.92  # share of the memory above which a plan counts as tight
LARGE_HIDDEN = 4096  # above this hidden size a large initial deviation is warned of
STD_MARGIN = 1.5  # times the usual initial deviation
PADDING = 64  # to a multiple of these rows on each tensor-parallel rank


def recipe_advice(recipe: Recipe, *, tensor: int) -> list[str]:
    """Return the warnings that need no machine: about the model's shape, initial values and vocabulary.

    tensor: the tensor-parallel degree. Plans, `config check` and the start of a training give them.
    """
    return [
        *unusual_shape(recipe.model),
        *_init(recipe),
        *_vocabulary(recipe, tensor=tensor, vocabulary=vocabulary_of(recipe)),
    ]


def advice(draft: Draft) -> list[str]:
    """Return the warnings about a plan, the most serious first."""
    return [
        *_memory(draft),
        *_bubble(draft),
        *_data_degree(draft),
        *_fewer_nodes(draft),
        *_network(draft),
        *recipe_advice(draft.request.recipe, tensor=draft.work.layout.tensor),
        *_dropout(draft),
        *_cadence(draft),
    ]


def _memory(draft: Draft) -> Iterator[str]:
    peak, room = draft.peak_bytes, draft.request.hardware.accelerator.memory_gib * GIB
    worst = draft.worst_stage
    if peak > room:
        yield (
            f"It does not fit: stage {worst} needs {peak / GIB:.1f} GiB of {room / GIB:.1f} GiB. "
            "`--search` lists layouts that do."
        )
    elif peak > TIGHT * room:
        yield f"Memory is tight: {peak / GIB:.1f} of {room / GIB:.1f} GiB on stage {worst}."


def _bubble(draft: Draft) -> Iterator[str]:
    layout = draft.work.layout
    if layout.pipeline == 1:
        return
    first, last = draft.course[0], draft.course[-1]
    shares = [bubble_share(layout, stretch.micro_batches) for stretch in (first, last)]
    if shares[1] > BUBBLE:
        yield (
            f"The pipeline idles {shares[1]:.0%} of each step: {last.micro_batches} micro-batches for "
            f"{layout.pipeline} stages. Fewer stages, a smaller micro-batch, more chunks or fewer replicas "
            f"help."
        )
    elif shares[0] > max(BUBBLE, 2 * shares[1]):
        yield (
            f"While the batch is {first.global_batch:,}, the pipeline idles {shares[0]:.0%} of each step "
            f"({first.micro_batches} micro-batches for {layout.pipeline} stages). A larger first batch is "
            f"quicker."
        )


def _data_degree(draft: Draft) -> Iterator[str]:
    layout, recipe = draft.work.layout, draft.request.recipe
    degrees = [degree for degree in data_degrees(recipe) if degree > layout.data]
    if not recipe.train.ramp_up or degrees:
        return
    last = recipe.train.global_batch // draft.course[-1].micro_batch
    later = [layout.data * factor for factor in (2, 4, 8) if last % (layout.data * factor) == 0]
    if later:
        most = ", ".join(str(degree * layout.replica) for degree in later)
        yield (
            f"The ramp-up's increments let no more than {layout.data} replicas start it; {most} accelerators "
            "divide the full batch only."
        )


def _fewer_nodes(draft: Draft) -> Iterator[str]:
    """Warn if fewer nodes would not hold ZeRO's shards, which grow when replicas are given back."""
    layout = draft.work.layout
    if not layout.zero or layout.data == 1 or draft.peak_bytes > draft.room_bytes:
        return
    degree = layout.data
    while degree % 2 == 0 and degree > 1:
        degree //= 2
        smaller = draft.peak_with(replace(layout, data=degree))
        if smaller > draft.room_bytes:
            yield (
                f"On {degree * layout.replica} accelerators ({degree} replicas) the ZeRO-{layout.zero} "
                f"shards are "
                f"larger and it no longer fits: {smaller / GIB:.1f} GiB of {draft.room_bytes / GIB:.1f}."
            )
            return


def _network(draft: Draft) -> Iterator[str]:
    step = draft.course[-1].step
    share = step.data_parallel_s / step.seconds
    if share > 0.2:
        yield (
            f"Reducing gradients between replicas takes {share:.0%} of a step on this network: a larger "
            f"batch, "
            "fewer replicas, or peers that average every few steps ([elastic]) need less."
        )
    if step.data_s > 0.0:
        yield "Storage cannot deliver tokens as fast as they are trained on."


def _init(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    std, hidden = model.init_std, model.hidden
    if isinstance(std, float) and hidden > LARGE_HIDDEN and std > STD_MARGIN * init_std_small(hidden):
        yield (
            f"init_std = {std:g} is large for hidden {hidden:,}: sqrt(1/(3h)) is "
            f"{init_std_megatron(hidden):.5f}, "
            f"sqrt(2/(5h)) is {init_std_small(hidden):.5f}. A 104B run with 0.02 diverged."
        )


def init_std_megatron(hidden: int) -> float:
    """Return the initial standard deviation sqrt(1/(3h)) for hidden size h (Smith et al., 2022, for 530B)."""
    return math.sqrt(1 / (3 * hidden))


def init_std_small(hidden: int) -> float:
    """Return the initial standard deviation sqrt(2/(5h)) for hidden size h.

    (Nguyen and Salazar, 2019, "Transformers without Tears".)
    """
    return math.sqrt(2 / (5 * hidden))


def _vocabulary(recipe: Recipe, *, tensor: int, vocabulary: int) -> Iterator[str]:
    multiple = PADDING * tensor
    if vocabulary % multiple and recipe.model.hidden >= LEAST_HIDDEN:
        padded = -(-vocabulary // multiple) * multiple
        yield (
            f"The vocabulary, {vocabulary:,}, should be padded to {padded:,} (a multiple of {PADDING} × TP): "
            "the head's matmul is quicker, and the layout masks what is added."
        )


def _dropout(draft: Draft) -> Iterator[str]:
    work = draft.work
    if not work.forms_scores:
        return
    without = replace(work, model=replace(work.model, attention_dropout=0.0))
    costs = [block_passes(workload) for workload in (work, without)]
    with_s, without_s = ((cost.forward + cost.backward).total_s for cost in costs)
    if with_s > 1.03 * without_s:
        yield (
            f"Dropout on attention weights forms them explicitly: a block takes "
            f"{with_s / without_s - 1:.0%} longer "
            "than with the fused kernel of attention_dropout = 0."
        )


def _cadence(draft: Draft) -> Iterator[str]:
    saves = draft.checkpoints
    if not saves.lost_share or not saves.best_lost_share or not saves.best_interval_s:
        return
    if saves.saves <= 1 and saves.interval_s <= saves.best_interval_s:
        return  # it saves at its end alone, and could not save less often
    best = f"every {_hours(saves.best_interval_s)} would lose {lost_text(saves.best_lost_share, form='.1%')}"
    if not saves.ends:
        helps = saves.best_lost_share <= MOST_LOST
        remedy = (
            f"Set checkpoint.every_minutes: {best}." if helps else f"No other cadence helps: {best}, too."
        )
        yield (
            f"This run does not end: it saves every {_hours(saves.interval_s)}, and a failure comes "
            f"every {_hours(saves.mean_time_between_failures_s or 0.0)}. Its days and costs are those of a "
            f"run that loses {MOST_LOST:.1%} of its time. {remedy}"
        )
    elif saves.lost_share > 2 * saves.best_lost_share and saves.lost_share > 0.01:
        yield (
            f"Saving every {_hours(saves.interval_s)} loses {saves.lost_share:.1%} of the time to failures "
            f"and saves; {best}."
        )


def _hours(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
