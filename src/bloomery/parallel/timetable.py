"""In which order each pipeline rank computes: its forwards and backwards of stages and micro-batches.

Interleaved and zero-bubble orders are those of torch.distributed.pipelining. What runs them is ours
(`pipeline.py`): torch's runtime adds weight gradients up in the parameter's dtype and sends pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
SLOTS: Mapping[Kind, int] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""How long each takes, in forwards: a backward computes two products where a forward computes one."""

_TORCH_ORDERS: Mapping[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
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


Timetable = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank, in order."""


@lru_cache(maxsize=64)
def timetable(schedule: str, *, pipeline: int, chunks: int, micro_batches: int) -> Timetable:
    """The orders of all ranks of a pipeline. Each micro-batch passes each stage once in each direction."""
    if schedule in _TORCH_ORDERS:
        return _of_torch(
            _TORCH_ORDERS[schedule], pipeline=pipeline, chunks=chunks, micro_batches=micro_batches
        )
    ahead = [micro_batches if schedule == "gpipe" else pipeline - 1 - rank for rank in range(pipeline)]
    return tuple(_one_stage(rank, ahead=ahead[rank], count=micro_batches) for rank in range(pipeline))


def forwards_only(ranks: Sequence[int], *, micro_batches: int) -> Timetable:
    """Every micro-batch through every stage, as an evaluation needs it. ranks: of each stage, in order."""
    return tuple(
        tuple(
            Action("forward", stage, number)
            for stage, rank in enumerate(ranks)
            if rank == own
            for number in range(micro_batches)
        )
        for own in range(max(ranks) + 1)
    )


def idle_share(table: Timetable) -> float:
    """The part of a step, simulated in SLOTS, in which ranks wait: the pipeline's bubble."""
    done: dict[tuple[str, int, int], int] = {}
    places, clocks = [0] * len(table), [0] * len(table)
    last_stage = max(action.stage for actions in table for action in actions)
    while any(place < len(actions) for place, actions in zip(places, table, strict=True)):
        before = list(places)
        for rank, actions in enumerate(table):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready_at(action, done, last_stage)
                if ready is None:
                    break
                clocks[rank] = max(clocks[rank], ready) + SLOTS[action.kind]
                direction = {"forward": "forward", "backward_weight": "weight"}.get(action.kind, "backward")
                done[direction, action.stage, action.micro_batch] = clocks[rank]
                places[rank] += 1
        assert places != before, "a timetable in which ranks wait for each other"
    busy = sum(SLOTS[action.kind] for actions in table for action in actions)
    return 1.0 - busy / (max(clocks) * len(table))


def _ready_at(action: Action, done: Mapping[tuple[str, int, int], int], last_stage: int) -> int | None:
    """When what an action needs is there; None while it is not."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "forward":
        return 0 if stage == 0 else done.get(("forward", stage - 1, number))
    if action.kind == "backward_weight":
        return done.get(("backward", stage, number))
    own = done.get(("forward", stage, number))
    above = own if stage == last_stage else done.get(("backward", stage + 1, number))
    return None if own is None or above is None else max(own, above)


def _one_stage(stage: int, *, ahead: int, count: int) -> tuple[Action, ...]:
    """One stage a rank: `ahead` forwards, then a forward and a backward in turn, then what is left."""
    ahead = min(ahead, count)
    actions = [Action("forward", stage, number) for number in range(ahead)]
    for number in range(count):
        if ahead + number < count:
            actions.append(Action("forward", stage, ahead + number))
        actions.append(Action("backward", stage, number))
    return tuple(actions)


def _of_torch(schedule: Any, *, pipeline: int, chunks: int, micro_batches: int) -> Timetable:
    """The order that one of torch's schedules makes. It asks its stages for nothing but numbers."""
    stages = [
        SimpleNamespace(
            num_stages=pipeline * chunks, group_size=pipeline, group_rank=0, submod=torch.nn.Identity()
        )
        for _ in range(chunks)
    ]
    order = schedule(stages, micro_batches).pipeline_order
    return tuple(
        tuple(
            Action(_KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action is not None
        )
        for rank in range(pipeline)
    )
