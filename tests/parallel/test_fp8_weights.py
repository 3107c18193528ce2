"""Scales and 8-bit copies of weights: equal to the weights after whatever changes them, and their cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.parallel.small import CPU
from torch.utils.checkpoint import CheckpointPolicy

from bloomery import torch_private
from bloomery.data_loader.batches import MicroBatch
from bloomery.diloco.peer_vector import PeerVector
from bloomery.model import fp8
from bloomery.model.fp8 import FP8_FORWARD, Fp8Weight, fp8_linear, to_fp8
from bloomery.model.layers import Linear
from bloomery.parallel import fp8_weights, recompute
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.flat import FlatGroup
from bloomery.parallel.fp8_weights import Fp8Weights
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers

BY_BLOCK = "parallel.working=by-block"
WITHOUT_COPIES = "parallel.fp8_copies=false"


def model_with(*settings: str, recompute: str = "none") -> TrainingModel:
    model = build(recipe_of(LLAMA, ("train.precision=fp8", *settings)), Mesh(device=CPU))
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="fp8", recompute=recompute)
    return model


def layers_of(model: TrainingModel) -> dict[str, Linear]:
    return {name: part for name, part in model.decoder.named_modules() if isinstance(part, Linear)}


def batches_of(*factors: int) -> list[MicroBatch]:
    texts = [torch.arange(64).reshape(2, 32) * factor % 90 for factor in factors]
    return [
        MicroBatch(tokens=text, targets=text.roll(-1, 1), documents=None, samples=torch.arange(2))
        for text in texts
    ]


def update(model: TrainingModel, optimizers: Optimizers) -> None:
    model.accumulate(batches_of(3, 7), 0, weight=1 / 128)
    model.weights.reduce()
    facts = model.weights.examine(limit=1.0, unscale=1.0)
    optimizers.step(facts, learning_rate=1e-2)
    model.after_update(facts)
    model.weights.copy_masters_to_working()


def rounded_masters(model: TrainingModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scale of each linear layer's weight, made of the masters as they are."""
    found = {}
    for layout, master in zip(model.weights.layouts, model.weights.master, strict=True):
        for place in layout.parameters:
            weight = master[place.start : place.start + place.numel].view(place.shape).bfloat16()
            found[place.name.removesuffix(".weight")] = to_fp8(weight, FP8_FORWARD)
    return {name: found[name] for name in layers_of(model)}


def are_current(model: TrainingModel) -> bool:
    """Whether each layer's scale, and its codes if they are kept, are those of the masters."""
    equal = []
    for name, (codes, scale) in rounded_masters(model).items():
        own = layers_of(model)[name].fp8_weight
        assert own is not None
        equal.append(torch.equal(own.scale, scale))
        equal.append(own.codes is None or torch.equal(own.codes.view(torch.uint8), codes.view(torch.uint8)))
    return all(equal)


def by_the_optimizer(model: TrainingModel) -> None:
    update(model, Optimizers(model.weights, recipe_of(LLAMA, ()).optim))


def by_a_clip_of_queries(model: TrainingModel) -> None:
    model.clip_queries(1e-3)
    by_the_optimizer(model)


def by_initial_values(model: TrainingModel) -> None:
    model.initialise(seed=2, bigrams=lambda: torch.zeros(1, 1))


def by_a_checkpoint(model: TrainingModel) -> None:
    for entry in model.weights.state_entries():
        entry.tensor.mul_(1.5)
    model.weights.load_state_values({})


def by_an_average_of_peers(model: TrainingModel) -> None:
    vector = PeerVector(model.weights, Mesh(device=CPU))
    values = vector.zeros()
    vector.read_masters(values)
    vector.write_masters(values * 0.7)


def by_a_change_of_the_phase(model: TrainingModel) -> None:
    for precision in ("bf16", "fp32"):
        model.set_phase(precision=precision, recompute="none")
        assert all(layer.fp8_weight is None for layer in layers_of(model).values())
        by_initial_values(model)
    model.set_phase(precision="fp8", recompute="none")


@pytest.mark.parametrize(
    "settings", [(), (BY_BLOCK,), (WITHOUT_COPIES,)], ids=["kept", "by block", "without copies"]
)
@pytest.mark.parametrize(
    "change",
    [
        by_the_optimizer,
        by_a_clip_of_queries,
        by_initial_values,
        by_a_checkpoint,
        by_an_average_of_peers,
        by_a_change_of_the_phase,
    ],
)
def test_scales_and_codes_are_those_of_the_weights_after_each_change_of_them(
    change: Callable[[TrainingModel], None], settings: tuple[str, ...]
) -> None:
    model = model_with(*settings)
    assert are_current(model)
    before = {name: scale.clone() for name, (_, scale) in rounded_masters(model).items()}
    change(model)
    assert are_current(model)
    after = {name: scale for name, (_, scale) in rounded_masters(model).items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "settings", [(), (BY_BLOCK,), (WITHOUT_COPIES,)], ids=["kept", "by block", "without copies"]
)
@pytest.mark.parametrize("recompute", ["none", "elementwise", "selective", "full"])
def test_training_has_the_bits_of_one_that_rounds_each_weight_anew_in_each_product(
    recompute: str, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[list[float], dict[str, torch.Tensor]]:
        model = model_with(*settings, recompute=recompute)
        optimizers, entropies = Optimizers(model.weights, recipe_of(LLAMA, ()).optim), []
        for _ in range(2):
            update(model, optimizers)
            entropies.append(model.entropy(batches_of(5)).nats)
        return entropies, {entry.name: entry.tensor for entry in model.weights.state_entries()}

    entropies, weights = trained()
    monkeypatch.setattr(Fp8Weights, "use", lambda _self, *, wanted: None)
    expected_entropies, expected = trained()
    assert entropies == expected_entropies
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def bytes_of(model: TrainingModel) -> int:
    held = [layer.fp8_weight for layer in layers_of(model).values()]
    tensors = [
        tensor
        for one in held
        if one
        for tensor in (one.scale, one.codes, one.transposed)
        if tensor is not None
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(
    ("settings", "units", "bytes_per_parameter"),
    [((), False, 1), ((), True, 2), ((BY_BLOCK,), False, 0), ((BY_BLOCK,), True, 0)],
)
def test_copies_take_two_bytes_a_parameter_where_working_weights_are_kept_and_none_where_not(
    settings: tuple[str, ...], units: bool, bytes_per_parameter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_weights, "has_fp8_units", lambda _device: units)
    model = model_with(*settings)
    layers = layers_of(model)
    parameters = sum(layer.weight.numel() for layer in layers.values())
    assert bytes_of(model) == bytes_per_parameter * parameters + 4 * len(layers)
    model.set_phase(precision="bf16", recompute="none")
    assert bytes_of(model) == 0


def test_matrices_of_blocks_have_no_memory_in_16_bits_where_products_read_the_masters() -> None:
    model, seen = model_with(BY_BLOCK), list[int]()
    matrices = [group for group in model.weights._groups if group.layout.rule == "matrix"]
    others = [group for group in model.weights._groups if group.layout.rule == "plain"]

    def working_bytes(groups: list[FlatGroup]) -> int:
        return sum(group.working.untyped_storage().nbytes() for group in groups if group.layout.bucket)

    for block in model.decoder.blocks:
        block.mlp.register_forward_hook(lambda *_: seen.append(working_bytes(matrices)))
        block.register_full_backward_pre_hook(lambda *_: seen.append(working_bytes(matrices)))
        block.mlp.register_forward_hook(lambda *_: seen.append(0 if working_bytes(others) else 1))
    model.accumulate(batches_of(3), 0, weight=1 / 64)
    assert len(seen) == 3 * len(model.decoder.blocks) and set(seen) == {0}
    model.set_phase(precision="bf16", recompute="none")
    seen.clear()
    model.accumulate(batches_of(3), 0, weight=1 / 64)
    assert max(seen) > 1


def test_units_read_kept_copies_and_both_copies_of_other_factors_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fp8, "has_fp8_units", lambda _device: True)
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(32, 16, generator=generator).bfloat16().requires_grad_() for _ in range(2))
    codes, scale = to_fp8(weight.detach(), FP8_FORWARD)
    kept = Fp8Weight(scale=scale, codes=codes, transposed=codes.t().contiguous())
    product, read = torch_private.scaled_matmul, list[torch.Tensor]()

    def noted(left: torch.Tensor, right: torch.Tensor, *others: Any, is_fast: bool) -> torch.Tensor:
        assert left.is_contiguous() and right.t().is_contiguous()
        read.append(right)
        return product(left, right, *others, is_fast=is_fast)

    monkeypatch.setattr(torch_private, "scaled_matmul", noted)
    fp8_linear(x, weight, fp8_weight=kept).square().sum().backward()
    assert kept.codes is not None and kept.transposed is not None
    assert [right.data_ptr() for right in read[:2]] == [kept.codes.data_ptr(), kept.transposed.data_ptr()]
    gradients = [x.grad, weight.grad]
    master = Fp8Weight(scale=scale, master=weight.detach().float() * (1 + 1e-4))
    for fp8_weight in (Fp8Weight(scale=scale), None, master):
        x.grad = weight.grad = None
        fp8_linear(x, weight, fp8_weight=fp8_weight).square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients, (x.grad, weight.grad), strict=True))
    assert len(read) == 12


@pytest.mark.parametrize(("splits_input", "asked"), [(True, ["x"]), (False, ["gradient"])])
def test_ranks_are_asked_for_the_maximum_of_one_factor_a_layer_the_split_one(
    splits_input: bool, asked: list[str]
) -> None:
    x, weight = torch.full((4, 16), 2.0), torch.full((8, 16), 3.0)
    names, seen = {2.0: "x", 3.0: "weight", 5.0: "gradient"}, list[str]()

    def maximum(largest: torch.Tensor) -> torch.Tensor:
        seen.append(names[float(largest)])
        return largest

    scale = to_fp8(weight, FP8_FORWARD)[1]
    weight.requires_grad_()
    product = fp8_linear(x, weight, maximum, splits_input=splits_input, fp8_weight=Fp8Weight(scale=scale))
    product.backward(torch.full((4, 8), 5.0))
    assert seen == asked


class _Axis:
    """An axis that notes its reductions, and on which another rank has one weight that is larger, or NaN."""

    def __init__(self, other: float = 0.0) -> None:
        self.other, self.sizes = other, list[int]()

    def all_reduce(self, bits: torch.Tensor, *, maximum: bool) -> torch.Tensor:
        assert maximum and bits.dtype == torch.int32
        self.sizes.append(bits.numel())
        others = torch.zeros(bits.numel())
        others[0] = self.other
        return bits.copy_(torch.maximum(bits, others.view(torch.int32)))


@pytest.mark.parametrize("keeps_copies", [True, False])
@pytest.mark.parametrize("other", [1e4, float("inf"), float("nan")])
def test_all_weights_are_reduced_at_once_over_the_ranks_that_hold_their_parts(
    other: float, keeps_copies: bool
) -> None:
    model = model_with(*(() if keeps_copies else (BY_BLOCK,)))
    axes: Any = type("Axes", (), {"device": CPU, "tensor": _Axis(other), "shard": _Axis()})()
    weights = Fp8Weights(
        model.decoder,
        model.weights,
        mesh=axes,
        keeps_copies=keeps_copies,
        rounds_by_block=not keeps_copies,
    )
    weights.use(wanted=True)
    count = len(layers_of(model))
    assert axes.tensor.sizes == axes.shard.sizes == [count]
    scales = [layer.fp8_weight.scale for layer in layers_of(model).values() if layer.fp8_weight]
    expected = [scale for _, scale in rounded_masters(model).values()]
    torch.testing.assert_close(scales[0], torch.tensor(other) / 448, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(scales[1:], expected[1:], strict=True))


def test_a_weight_is_found_in_the_part_of_the_masters_that_a_rank_holds() -> None:
    assert fp8_weights._within(100, 50, range(0, 64)) == range(100, 64)
    assert not fp8_weights._within(100, 50, range(150, 214))
    assert fp8_weights._within(100, 50, range(120, 184)) == range(0, 30)
    assert fp8_weights._within(100, 50, range(64, 128)) == range(36, 64)
    assert fp8_weights._within(100, 10, range(64, 128)) == range(36, 46)


def test_rounding_to_8_bits_is_computed_again_where_only_products_are_kept() -> None:
    operators = torch.ops.bloomery
    for operator in (operators.fp8_twice.default, operators.fp8_transposed.default):
        assert recompute._kept_or_recomputed(None, operator) is CheckpointPolicy.PREFER_RECOMPUTE
    assert recompute._kept_or_recomputed(None, operators.sum_of_rows.default) is CheckpointPolicy.MUST_SAVE
