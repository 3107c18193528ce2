"""What a compiled model compiles when the phase changes: what is new, however many phases there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.parallel.small import CPU
from torch._dynamo.utils import counters

from bloomery.data_loader.batches import MicroBatch
from bloomery.model import fp8
from bloomery.model.layers import Linear
from bloomery.parallel import build as built
from bloomery.parallel import fp8_weights
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.recompute import set_recompute
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


@pytest.mark.parametrize(
    ("recompute", "apart"), [("none", ()), ("elementwise", ("attention", "mlp")), ("mlp", ("attention",))]
)
def test_inputs_are_rounded_apart_where_compiled_code_keeps_products(
    recompute: str, apart: tuple[str, ...]
) -> None:
    model = built_with_blocks(compiled=True)
    set_recompute(model.decoder, {0: "elementwise"}, splits_backward=False, compiles=True)
    set_recompute(model.decoder, {0: recompute}, splits_backward=False, compiles=True)
    layers = {
        name: part for name, part in model.decoder.blocks[0].named_modules() if isinstance(part, Linear)
    }
    assert len(layers) == 4
    for name, layer in layers.items():
        assert layer.rounds_apart == (name.split(".")[0] in apart)
    set_recompute(model.decoder, {0: recompute}, splits_backward=False, compiles=False)
    assert not any(layer.rounds_apart for layer in layers.values())


def test_each_pass_rounds_inputs_to_8_bits_in_the_direction_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # divides the passes
    for module in (fp8, fp8_weights):
        monkeypatch.setattr(module, "has_fp8_units", lambda _device: True)
    seen, write = Counter[tuple[bool, bool]](), fp8.write_fp8

    def noted(x: torch.Tensor, scale: torch.Tensor, codes: Any, transposed: Any, **more: Any) -> None:
        seen[codes is not None, transposed is not None] += 1
        write(x, scale, codes, transposed, **more)

    monkeypatch.setattr(fp8, "write_fp8", noted)
    gradients = []
    for compiled in (True, False):
        model = built_with_blocks(compiled=compiled)
        model.set_phase(precision="fp8", recompute="elementwise")
        seen.clear()
        graphs_of_a_step(model, 2, micro_batches=1)
        # Of the four inputs each copy once; gradients both ways at once.
        expected = {(True, False): 4, (False, True): 4, (True, True): 4} if compiled else {(True, True): 12}
        assert seen == expected
        gradients.append([flat.clone() for flat in model.weights.gradient])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def built_with_blocks(*, compiled: bool) -> TrainingModel:
    """A model of one block, which is compiled by itself, or eager."""
    model = replace(
        build(recipe_of(LLAMA, ("train.compile=off", "model.layers=1")), Mesh(device=CPU)),
        compiles_blocks=compiled,
    )
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    return model
