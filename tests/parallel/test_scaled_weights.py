"""8-bit copies of weights with many scales each: equal to the weights after each update, of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.parallel.small import CPU
from tests.parallel.test_fp8_weights import BY_BLOCK, batches_of, layers_of, update
from torch import nn

from bloomery.model import fp8_scaling
from bloomery.model.fp8_scaling import FINE_SCALINGS, FineScaling, ScaledFactor, scaled
from bloomery.model.layers import Linear
from bloomery.parallel.axis import Axis
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.parallel.scaled_weights import ScaledWeights


def model_with(scaling: FineScaling, *settings: str, precision: str = "fp8") -> TrainingModel:
    model = build(
        recipe_of(LLAMA, ("train.precision=fp8", f"train.fp8_scaling={scaling}", *settings)), Mesh(device=CPU)
    )
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision=precision, recompute="none")
    return model


def are_equal(left: ScaledFactor, right: ScaledFactor) -> bool:
    codes = torch.equal(left.codes.view(torch.uint8), right.codes.view(torch.uint8))
    return codes and torch.equal(left.scales, right.scales) and left.block == right.block


def are_current(model: TrainingModel, scaling: FineScaling) -> bool:
    """Whether both copies of each layer are those of its weight."""
    pairs = []
    for layer in layers_of(model).values():
        assert layer.scaled_weight is not None
        weight = layer.weight.detach()
        pairs += [
            (layer.scaled_weight.rows, scaled(weight, scaling, is_weight=True)),
            (layer.scaled_weight.columns, scaled(weight.t(), scaling, is_weight=True)),
        ]
    return all(are_equal(kept, made) for kept, made in pairs)


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_copies_are_those_of_the_weights_after_each_update_in_the_same_memory(scaling: FineScaling) -> None:
    model = model_with(scaling)
    assert are_current(model, scaling)
    before = [layer.scaled_weight.rows.codes for layer in layers_of(model).values()]  # type: ignore[union-attr]
    values = [codes.clone() for codes in before]
    update(model, Optimizers(model.weights, recipe_of(LLAMA, ()).optim))
    assert are_current(model, scaling)
    for layer, codes, old in zip(layers_of(model).values(), before, values, strict=True):
        assert layer.scaled_weight is not None and layer.scaled_weight.rows.codes is codes
        assert not torch.equal(codes.view(torch.uint8), old.view(torch.uint8))
    model.set_phase(precision="bf16", recompute="none")
    assert all(layer.scaled_weight is None for layer in layers_of(model).values())
    model.set_phase(precision="fp8", recompute="none")
    assert are_current(model, scaling)


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_a_step_with_copies_has_the_bits_of_one_that_rounds_in_each_product(scaling: FineScaling) -> None:
    found = []
    for settings in ((), (BY_BLOCK,)):
        model = model_with(scaling, *settings)
        assert (settings == ()) == (next(iter(layers_of(model).values())).scaled_weight is not None)
        model.accumulate(batches_of(3, 7), 0, weight=1 / 128)
        model.weights.reduce()
        found.append({entry.name: entry.tensor.clone() for entry in model.weights.gradient_entries()})
    kept, rounded = found
    assert kept.keys() == rounded.keys() and kept
    assert all(torch.equal(kept[name], rounded[name]) for name in kept)


@pytest.fixture
def weights_scaled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """The shapes of the weights that products round."""
    shapes = list[torch.Size]()

    def noted(x: torch.Tensor, scaling: FineScaling, *, is_weight: bool = False, **more: Any) -> Any:
        if is_weight:
            shapes.append(x.shape)
        return scaled(x, scaling, is_weight=is_weight, **more)

    monkeypatch.setattr(fp8_scaling, "scaled", noted)
    yield shapes


def test_products_round_no_weight_where_copies_are_kept(weights_scaled: list[torch.Size]) -> None:
    model = model_with("row")
    model.accumulate(batches_of(3, 7), 0, weight=1 / 128)
    assert not weights_scaled
    model = model_with("row", BY_BLOCK)
    model.accumulate(batches_of(3), 0, weight=1 / 64)
    assert len(weights_scaled) == 2 * len(layers_of(model))


class Tensor2(Axis):
    """A tensor axis of two ranks, of which the other's maxima are twice this one's."""

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        assert maximum and tensor.dtype == torch.int32
        numbers = tensor.view(torch.float32)
        numbers.mul_(2.0)
        self.__dict__.setdefault("sizes", []).append(tensor.numel())
        return tensor


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_rows_that_ranks_share_are_reduced_once_for_all_layers_and_no_others(scaling: FineScaling) -> None:
    model = model_with(scaling)
    layers = [part for part in model.decoder.blocks.modules() if isinstance(part, Linear)]
    for number, layer in enumerate(layers):
        layer.splits_input = bool(number % 2)
    axis = Tensor2(index=0, ranks=(0, 1))
    kept = ScaledWeights(
        model.decoder, model.weights, tensor=axis, scaling=scaling, keeps_copies=True, compiled=False
    )
    kept.use(wanted=True)
    is_row = scaling == "row"
    assert axis.__dict__.get("sizes", []) == (
        [sum(layer.weight.shape[0 if layer.splits_input else 1] for layer in layers)] if is_row else []
    )
    for layer in layers:
        weight, own = layer.weight.detach(), layer.scaled_weight
        assert own is not None
        plain = scaled(weight, scaling, is_weight=True), scaled(weight.t(), scaling, is_weight=True)
        for factor, alone, is_split in (
            (own.rows, plain[0], is_row and layer.splits_input),
            (own.columns, plain[1], is_row and not layer.splits_input),
        ):
            assert torch.equal(factor.scales, alone.scales * (2.0 if is_split else 1.0))


def test_a_rank_without_blocks_has_nothing_to_round_or_to_reduce() -> None:
    tensor: Any = SimpleNamespace(degree=2, all_reduce=lambda *_, **__: pytest.fail("there is no weight"))
    updated = SimpleNamespace(positions={}, finish=lambda: updated.on_arrival(9))
    weights: Any = SimpleNamespace(updated=updated)
    decoder: Any = SimpleNamespace(blocks=nn.ModuleList())
    scaled = ScaledWeights(decoder, weights, tensor=tensor, scaling="row", keeps_copies=True, compiled=False)
    scaled.use(wanted=True)
    assert updated.after_rounding == scaled.refresh
