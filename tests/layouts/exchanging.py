"""What a rank's part of its peer's vector is, in any layout: run on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.layouts.styles import recipe_of
from tests.layouts.training import build

from bloomery.diloco.peer_vector import PeerVector
from bloomery.parallel.mesh import mesh_of
from bloomery.plan.ranks import degrees_of


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of one rank. boxes: (name, whole shape, offset, shape) of what is its own. squares: of its masters.

    doubled: whether all that the rank holds, its own or not, doubled when every owner doubled its part.
    """

    numel: int
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    squares: float
    doubled: bool
    gradients_doubled: bool
    gathers_weights: bool


def part(style: str, settings: tuple[str, ...], ranks: int, rank: int) -> Part:
    """One rank's part. Collective over the process group."""
    recipe = recipe_of(style, settings)
    degrees = degrees_of(recipe.parallel, world=ranks)
    assert degrees is not None
    mesh = mesh_of(
        degrees,
        rank=rank,
        device=torch.device("cpu"),
        chunks=recipe.parallel.chunks,
        schedule=recipe.parallel.schedule,
    )
    model = build(recipe, mesh)
    model.initialise(seed=recipe.run.seed, bigrams=lambda: torch.zeros(0))
    vector = PeerVector(model.weights, mesh)
    values = vector.zeros()
    vector.read_masters(values)
    before = {(e.name, e.box): e.tensor.clone() for e in model.weights.state_entries()}
    vector.write_masters(values * 2)
    after = {(e.name, e.box): e.tensor for e in model.weights.state_entries()}
    for gradient, master in zip(model.weights.reduced_gradient, model.weights.master, strict=True):
        gradient.copy_(master)
    vector.read_gradients(values)
    vector.write_gradients(values * 2)
    gradients = (model.weights.reduced_gradient, model.weights.gradient)
    pairs = [pair for held in gradients for pair in zip(held, model.weights.master, strict=True)]
    entries = list(vector.entries(values, prefix="outer.base", scope="shared"))
    return Part(
        numel=vector.numel,
        boxes=[(e.name, e.global_shape, e.box.offset, e.box.shape) for e in entries],
        squares=float(values.double().square().sum()),
        doubled=all(torch.equal(after[key], 2 * old) for key, old in before.items()),
        gathers_weights=model.weights.gathers_weights,
        gradients_doubled=all(torch.equal(gradient, 2 * master) for gradient, master in pairs),
    )
