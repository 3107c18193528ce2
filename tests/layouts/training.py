"""Trains a tiny model on this rank with the parts that a run is made of, and keeps what can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from tests.layouts.faults import FAULTS
from tests.layouts.styles import recipe_of

from bloomery.checkpoint.format.state import StateEntry, Stateful, collect
from bloomery.config.recipe import Recipe
from bloomery.data.order import Order
from bloomery.data.position import EVERYTHING
from bloomery.data_loader.batches import Batches
from bloomery.model.fp8_scaling import Scaling
from bloomery.parallel.build import TrainingModel, build_training_model
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import Mesh, mesh_of
from bloomery.parallel.optimizers import Optimizers
from bloomery.parallel.precision import resolve_precision
from bloomery.plan.ranks import degrees_of
from bloomery.plan.schedule import Phase, learning_rate, phase_at
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import StepParts, train_step

WINDOWS = 512
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training. state: logical tensors to begin from, as `Trained.state` gathers them, at `first_step`.

    fault: a planted mistake, by its name in `faults`. returns: which of "gradients" (of the first step) and
    "state" (after the last) to bring back.
    """

    style: str
    settings: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 20
    fault: str | None = None
    first_step: int = 0
    consumed: int = 0
    state: Arrays | None = None
    returns: tuple[str, ...] = ("gradients",)


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """A part of one logical tensor, as one rank holds it."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank saw: losses and norms of each step, equal on all, and its boxes."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    gradients: list[Boxes]
    state: list[Boxes]


def train(job: Job, rank: int) -> RankResult:
    """Train `job` on this rank. Collective over the process group, which was joined where there are ranks."""
    recipe = recipe_of(job.style, job.settings)
    degrees = degrees_of(recipe.parallel, world=job.ranks)
    assert degrees is not None, f"{job.settings} do not multiply to {job.ranks} ranks"
    mesh = mesh_of(
        degrees,
        rank=rank,
        device=torch.device("cpu"),
        chunks=recipe.parallel.chunks,
        schedule=recipe.parallel.schedule,
    )
    with ExitStack() as stack:
        if job.fault is not None:
            stack.enter_context(FAULTS[job.fault]())
        model = build(recipe, mesh)
        optimizers = Optimizers(model.weights, recipe.optim)
        loss_scale = LossScale(mesh.device)
        parts: dict[str, Stateful] = {
            "model": model.weights,
            "optim": optimizers,
            "loss_scale": loss_scale,
        }
        model.initialise(seed=recipe.run.seed, bigrams=lambda: torch.zeros(1, 1))
        if job.state is not None:
            fill(parts, job.state)
        return _train(job, recipe, mesh, model, optimizers, loss_scale, parts)


def _train(
    job: Job,
    recipe: Recipe,
    mesh: Mesh,
    model: TrainingModel,
    optimizers: Optimizers,
    loss_scale: LossScale,
    parts: Mapping[str, Stateful],
) -> RankResult:
    order, data = batches(recipe, mesh)
    state = TrainState(goal=Goal(steps=recipe.train.steps), step=job.first_step)
    if job.consumed:
        state = replace(state, position=state.position.after(state.position.next_samples(job.consumed)))
    losses, norms, scales, gradients = list[float](), list[float](), list[float](), list[Boxes]()
    for index in range(job.steps):
        phase = phase_at(recipe.train, state.position.consumed)
        step = step_parts(recipe, phase, model, optimizers, loss_scale)
        span = order.next_span(state.position, phase.global_batch, EVERYTHING)
        result = train_step(step, data.batch(span, phase.micro_batch), state)
        if index == 0 and "gradients" in job.returns:
            # Unscaled where fp16 scaled them.
            scale = float(result.loss_scale) if result.loss_scale is not None else 1.0
            gradients = [_box(entry, scale) for entry in model.weights.gradient_entries()]
        entropy = mesh.all_reduce(torch.stack([result.cross_entropy.double(), result.z_loss.double()]))
        losses.append(float(entropy[0]) / result.tokens)
        norms.append(float(result.gradients.norm))
        scales.append(1.0 if result.loss_scale is None else float(result.loss_scale))
        state = state.after(span)
    kept = list(collect(parts).entries) if "state" in job.returns else []
    return RankResult(
        losses=losses,
        norms=norms,
        scales=scales,
        gradients=gradients,
        state=[_box(entry) for entry in kept],
    )


def build(recipe: Recipe, mesh: Mesh) -> TrainingModel:
    """The training model of a recipe on this rank, as a run builds it."""
    assert isinstance(recipe.model.vocabulary, int)
    return build_training_model(
        recipe.model,
        vocabulary=recipe.model.vocabulary,
        sequence_length=recipe.data.sequence_length,
        optim=recipe.optim,
        loss=recipe.loss,
        loss_chunk=recipe.train.loss_chunk,
        seed=recipe.run.seed,
        mesh=mesh,
        parallel=recipe.parallel,
        compiled=recipe.train.compile == "on",
        precision=resolve_precision(phase_at(recipe.train, 0).precision, mesh.device),
        fp8_scaling=cast(Scaling, recipe.train.fp8_scaling),
    )


def step_parts(
    recipe: Recipe, phase: Phase, model: TrainingModel, optimizers: Optimizers, loss_scale: LossScale
) -> StepParts:
    """The step of a phase, with the model in its precision: what `Trainer.step_parts` does."""
    model.set_phase(precision=phase.precision, recompute=phase.recompute)

    def rate(state: TrainState) -> float:
        return learning_rate(recipe.optim, recipe.schedule, at=state.step + 1, length=recipe.train.steps)

    return StepParts(
        phase=phase,
        model=model,
        optimizers=optimizers,
        loss_scale=loss_scale if phase.precision == "fp16" else None,
        clip=lambda state: recipe.optim.clip,
        sequence_length=recipe.data.sequence_length,
        learning_rate=rate,
        wait_staged=lambda: None,
    )


def batches(recipe: Recipe, mesh: Mesh) -> tuple[Order, Batches]:
    """The order and this rank's batches of a text that is mostly predictable."""
    order = Order([WINDOWS], [1.0], seed=3)
    assert isinstance(recipe.model.vocabulary, int)
    data = Batches(
        order,
        [_Text(recipe.model.vocabulary, recipe.data.sequence_length)],  # type: ignore[list-item]  — reads alike
        sequence_length=recipe.data.sequence_length,
        mask_documents=False,
        rank=mesh.data.index,
        degree=mesh.data.degree,
        eod=0,
        prefetch=0,
    )
    return order, data


class _Text:
    """Tokens of which nine in ten follow from the one before: 20 steps learn a part of it."""

    prefix = "a text made for this test"
    type_code = 5  # of int64, in an index
    mirror = None  # all of it is here
    pages = None  # no page of it has a checksum

    def __init__(self, vocabulary: int, sequence_length: int) -> None:
        generator = np.random.default_rng(5)
        follows = generator.permutation(vocabulary)
        drawn = generator.zipf(1.3, WINDOWS * sequence_length + 1) % vocabulary
        surprises = generator.random(drawn.size) < 0.1
        tokens = drawn.astype(np.int64)
        for place in range(1, tokens.size):
            if not surprises[place]:
                tokens[place] = follows[tokens[place - 1] // 4 * 4]
        self.flat, self.token_count = tokens, tokens.size

    def window(self, first: int, length: int) -> np.ndarray:
        return self.flat[first : first + length]


def fill(parts: Mapping[str, Stateful], state: Arrays) -> None:
    """Copy gathered logical tensors into the boxes of this rank, as loading a checkpoint does."""
    for entry in collect(parts).entries:
        entry.tensor.copy_(torch.from_numpy(np.array(state[entry.name][entry.box.window])))
    for part in parts.values():
        part.load_state_values({})


def gathered(boxes: Iterable[Boxes]) -> dict[str, np.ndarray]:
    """Whole logical tensors from the boxes of all ranks. Fails where an element is in none of them."""
    whole: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for box in boxes:
        values = whole.setdefault(box.name, np.zeros(box.global_shape, box.values.dtype))
        window = tuple(
            slice(first, first + size) for first, size in zip(box.offset, box.values.shape, strict=True)
        )
        values[window] = box.values
        seen.setdefault(box.name, np.zeros(box.global_shape, bool))[window] = True
    missing = sorted(name for name, covered in seen.items() if not covered.all())
    assert not missing, f"no rank has all of {missing}"
    return whole


def _box(entry: StateEntry, scale: float = 1.0) -> Boxes:
    return Boxes(
        name=entry.name,
        global_shape=tuple(entry.global_shape),
        offset=tuple(entry.box.offset),
        values=(entry.tensor.detach() / scale).clone().numpy(),
    )
