"""What the ranks of a small pipeline do for its tests: tasks that run on every rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.layouts.styles import recipe_of
from tests.layouts.training import batches, build
from torch import Tensor, nn

from bloomery.data.position import EVERYTHING
from bloomery.data_loader.batches import MicroBatch
from bloomery.errors import RankLost
from bloomery.model.attention import Attention
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.flat import FlatGroup
from bloomery.parallel.mesh import mesh_of
from bloomery.plan.ranks import degrees_of
from bloomery.plan.schedule import Phase
from bloomery.train.state import Goal, TrainState


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """How one parameter's gradient came together on one rank."""

    times: int
    error: float
    """Of the fp32 accumulator against the fp64 sum of what autograd returned, relative."""
    error_in_bf16: float
    """Of a sum kept in bf16."""


def accumulate_many(
    style: str, settings: tuple[str, ...], micro_batches: int, rank: int
) -> Mapping[str, Accumulated]:
    """Accumulate micro-batches of one sample on bf16 weights, beside an fp64 and a bf16 sum of the same."""
    model, taken = _model(style, (*settings, "train.precision=bf16"), rank=rank, micro_batches=micro_batches)
    model.set_phase(precision="bf16", recompute="none")
    sums: dict[nn.Parameter, tuple[Tensor, Tensor, int]] = {}
    with _watched(sums):
        model.accumulate(taken, 0, weight=1.0)
    found = {}
    kept = {entry.name: entry.tensor for entry in model.weights.gradient_entries()}
    for name, parameter in model.decoder.named_parameters():
        if f"gradient.{name}" not in kept:
            continue  # fused: the others are enough
        exact, narrow, times = sums[parameter]
        size = float(torch.linalg.vector_norm(exact))
        found[name] = Accumulated(
            times=times,
            error=float(torch.linalg.vector_norm(kept[f"gradient.{name}"].double() - exact)) / size,
            error_in_bf16=float(torch.linalg.vector_norm(narrow.double() - exact)) / size,
        )
    return found


def reductions(style: str, settings: tuple[str, ...], micro_batches: int, rank: int) -> Counter[str]:
    """How often each group's gradients were summed over ranks during the backwards, by its first name."""
    model, taken = _model(style, (*settings, "train.precision=bf16"), rank=rank, micro_batches=micro_batches)
    model.set_phase(precision="bf16", recompute="none")
    reduce, times = FlatGroup._reduce_to_shards, Counter[str]()

    def counted(group: FlatGroup) -> None:
        times[group.layout.parameters[0].name] += 1
        reduce(group)

    with patch.object(FlatGroup, "_reduce_to_shards", counted):
        model.accumulate(taken, 0, weight=1.0)
    return times


@contextmanager
def _watched(sums: dict[nn.Parameter, tuple[Tensor, Tensor, int]]) -> Iterator[None]:
    accumulate = FlatGroup.accumulate

    def watched(group: FlatGroup, parameter: nn.Parameter, **more: bool) -> None:
        if parameter.grad is not None:
            grad = parameter.grad.detach()
            if parameter in sums:
                exact, narrow, times = sums[parameter]
                sums[parameter] = exact + grad.double(), narrow + grad, times + 1
            else:
                sums[parameter] = grad.double(), grad.clone(), 1
        accumulate(group, parameter, **more)

    with patch.object(FlatGroup, "accumulate", watched):
        yield


def computed(
    style: str, settings: tuple[str, ...], micro_batches: int, recompute: str, rank: int
) -> tuple[int, Mapping[str, Tensor]]:
    """How often this rank's blocks computed their attention in a step, and its gradients."""
    model, taken = _model(style, settings, rank=rank, micro_batches=micro_batches)
    attend, times = Attention.attend, [0]

    def counted(self: Attention, *arguments: Any) -> Any:
        times[0] += 1
        return attend(self, *arguments)

    with patch.object(Attention, "attend", counted):
        model.set_phase(precision="fp32", recompute=recompute)
        model.accumulate(taken, 0, weight=1.0)
    gradients = {entry.name: entry.tensor.clone() for entry in model.weights.gradient_entries()}
    return times[0] // len(model.decoder.blocks), gradients


def held_out(style: str, settings: tuple[str, ...], rank: int) -> tuple[float, int]:
    """Summed over ranks: nats of eight samples with dropout off, and their tokens."""
    model, taken = _model(style, settings, rank=rank, micro_batches=5)
    moves = 0

    def report_progress() -> None:
        nonlocal moves
        moves += 1

    mine = model.entropy(taken, report_progress=report_progress)
    assert moves, "a long evaluation reports that it goes on"
    both = torch.tensor([mine.nats, mine.tokens], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(both)
    return float(both[0]), int(both[1])


def wait_for_one_that_left(rank: int, settings: tuple[str, ...], told: Path) -> None:
    """Rank 1 dies before the first step; what rank 0 is told goes to a file."""
    model, taken = _model("llama", settings, rank=rank, micro_batches=4)
    if rank == 1:
        os._exit(0)
    try:
        model.accumulate(taken, 0, weight=1.0)
    except RankLost as lost:
        told.write_text(str(lost))


def _model(
    style: str, settings: tuple[str, ...], *, rank: int, micro_batches: int
) -> tuple[TrainingModel, list[MicroBatch]]:
    recipe = recipe_of(style, settings)
    world = dist.get_world_size() if dist.is_initialized() else 1
    degrees = degrees_of(recipe.parallel, world=world)
    assert degrees is not None
    mesh = mesh_of(
        degrees,
        rank=rank,
        device=torch.device("cpu"),
        chunks=recipe.parallel.chunks,
        schedule=recipe.parallel.schedule,
    )
    model = build(recipe, mesh)
    model.initialise(seed=recipe.run.seed, bigrams=lambda: torch.zeros(1, 1))
    order, data = batches(recipe, mesh)
    state = TrainState(goal=Goal(steps=1))
    phase = Phase(
        global_batch=micro_batches * degrees.data, micro_batch=1, precision="fp32", recompute="none"
    )
    taken = data.batch(order.next_span(state.position, phase.global_batch, EVERYTHING), phase.micro_batch)
    return model, list(taken)
