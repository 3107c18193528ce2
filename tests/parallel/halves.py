"""What one of two tensor-parallel ranks does for test_tensor.py, in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from tests.parallel.small import MODELS, Trained, build, mesh_for, train

LAYOUTS = {"TP 2": False, "TP 2 + SP": True}
CASES = [(style, layout) for style in MODELS for layout in LAYOUTS]


def trained_halves(rank: int) -> dict[Any, Trained]:
    mesh = mesh_for(rank, tensor=2)
    return {
        (style, layout): train(build(style, mesh, sequence=LAYOUTS[layout]), mesh) for style, layout in CASES
    }


def compiled_and_eager(rank: int) -> list[list[Any]]:
    """Steps of both, with and without a split sequence: a block is traced whole, collectives inside."""
    torch._dynamo.reset()
    mesh, found = mesh_for(rank, tensor=2), []
    for sequence in (False, True):
        eager, traced = (build("llama", mesh, sequence=sequence) for _ in range(2))
        # Tracing takes seconds, and the blocks are alike.
        traced.decoder.blocks[0].compile(backend="aot_eager", dynamic=False, fullgraph=True)
        found.append([train(model, mesh, steps=2).steps for model in (eager, traced)])
    return found
