"""What one rank exchanges in a step, and what the plan says of it; test_exchanges.py and the soak compare."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from tests.layouts.comparison import Matrix
from tests.layouts.exchange_rows import Row
from tests.layouts.faults import branches_of_nccl
from tests.layouts.styles import recipe_of
from tests.layouts.training import batches, build, step_parts
from tests.parallel.counted_exchanges import CountedExchanges, Exchanges, differences, planned

from bloomery.config.recipe import Recipe
from bloomery.data.position import EVERYTHING
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import Mesh, mesh_of
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.collectives import step_shape
from bloomery.plan.parameters import TokenCost
from bloomery.plan.ranks import degrees_of
from bloomery.plan.schedule import phase_at
from bloomery.train.control import LocalFacts
from bloomery.train.metrics import Metrics
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import StepResult, train_step

NOTHING = LocalFacts(
    save=0.0,
    stop=0.0,
    interrupted=0.0,
    terminated=0.0,
    request=0.0,
    minutes=0.0,
    minutes_since_save=0.0,
)


def assert_exchanges_are_planned(matrix: Matrix, row: Row) -> None:
    """Count a step of a layout on all its ranks."""
    style, ranks, layout, settings = row
    degrees = tuple(f"parallel.{one}" for one in layout.split())
    counted = matrix.ranks.run(exchanged, style, (*settings, *degrees), ranks, ranks=ranks)
    assert all(total > 0 for totals, _ in counted for total in totals)
    assert [wrong for _, wrong in counted] == [[{}, {}]] * ranks


def exchanged(
    style: str, settings: Sequence[str], ranks: int, rank: int
) -> tuple[list[int], list[dict[Any, tuple[int, int]]]]:
    """(how many exchanges a second step has on this rank, where the plan says otherwise).

    Both with the collectives that gloo makes, and with those that are chosen where reduce_scatter is quick.
    """
    recipe = recipe_of(style, settings)
    degrees = degrees_of(recipe.parallel, world=ranks)
    assert degrees is not None, f"{settings} do not multiply to {ranks} ranks"
    assert isinstance(recipe.model.vocabulary, int)
    phase = phase_at(recipe.train, 0)
    shape = step_shape(recipe, degrees, phase, vocabulary=recipe.model.vocabulary)
    mesh = mesh_of(
        degrees,
        rank=rank,
        device=torch.device("cpu"),
        chunks=recipe.parallel.chunks,
        schedule=recipe.parallel.schedule,
    )
    totals, wrong = [], []
    for scatters in (False, True):
        with branches_of_nccl() if scatters else nullcontext():
            seen = _second_step(recipe, mesh)
        totals.append(seen.total())
        wrong.append(differences(seen, planned(replace(shape, scatters=scatters), mesh)))
    return totals, wrong


def _second_step(recipe: Recipe, mesh: Mesh) -> Exchanges:
    """Count the exchanges of a step that follows another, as the training loop makes it."""
    model = build(recipe, mesh)
    optimizers, loss_scale = Optimizers(model.weights, recipe.optim), LossScale(mesh.device)
    model.initialise(seed=recipe.run.seed, bigrams=lambda: torch.zeros(1, 1))
    order, data = batches(recipe, mesh)
    phase = phase_at(recipe.train, 0)
    parts = step_parts(recipe, phase, model, optimizers, loss_scale)
    state = TrainState(goal=Goal(steps=recipe.train.steps))
    for _ in range(2):
        span = order.next_span(state.position, phase.global_batch, EVERYTHING)
        with CountedExchanges(mesh) as counted:
            reduce_report(mesh, train_step(parts, data.batch(span, phase.micro_batch), state))
        state = state.after(span)
    return counted.exchanges


def reduce_report(mesh: Mesh, result: StepResult) -> None:
    """Sum what a step's report says over the ranks."""
    cost: Any = TokenCost(model=1, hardware=1)
    nobody: Any = None
    metrics = Metrics(mesh=mesh, control=nobody, interludes=(), cost=cost, peak_flops=None, sequence_length=1)
    metrics._reduce(result, NOTHING)
