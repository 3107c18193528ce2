"""Pipeline schedules: the order in which each pipeline rank computes its forwards and backwards.

'gpipe' (Huang et al. 2019) and '1f1b' (PipeDream-Flush; Narayanan et al. 2021) are made here. The interleaved
schedule (Narayanan et al. 2021) and the zero-bubble ones (Qi et al. 2023) are those of
torch.distributed.pipelining. We run them ourselves (`pipeline.py`), since torch's runtime sums weight
gradients in the parameter's dtype and sends pickles.

`p2p_channels` lists the channels between ranks that a schedule sends on. All of this is arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Literal

import torch

from bloomery.config.parallel import ParallelSection
from bloomery.config.recipe import TrainSection
from bloomery.config.validate_layout import batch_pairs
from bloomery.plan.pipeline_stages import rank_of_stage

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
SLOTS: Mapping[Kind, int] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""How long each kind takes, in forwards: a backward has two matmuls where a forward has one."""

_TORCH_ORDERS: Mapping[str, str] = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""The classes of torch.distributed.pipelining, by the setting `parallel.schedule`."""
_KINDS: Mapping[str, Kind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}


@dataclass(frozen=True)
class Action:
    """One computation of a stage on a micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int


PipelineOrder = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank, in the order in which it computes them."""


@lru_cache(maxsize=64)
def pipeline_order(schedule: str, *, pipeline: int, chunks: int, micro_batches: int) -> PipelineOrder:
    """The order of computation of every rank of a pipeline, for one global batch.

    schedule: the setting `parallel.schedule`. pipeline: pipeline ranks. chunks: stages on each rank.
    micro_batches: each passes every stage once forward and once backward.
    """
    if schedule in _TORCH_ORDERS:
        return _torch_order(
            _TORCH_ORDERS[schedule], pipeline=pipeline, chunks=chunks, micro_batches=micro_batches
        )
    ahead = [micro_batches if schedule == "gpipe" else pipeline - 1 - rank for rank in range(pipeline)]
    return tuple(
        _single_stage_order(rank, ahead=ahead[rank], count=micro_batches) for rank in range(pipeline)
    )


def forwards_only(ranks: Sequence[int], *, micro_batches: int) -> PipelineOrder:
    """The order of an evaluation: every micro-batch passes every stage forward.

    ranks: the pipeline rank of each stage.
    """
    return tuple(
        tuple(
            Action("forward", stage, number)
            for stage, rank in enumerate(ranks)
            if rank == own
            for number in range(micro_batches)
        )
        for own in range(max(ranks) + 1)
    )


def bubble_fraction(order: PipelineOrder) -> float:
    """The fraction of a step in which ranks wait, found by simulating the order with the times in SLOTS."""
    ends = end_times(order)
    busy = sum(SLOTS[action.kind] for actions in order for action in actions)
    return 1.0 - busy / (max(own[-1] for own in ends) * len(order))


def end_times(order: PipelineOrder) -> tuple[tuple[int, ...], ...]:
    """When each action of each rank ends, in forwards since the first began, by the times in SLOTS."""
    ends: list[list[int]] = [[] for _ in order]
    done: dict[tuple[str, int, int], int] = {}
    last_stage = max(action.stage for actions in order for action in actions)
    while any(len(own) < len(actions) for own, actions in zip(ends, order, strict=True)):
        before = sum(map(len, ends))
        for own, actions in zip(ends, order, strict=True):
            while len(own) < len(actions):
                action = actions[len(own)]
                ready = _ready_at(action, done, last_stage)
                if ready is None:
                    break
                own.append(max(own[-1] if own else 0, ready) + SLOTS[action.kind])
                direction = {"forward": "forward", "backward_weight": "weight"}.get(action.kind, "backward")
                done[direction, action.stage, action.micro_batch] = own[-1]
        assert sum(map(len, ends)) > before, "a pipeline order in which ranks wait for each other"
    return tuple(tuple(own) for own in ends)


def _ready_at(action: Action, done: Mapping[tuple[str, int, int], int], last_stage: int) -> int | None:
    """The time at which the inputs of an action are there; None while one of them is not yet made."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "forward":
        return 0 if stage == 0 else done.get(("forward", stage - 1, number))
    if action.kind == "backward_weight":
        return done.get(("backward", stage, number))
    own = done.get(("forward", stage, number))
    following = own if stage == last_stage else done.get(("backward", stage + 1, number))
    return None if own is None or following is None else max(own, following)


def _single_stage_order(stage: int, *, ahead: int, count: int) -> tuple[Action, ...]:
    """The order of a rank with one stage: `ahead` forwards, then forward and backward in turn, then the rest.

    With as many forwards ahead as there are micro-batches it is GPipe's; with the number of later ranks,
    1F1B.
    """
    ahead = min(ahead, count)
    actions = [Action("forward", stage, number) for number in range(ahead)]
    for number in range(count):
        if ahead + number < count:
            actions.append(Action("forward", stage, ahead + number))
        actions.append(Action("backward", stage, number))
    return tuple(actions)


def _torch_order(schedule: str, *, pipeline: int, chunks: int, micro_batches: int) -> PipelineOrder:
    """The order of one of torch's schedules, which reads nothing but these numbers from its stages.

    schedule: the name of its class.
    """
    # Imported here because it loads the compiler of torch, which takes longer than the rest of a start.
    from torch.distributed import pipelining

    stages = [
        SimpleNamespace(
            num_stages=pipeline * chunks, group_size=pipeline, group_rank=0, submod=torch.nn.Identity()
        )
        for _ in range(chunks)
    ]
    order = getattr(pipelining, schedule)(stages, micro_batches).pipeline_order
    return tuple(
        tuple(
            Action(_KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action is not None
        )
        for rank in range(pipeline)
    )


@dataclass(frozen=True, kw_only=True)
class P2PChannel:
    """A channel for messages of one kind from one pipeline rank to another.

    activations: whether it carries activations; otherwise their gradients.
    sender, receiver: indices on the pipeline axis.
    """

    activations: bool
    sender: int
    receiver: int


def p2p_channels(*, pipeline: int, chunks: int, schedule: str) -> tuple[P2PChannel, ...]:
    """Every channel between the ranks of neighbouring stages, each once, in an order that all ranks share."""
    ranks = [rank_of_stage(stage, pipeline=pipeline, schedule=schedule) for stage in range(pipeline * chunks)]
    neighbours = dict.fromkeys((earlier, later) for earlier, later in pairwise(ranks) if earlier != later)
    return tuple(
        channel
        for earlier, later in neighbours
        for channel in (
            P2PChannel(activations=True, sender=earlier, receiver=later),
            P2PChannel(activations=False, sender=later, receiver=earlier),
        )
    )


_WORTH_TELLING = 0.2
"""Waiting is reported if it takes more than this share of a step."""


def bubble_warning(
    train: TrainSection, parallel: ParallelSection, *, data_degree: int, consumed: int = 0
) -> str:
    """Warn about the batch that fills the pipeline least; '' if ranks wait little. Batches were checked.

    consumed: samples; the batches before them do not count.
    """
    if parallel.pipeline == 1:
        return ""
    pairs = batch_pairs(train, consumed=consumed)
    count, batch = min((batch // (micro * data_degree), batch) for batch, micro in pairs)
    table = pipeline_order(
        parallel.schedule, pipeline=parallel.pipeline, chunks=parallel.chunks, micro_batches=count
    )
    share = bubble_fraction(table)
    if share < _WORTH_TELLING:
        return ""
    return (
        f"warning: a batch of {batch} has {count} micro-batch{'es' if count > 1 else ''} on each of "
        f"{data_degree} data-parallel ranks, and {parallel.pipeline} pipeline ranks wait {share:.0%} of a "
        f"step ({parallel.schedule}); a larger batch, a smaller micro-batch or fewer stages wait less"
    )
