"""Evaluations of a compiled model compile nothing, however many widths the held-out batches have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.layouts.workers import Ranks
from tests.parallel.small import CPU
from torch._dynamo.utils import counters

from bloomery.data_loader.batches import MicroBatch
from bloomery.model.loss import IGNORED
from bloomery.parallel.mesh import Mesh, mesh_of
from bloomery.parallel.recompute import set_recompute
from bloomery.plan.ranks import degrees_of
from bloomery.torch_private import compiled_graphs


def test_held_out_batches_of_twelve_widths_are_computed_eagerly() -> None:
    eager = build(recipe_of(LLAMA, ()), Mesh(device=torch.device("cpu")))
    eager.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    batches = [micro_batch(width) for width in range(4, 16)]
    expected = eager.entropy(batches)
    modes = dict.fromkeys(range(len(eager.decoder.blocks)), "none")
    set_recompute(eager.decoder, modes, splits_backward=False, compiles=True)
    counters.clear()
    done: list[None] = []
    found = replace(eager, compiled=True).entropy(batches, report_progress=lambda: done.append(None))
    assert found == expected and len(done) == len(batches)
    assert counters["stats"]["unique_graphs"] == 0


def micro_batch(width: int) -> MicroBatch:
    tokens = torch.arange(2 * width).reshape(2, width) % 90
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = IGNORED
    return MicroBatch(
        tokens=tokens, targets=targets, documents=None, samples=torch.zeros(2, dtype=torch.int64)
    )


def test_a_compiled_pipeline_evaluates_twelve_widths_without_compiling() -> None:
    ranks = Ranks()
    try:
        assert ranks.run(graphs_of_evaluations, ranks=2) == [0, 0]
    finally:
        ranks.close()


def graphs_of_evaluations(rank: int) -> int:
    """Evaluate batches of twelve widths in a stage, and return how many graphs that compiled."""
    recipe = recipe_of(LLAMA, ("train.compile=on", "parallel.pipeline=2"))
    mesh = mesh_of(degrees_of(recipe.parallel, world=2), rank=rank, device=CPU)
    before = compiled_graphs()
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        model = build(recipe, mesh)
        model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
        model.entropy([micro_batch(width) for width in range(4, 16)])
    return compiled_graphs() - before
