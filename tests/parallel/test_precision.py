"""Accumulation in fp32, fp16's loss scale, products in 8 bits, and a precision that changes on the way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.layouts.comparison import BF16_LOSS_TOLERANCE, LEARNT_NATS
from tests.layouts.layouts import GPT, LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import Job, batches, build, gathered, train

from bloomery import torch_private
from bloomery.config.load import LoadedRecipe
from bloomery.data.position import EVERYTHING
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.model import fp8
from bloomery.model.fp8 import FP8_BACKWARD, FP8_FORWARD, Maximum, fp8_linear, scaled_product, to_fp8
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights
from bloomery.plan.schedule import phase_at
from bloomery.train.loop import train as train_run
from bloomery.train.settings import StartOptions
from bloomery.train.state import Goal, TrainState

HERE = Mesh(device=torch.device("cpu"))


@pytest.mark.parametrize("style", [LLAMA, GPT])
def test_a_model_is_freed_with_its_gradients_once_nobody_holds_it(style: str) -> None:
    """Else its process groups would stay too, and with them gloo's threads."""

    def alive() -> int:
        gc.collect()
        return sum(type(held) is MasterWeights for held in gc.get_objects())

    before = alive()
    train(Job(style=style, steps=1, settings=("train.precision=bf16",)), 0)  # a tied head has a hook in bf16
    assert alive() <= before


def test_bf16_gradients_of_64_micro_batches_add_up_in_fp32() -> None:
    recipe = recipe_of(LLAMA, ("train.precision=bf16", "train.global_batch=64", "train.micro_batch=1"))
    model = build(recipe, HERE)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="bf16", recompute="none")
    parameters = dict(model.decoder.named_parameters())
    wide = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    narrow = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in parameters.items()}

    def note(name: str) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            assert gradient.dtype == torch.bfloat16
            wide[name] += gradient.double()
            narrow[name] += gradient

        return add

    for name, parameter in parameters.items():
        parameter.register_hook(note(name))
    order, data = batches(recipe, HERE)
    state = TrainState(goal=Goal(steps=1))
    phase = phase_at(recipe.train, 0)
    micro_batches = data.batch(
        order.next_span(state.position, phase.global_batch, EVERYTHING), phase.micro_batch
    )
    assert len(micro_batches) == 64
    model.accumulate(micro_batches, 0, weight=1.0)
    worst_narrow = 0.0
    for group, flat in zip(model.weights.layouts, model.weights.gradient, strict=True):
        for place in group.parameters:
            sums = flat[place.start : place.start + place.numel].view(place.shape).double()
            exact = wide[place.name]
            assert (sums - exact).norm() <= 1e-6 * exact.norm(), place.name
            worst_narrow = max(
                worst_narrow, float((narrow[place.name].double() - exact).norm() / exact.norm())
            )
    assert worst_narrow > 1e-3


def test_masters_that_were_loaded_in_place_reach_the_working_weights() -> None:
    model = build(recipe_of(LLAMA, ("train.precision=bf16",)), HERE)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="bf16", recompute="none")
    for master in model.weights.master:
        master.copy_(torch.linspace(-1.0, 1.0, master.numel()))
    model.weights.load_state_values({})
    for master, working in zip(model.weights.master, model.weights.working, strict=True):
        assert working.dtype == torch.bfloat16 and torch.equal(working, master.bfloat16())


def test_what_no_backward_of_a_step_reached_has_no_gradient_of_the_step_before() -> None:
    weights = build(recipe_of(LLAMA, ()), HERE).weights
    parameters = [parameter for group in weights._groups for parameter in group.parameters]
    for reached in (parameters, parameters[::2]):
        weights.begin_accumulation(backwards=2)
        for times in (1.0, 2.0):
            for parameter in reached:
                parameter.grad = torch.full_like(parameter, times)
            weights.accumulate_gradients(reached)
        weights.end_accumulation()
    for group, gradient in zip(weights._groups, weights.gradient, strict=True):
        for place, parameter in zip(group.layout.parameters, group.parameters, strict=True):
            part = gradient[place.start : place.start + place.numel]
            expected = 3.0 if any(parameter is one for one in parameters[::2]) else 0.0
            assert (part == expected).all(), place.name


def test_of_replicas_that_hold_the_same_gradients_one_counts_their_norms() -> None:
    """Else the history of norms that a checkpoint keeps would be that of another number of replicas."""
    first, second = (
        build(recipe_of(LLAMA, ()), replace(HERE, replica=Axis(index=index, ranks=(0, 1)))).weights
        for index in range(2)
    )
    for gradient in (*first.gradient, *second.gradient):
        gradient.fill_(1.0)
    assert (first.norms_by_tensor() >= 1.0).all() and not second.norms_by_tensor().any()


def test_fp16_learns_what_fp32_learns_and_recovers_from_an_overflow() -> None:
    exact = train(Job(style=GPT), 0)
    start = train(Job(style=GPT, settings=("train.precision=fp16",), steps=0, returns=("state",)), 0)
    state = gathered(start.state)
    state["loss_scale.scale"] = np.array(2.0**24, dtype=np.float32)
    scaled = train(Job(style=GPT, settings=("train.precision=fp16",), state=state), 0)
    refused = [not np.isfinite(norm) for norm in scaled.norms]
    assert refused[0] and not all(refused)
    assert scaled.scales[0] == 2.0**24, "what a step tells is the scale that it used, not the next"
    for before, after, halved in zip(scaled.scales, scaled.scales[1:], refused, strict=False):
        assert after == (before / 2 if halved else before)
    unmoved = refused.index(False)  # the loss of the first weights, whatever the samples
    assert scaled.losses[: unmoved + 1] == pytest.approx([scaled.losses[0]] * (unmoved + 1), rel=0.05)
    assert scaled.losses[-1] < scaled.losses[0] - 0.2
    plain = train(Job(style=GPT, settings=("train.precision=fp16",)), 0)
    assert set(plain.scales) == {2.0**16}
    assert plain.losses == pytest.approx(exact.losses, rel=BF16_LOSS_TOLERANCE)
    assert plain.losses[0] - plain.losses[-1] >= LEARNT_NATS


def test_a_product_in_8_bits_is_the_exact_product_of_the_rounded_factors() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 5, 32, generator=generator).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(16, 32, generator=generator)).bfloat16().requires_grad_()
    slope = torch.randn(3, 5, 16, generator=generator).bfloat16()
    fp8_linear(x, weight).backward(slope)
    assert x.grad is not None and weight.grad is not None

    def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        narrow, scale = to_fp8(tensor.detach(), dtype)
        assert narrow.float().abs().max() == torch.finfo(dtype).max
        return narrow.double() * scale.double()

    flat, out = rounded(x, FP8_FORWARD).flatten(0, 1), rounded(slope, FP8_BACKWARD).flatten(0, 1)
    for found, expected in (
        (fp8_linear(x, weight).flatten(0, 1), flat @ rounded(weight, FP8_FORWARD).T),
        (x.grad.flatten(0, 1), out @ rounded(weight, FP8_FORWARD)),
        (weight.grad, out.T @ flat),
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(
            found.double(), expected, rtol=2**-8, atol=1e-3 * float(expected.abs().max())
        )
    exact = x.detach().double() @ weight.detach().double().T
    error = (fp8_linear(x, weight).detach().double() - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.1


def test_halves_of_a_product_in_8_bits_add_up_to_the_whole_if_they_share_their_maxima() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 32, generator=generator) * torch.linspace(0.1, 1.0, 32)
    weight, slope = torch.randn(16, 32, generator=generator), torch.randn(6, 16, generator=generator)

    def product(columns: slice, *, is_shared: bool) -> tuple[torch.Tensor, ...]:
        own_x, own_weight = (t[:, columns].clone().requires_grad_() for t in (x, weight))
        # The slopes are whole on both: their maximum is not asked for.
        wholes = iter([weight.abs().amax(), x.abs().amax()])
        maximum = (lambda _largest: next(wholes)) if is_shared else None
        y = fp8_linear(own_x, own_weight, maximum, splits_input=True)
        y.backward(slope)
        assert own_x.grad is not None and own_weight.grad is not None
        assert len(list(wholes)) == (0 if is_shared else 2)
        return y.detach(), own_x.grad, own_weight.grad

    whole = product(slice(None), is_shared=False)
    for is_shared, is_equal in ((True, True), (False, False)):
        (y1, dx1, dw1), (y2, dx2, dw2) = (
            product(part, is_shared=is_shared) for part in (slice(16), slice(16, 32))
        )
        halves = (y1 + y2, torch.cat([dx1, dx2], 1), torch.cat([dw1, dw2], 1))
        assert is_equal == all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(halves, whole, strict=True)
        )


def test_the_part_of_a_gradient_is_rounded_by_the_largest_element_of_all_ranks() -> None:
    generator = torch.Generator().manual_seed(5)
    weight, slope = torch.randn(32, 16, generator=generator), torch.randn(8, 32, generator=generator)
    slope[:, 16:] *= 1e-3
    x = torch.randn(8, 16, generator=generator)

    def gradient(rows: slice, maximum: Maximum | None = None) -> torch.Tensor:
        own = weight[rows].clone().requires_grad_()
        fp8_linear(x, own, maximum).backward(slope[:, rows])
        assert own.grad is not None
        return own.grad

    largest = iter([weight.abs().amax(), slope.abs().amax()])  # x is whole on all ranks
    part = gradient(slice(16, 32), lambda own: torch.maximum(own, next(largest)))
    assert torch.equal(part, gradient(slice(0, 32))[16:])
    assert next(largest, None) is None


@pytest.mark.parametrize("sizes", [(16, 32, 16), (5, 33, 21), (16, 8, 24)])
def test_the_units_for_8_bits_get_whole_tiles_and_the_product_is_the_same(
    sizes: tuple[int, int, int],
) -> None:
    n, i, o = sizes
    generator = torch.Generator().manual_seed(4)
    left, left_scale = to_fp8(torch.randn(n, i, generator=generator), FP8_FORWARD)
    right, right_scale = to_fp8(torch.randn(i, o, generator=generator), FP8_BACKWARD)
    product = scaled_product(left, right, (left_scale, right_scale), torch.bfloat16)
    exact = left.double() @ right.double() * (left_scale.double() * right_scale.double())
    torch.testing.assert_close(product.double(), exact, rtol=2**-7, atol=1e-3)


def test_the_units_add_up_in_fewer_bits_in_the_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    product, fast = torch_private.scaled_matmul, list[bool]()

    def noted(*factors: Any, is_fast: bool) -> torch.Tensor:
        fast.append(is_fast)
        return product(*factors, is_fast=is_fast)

    monkeypatch.setattr(fp8, "has_fp8_units", lambda _device: True)
    monkeypatch.setattr(torch_private, "scaled_matmul", noted)
    x, weight = (torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    fp8_linear(x, weight).sum().backward()
    assert fast == [True, False, False]


def test_fp8_learns_beside_bf16() -> None:
    wide = train(Job(style=LLAMA, settings=("train.precision=bf16",)), 0)
    narrow = train(Job(style=LLAMA, settings=("train.precision=fp8",)), 0)
    assert narrow.losses != wide.losses
    assert narrow.losses == pytest.approx(wide.losses, rel=5e-2)
    assert narrow.losses[0] - narrow.losses[-1] >= LEARNT_NATS


Start = Callable[..., tuple[LoadedRecipe, Path]]


def test_precision_changes_at_its_sample_and_the_journal_says_so(start: Start) -> None:
    steady, _ = start("train.ramp_up=[]", "train.precision=fp32", name="steady")
    loaded, path = start(
        "train.ramp_up=[]", "train.precision=fp32", "train.precision_changes=[[48, 'fp8']]", name="changing"
    )
    losses = []
    for recipe, directory in ((steady, path.with_name("steady")), (loaded, path)):
        outcome = train_run(recipe, RunDirectory(directory), StartOptions(say=lambda line: None))
        assert outcome.finished
        told = list(read_journal(RunDirectory(directory).journal()))
        losses.append([one["loss"] for one in told if one["event"] == "step"])
    phases = [(one["step"], one["precision"]) for one in told if one["event"] == "phase"]
    assert phases == [(0, "fp32"), (6, "fp8")]
    before, after = losses
    assert before[:6] == after[:6] and before[6:] != after[6:]
    assert after[6:] == pytest.approx(before[6:], rel=5e-2)


def test_both_gradients_of_a_tied_embedding_are_added_in_fp32() -> None:
    recipe = recipe_of(GPT, ("model.tied=true", "train.precision=bf16", "train.global_batch=4"))
    model = build(recipe, HERE)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="bf16", recompute="none")
    decoder, apart = model.decoder, list[torch.Tensor]()
    assert decoder.embedding is not None
    for weight in (decoder.head_weight, decoder.embedding.weight):
        assert weight.data_ptr() == decoder.embedding.weight.data_ptr()
        weight.register_hook(lambda gradient: apart.append(gradient.clone()))
    order, data = batches(recipe, HERE)
    span = order.next_span(TrainState(goal=Goal(steps=1)).position, 4, EVERYTHING)
    model.accumulate(data.batch(span, 4), 0, weight=1.0)

    assert len(apart) == 2 and all(gradient.dtype == torch.bfloat16 for gradient in apart)
    of_head, of_embedding = apart
    rounded = (of_head + of_embedding).float()
    for group, flat in zip(model.weights.layouts, model.weights.gradient, strict=True):
        for place in group.parameters:
            if place.name == "embedding.weight":
                summed = flat[place.start : place.start + place.numel].view(place.shape)
                assert torch.equal(summed, of_head.float() + of_embedding.float())
                assert not torch.equal(summed, rounded)


def test_a_digest_of_gradients_holds_both_of_a_tied_embedding() -> None:
    recipe = recipe_of(GPT, ("model.tied=true", "train.precision=bf16", "train.global_batch=4"))
    model = build(recipe, HERE)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    order, data = batches(recipe, HERE)
    span = order.next_span(TrainState(goal=Goal(steps=1)).position, 4, EVERYTHING)
    micro_batches = data.batch(span, 1)

    def digest(precision: str, backwards: int, *, spoilt: int = -1) -> int:
        """The digest of the first backward; the `spoilt`-th gradient of the embedding is doubled."""
        model.set_phase(precision=precision, recompute="none")
        assert model.decoder.embedding is not None
        arrived = list[int]()

        def double(gradient: torch.Tensor) -> torch.Tensor:
            arrived.append(len(arrived))
            return gradient * 2 if arrived[-1] == spoilt else gradient

        weights = {id(w): w for w in (model.decoder.head_weight, model.decoder.embedding.weight)}.values()
        hooks = [weight.register_hook(double) for weight in weights]
        with model.weights.tapped(discards=False) as tap:
            model.accumulate(micro_batches[:backwards], 0, weight=1.0)
        for hook in hooks:
            hook.remove()
        return tap.digest

    for precision, gradients in (("bf16", 2), ("fp32", 1)):
        clean = digest(precision, 1)
        assert clean == digest(precision, 3), "gradients of later backwards do not count"
        assert all(digest(precision, 1, spoilt=number) != clean for number in range(gradients))


def test_a_micro_batch_that_is_computed_once_more_has_its_digest_and_adds_nothing() -> None:
    recipe = recipe_of(GPT, ("model.tied=true", "train.precision=bf16", "train.global_batch=4"))
    model = build(recipe, HERE)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="bf16", recompute="none")
    order, data = batches(recipe, HERE)
    span = order.next_span(TrainState(goal=Goal(steps=1)).position, 4, EVERYTHING)
    first, second, *_ = data.batch(span, 1)
    with model.weights.tapped(discards=False) as tap:
        model.accumulate([first, second], 0, weight=1.0)
    before = [gradient.clone() for gradient in model.weights.gradient]
    assert any(gradient.any() for gradient in before)
    assert model.digest_gradients(first, 0, weight=1.0) == tap.digest
    assert model.digest_gradients(second, 0, weight=1.0) != tap.digest
    assert model.digest_gradients(first, 0, weight=2.0) != tap.digest
    after = model.weights.gradient
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
