"""Working weights that are rounded from the masters block by block: equal bits, fewer bytes."""

from __future__ import annotations

import pytest
import torch
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.machine import has_python_headers
from tests.parallel.small import CPU

from bloomery.data_loader.batches import MicroBatch
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers


def model_with(*settings: str) -> TrainingModel:
    model = build(recipe_of(LLAMA, ("train.precision=bf16", *settings)), Mesh(device=CPU))
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="bf16", recompute="none")
    return model


def accumulated(model: TrainingModel) -> dict[str, torch.Tensor]:
    """The gradients of two micro-batches by logical name."""
    for_each = [torch.arange(64).reshape(2, 32) * step % 90 for step in (3, 7)]
    batches = [
        MicroBatch(tokens=text, targets=text.roll(-1, 1), documents=None, samples=torch.arange(2))
        for text in for_each
    ]
    model.accumulate(batches, 0, weight=1 / 128)
    model.weights.reduce()
    return {entry.name: entry.tensor.clone() for entry in model.weights.gradient_entries()}


def bytes_of_blocks(model: TrainingModel) -> int:
    groups = [group for group in model.weights._groups if group.layout.bucket]
    return sum(group.working.untyped_storage().size() for group in groups)


@pytest.mark.parametrize("recompute", ["none", "full", "mlp"])
def test_gradients_have_the_bits_that_kept_working_weights_give(recompute: str) -> None:
    kept, by_block = model_with(), model_with("parallel.working=by-block")
    for model in (kept, by_block):
        model.set_phase(precision="bf16", recompute=recompute)
    expected, found = accumulated(kept), accumulated(by_block)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("recompute", ["elementwise", "selective", "mlp", "full"])
def test_gradients_have_the_same_bits_whatever_is_computed_again(recompute: str) -> None:
    stored, again = model_with(), model_with()
    again.set_phase(precision="bf16", recompute=recompute)
    expected, found = accumulated(stored), accumulated(again)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_no_more_than_one_block_has_working_weights_and_none_has_them_between_steps() -> None:
    model = model_with("parallel.working=by-block")
    optimizers = Optimizers(model.weights, recipe_of(LLAMA, ()).optim)
    seen: list[int] = []
    for block in model.decoder.blocks:
        block.mlp.register_forward_hook(lambda *_: seen.append(bytes_of_blocks(model)))
        block.register_full_backward_pre_hook(lambda *_: seen.append(bytes_of_blocks(model)))
    accumulated(model)
    facts = model.weights.examine(limit=1.0, unscale=1.0)
    optimizers.step(facts, learning_rate=1e-2)
    model.weights.copy_masters_to_working()
    one_block = 2 * sum(parameter.numel() for parameter in model.decoder.blocks[0].parameters())
    assert one_block <= max(seen) < 1.2 * one_block  # buffers are padded
    assert bytes_of_blocks(model) == 0
    state = [*model.weights.master, *model.weights.gradient, *model.weights.working]
    state += [entry.tensor for entry in optimizers.state_entries() if entry.tensor.ndim]  # no counts of steps
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().size() for tensor in state}
    ends = sum(group.layout.numel for group in model.weights._groups if not group.layout.bucket)
    parameters = sum(group.layout.numel for group in model.weights._groups)
    assert sum(held.values()) == 16 * parameters + 2 * ends


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs(has_python_headers, package="python3-dev")
def test_compiled_blocks_free_their_weights_too_and_train_what_eager_ones_train() -> None:
    expected = accumulated(model_with("parallel.working=by-block"))
    compiled = model_with("parallel.working=by-block", "train.compile=on")
    found = accumulated(compiled)
    assert compiled.compiles_blocks and bytes_of_blocks(compiled) == 0
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm()


def test_in_fp32_the_masters_are_what_computes_and_are_never_freed() -> None:
    model = model_with("parallel.working=by-block")
    model.set_phase(precision="fp32", recompute="none")
    assert all(one is other for one, other in zip(model.weights.working, model.weights.master, strict=True))
    accumulated(model)
    assert all(master.untyped_storage().size() for master in model.weights.master)
