"""What a compiled model compiles when the phase changes: what is new, however many phases there are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.parallel.small import CPU
from torch._dynamo.utils import counters

from bloomery.data_loader.batches import MicroBatch
from bloomery.parallel import build as built
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.torch_private import compiled_graphs


@pytest.fixture(autouse=True)
def graphs_are_traced_and_not_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace each graph that would be compiled and compute it eagerly; torch's own limit is 2 instead of 8."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch._dynamo.reset()


def compiled_model(*settings: str) -> TrainingModel:
    model = build(recipe_of(LLAMA, ("train.compile=on", *settings)), Mesh(device=CPU))
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    return model


def graphs_of_a_step(model: TrainingModel, width: int, *, micro_batches: int = 2) -> int:
    """Train on micro-batches of `width` samples, and return the number of graphs that this compiled."""
    before = compiled_graphs()
    tokens = torch.arange(32 * width).reshape(width, 32) % 90
    batch = MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=torch.arange(width))
    model.accumulate([batch] * micro_batches, 0, weight=1.0 / micro_batches)
    model.weights.reduce()
    return compiled_graphs() - before


@pytest.mark.parametrize(
    ("settings", "parts"), [(("model.layers=1",), 1), (("parallel.working=by-block",), 2)]
)
def test_four_micro_batches_are_compiled_once_each(settings: tuple[str, ...], parts: int) -> None:
    """Forward and loss together are one graph; apart they are two, because equal blocks share their code."""
    model = compiled_model(*settings)
    assert model.compiles_blocks == (parts == 2)
    assert [graphs_of_a_step(model, width) for width in (1, 2, 3, 4)] == [parts] * 4
    assert [graphs_of_a_step(model, width) for width in (4, 2)] == [0, 0]


@pytest.mark.parametrize("working", ["kept", "by-block"])
def test_blocks_in_8_bits_share_their_code_and_neither_updates_nor_a_phase_again_compile(
    working: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built, "compile_by_block", lambda *_parts, **_named: True)
    model = compiled_model(f"parallel.working={working}", "model.layers=3")
    model.set_phase(precision="fp8", recompute="none")
    assert graphs_of_a_step(model, 2) == 2
    model.initialise(seed=2, bigrams=lambda: torch.zeros(1, 1))
    assert graphs_of_a_step(model, 2) == 0
    model.set_phase(precision="bf16", recompute="none")
    assert graphs_of_a_step(model, 2) == 1
    model.set_phase(precision="fp8", recompute="none")
    assert graphs_of_a_step(model, 2) == 0


def test_another_global_batch_compiles_nothing_and_another_precision_or_recomputation_does() -> None:
    model = compiled_model("parallel.working=by-block")
    assert graphs_of_a_step(model, 2) == 2
    assert graphs_of_a_step(model, 2, micro_batches=3) == 0
    model.set_phase(precision="fp32", recompute="full")
    assert graphs_of_a_step(model, 2) == 1, "of a block that computes again; the loss stays"
    model.set_phase(precision="bf16", recompute="full")
    assert graphs_of_a_step(model, 2) == 2
