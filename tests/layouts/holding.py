"""What one rank holds of a sharded model: run on ranks by test_memory.py."""

from __future__ import annotations

import torch
from styles import recipe_of
from training import batches, build

from bloomery.data.share import EVERYTHING
from bloomery.parallel.flat import FlatGroup
from bloomery.parallel.mesh import mesh_of
from bloomery.plan.ranks import degrees_of
from bloomery.plan.schedule import phase_at
from bloomery.train.state import Goal, TrainState
from layouts import LLAMA


def held(settings: tuple[str, ...], rank: int) -> tuple[int, int, int, int]:
    """Elements of masters, of gradients after a batch, of blocks' weights then, and at most on the way."""
    recipe = recipe_of(LLAMA, settings)
    degrees = degrees_of(recipe.parallel, world=2)
    assert degrees is not None
    mesh = mesh_of(degrees, rank=rank, device=torch.device("cpu"))
    model = build(recipe, mesh)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    groups: list[FlatGroup] = model.weights._groups
    blocks = [group for group in groups if group.layout.bucket]

    def gathered() -> int:
        return sum(group.working.untyped_storage().size() // 4 for group in blocks)

    most = [gathered()]
    for block in model.decoder.blocks:
        block.register_full_backward_pre_hook(lambda *_: most.append(gathered()))
        block.mlp.register_forward_hook(lambda *_: most.append(gathered()))
    order, data = batches(recipe, mesh)
    phase = phase_at(recipe.train, 0)
    span = order.next_span(TrainState(goal=Goal(steps=1)).position, phase, EVERYTHING)
    model.accumulate(data.batch(span, phase), 0, weight=1.0)
    gradients = sum(flat.untyped_storage().size() // 4 for flat in model.weights.gradient)
    return sum(flat.numel() for flat in model.weights.master), gradients, gathered(), max(most)
