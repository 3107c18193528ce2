"""Matmuls of 8-bit factors with a scale for each row or block: values, gradients, errors, maxima of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.model.fp8_reference import rounded
from torch.fx.experimental.proxy_tensor import make_fx

from bloomery.model.fp8 import FP8_FORWARD, Maximum, fp8_linear
from bloomery.model.fp8_scaling import (
    FINE_SCALINGS,
    FineScaling,
    largest_of_blocks,
    power_of_two_from,
    scaled,
    scaled_linear,
    widened,
)

SIZES = ((40, 64, 48), (7, 129, 130), (150, 33, 5), (1, 1, 1))
"""Rows of x, inputs and outputs: whole blocks of 32, none whole, more rows than a block, one element."""


def drawn(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers whose rows and columns are of very different sizes, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    rows, columns = (torch.randn(size, generator=generator).exp() for size in (x[..., 0].numel(), shape[-1]))
    return x * rows.view(*shape[:-1], 1) * columns


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_a_product_and_its_gradients_are_those_of_the_factors_rounded_along_what_is_summed(
    scaling: FineScaling, sizes: tuple[int, int, int]
) -> None:
    n, i, o = sizes
    x, weight = drawn(n, i, seed=1).requires_grad_(), drawn(o, i, seed=2).requires_grad_()
    slope = drawn(n, o, seed=3)
    y = scaled_linear(x, weight, scaling=scaling)
    y.backward(slope)
    for found, left, right, is_of_weight in (
        (y, x, weight, True),
        (x.grad, slope, weight.t(), True),
        (weight.grad, slope.t(), x.t(), False),
    ):
        assert found is not None and found.dtype == torch.float32
        expected = rounded(left, scaling) @ rounded(right, scaling, is_weight=is_of_weight).t()
        magnitude = float(expected.norm() / expected.numel() ** 0.5)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * magnitude)


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_leading_dimensions_and_the_dtype_are_kept(scaling: FineScaling) -> None:
    x, weight = drawn(2, 3, 32, seed=1).bfloat16(), drawn(16, 32, seed=2).bfloat16()
    for tensor in (x, weight):
        tensor.requires_grad_()
    y = scaled_linear(x, weight, scaling=scaling)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and weight.grad is not None
    assert (y.shape, y.dtype) == ((2, 3, 16), torch.bfloat16)
    assert (x.grad.shape, x.grad.dtype) == (x.shape, torch.bfloat16)
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.bfloat16)
    flat = scaled_linear(x.float().flatten(0, 1), weight.float(), scaling=scaling)
    assert torch.equal(y.flatten(0, 1), flat.bfloat16()), "the product is rounded once, at its end"


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_outliers_cost_less_than_with_one_scale_a_tensor(scaling: FineScaling) -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight, slope = (
        torch.randn(*shape, generator=generator) for shape in ((256, 256), (128, 256), (256, 128))
    )
    x[7] *= 1e5  # one token, as the first of a text often is, lifts the scale of all with one scale a tensor
    slope[9] *= 1e5

    def errors(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[float]:
        """Of the product, and of its gradient by x, in the rows without outliers."""
        own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = product(own_x, own_weight)
        y.backward(slope)
        assert own_x.grad is not None
        exact = (x.double() @ weight.double().t(), slope.double() @ weight.double())
        return [
            float((found.double() - wanted)[10:].norm() / wanted[10:].norm())
            for found, wanted in zip((y.detach(), own_x.grad), exact, strict=True)
        ]

    of_tensor = errors(fp8_linear)
    of_parts = errors(lambda x, weight: scaled_linear(x, weight, scaling=scaling))
    assert max(of_parts) < 0.05 < min(of_tensor)


@pytest.mark.parametrize("scaling", ["block", "mx"])
def test_an_outlier_costs_its_own_block_and_no_other(scaling: FineScaling) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 256, generator=generator)
    spoilt = x.clone()
    spoilt[0, 3] = 1e6
    clean, other = (widened(scaled(tensor, scaling)) for tensor in (x, spoilt))
    assert torch.equal(clean[:, 128:], other[:, 128:]) and torch.equal(clean[1:], other[1:])
    assert not torch.equal(clean[0, 4:32], other[0, 4:32])


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
@pytest.mark.parametrize("value", [0.0, 1e-38, float("nan"), float("inf")])
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(scaling: FineScaling, value: float) -> None:
    x = torch.full((3, 40), value)
    product = scaled_linear(x, torch.ones(2, 40), scaling=scaling)
    assert product.isnan().all() if value != value or value > 1 else not product.any()


def test_a_power_of_two_is_the_smallest_that_is_not_below() -> None:
    numbers = torch.tensor([1.0, 1.0000001, 1.9999999, 2.0, 3.0, 2.0**-100, 0.75])
    expected = torch.tensor([1.0, 2.0, 2.0, 2.0, 4.0, 2.0**-100, 1.0])
    assert torch.equal(power_of_two_from(numbers), expected)


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_the_largest_elements_use_the_range_and_none_leaves_it(scaling: FineScaling) -> None:
    codes = scaled(drawn(64, 256, seed=6), scaling).codes.float().abs()
    blocks = codes.unflatten(1, (-1, {"row": 256, "block": 128, "mx": 32}[scaling])).amax(-1)
    least = 448.0 if scaling == "block" else 224.0  # a power of two may be up to twice as large as needed
    assert blocks.min() >= least and blocks.max() <= 448.0


def test_a_whole_weight_and_its_transpose_are_rounded_to_the_same_blocks() -> None:
    weight = drawn(150, 260, seed=7)
    by_rows, by_columns = (scaled(matrix, "block", is_weight=True) for matrix in (weight, weight.t()))
    assert torch.equal(by_rows.codes.float(), by_columns.codes.float().t())
    assert torch.equal(by_rows.scales, by_columns.scales.t())


def _layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and slope of a layer whose second half of inputs and outputs is far smaller than the first.

    Scales are powers of two, so a scale of their own changes only what is near the bottom of the range.
    """
    x, weight, slope = drawn(6, 64, seed=8), drawn(32, 64, seed=9), drawn(6, 32, seed=10)
    x[:, 32:] *= 1e-5
    slope[:, 16:] *= 1e-5
    return x, weight, slope


def _halves(splits_input: bool, maxima: Callable[[int], Maximum | None]) -> list[tuple[torch.Tensor, ...]]:
    """The product and its gradients of two ranks that split the inputs or the outputs of a layer by rows."""
    x, weight, slope = _layer()
    found = []
    for index in range(2):
        own_x = (x.chunk(2, 1)[index] if splits_input else x).clone().requires_grad_()
        own_weight = weight.chunk(2, 1 if splits_input else 0)[index].clone().requires_grad_()
        y = scaled_linear(own_x, own_weight, scaling="row", maximum=maxima(index), splits_input=splits_input)
        y.backward(slope if splits_input else slope.chunk(2, 1)[index])
        assert own_x.grad is not None and own_weight.grad is not None
        found.append((y.detach(), own_x.grad, own_weight.grad))
    return found


@pytest.mark.parametrize("splits_input", [True, False])
def test_halves_of_a_layer_add_up_to_the_whole_if_rows_share_their_maxima(splits_input: bool) -> None:
    x, weight, slope = _layer()
    whole_x, whole_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = scaled_linear(whole_x, whole_weight, scaling="row")
    y.backward(slope)
    factors = (x, weight) if splits_input else (slope, weight.t())
    of_all = [largest_of_blocks(factor, "row") for factor in factors]
    collectives = list[int]()

    def maxima(index: int) -> Maximum:
        def of_both(own: torch.Tensor) -> torch.Tensor:
            collectives.append(index)
            (found,) = (largest for largest in of_all if largest.shape == own.shape)
            assert (own <= found).all()
            return found

        return of_both

    def joined(halves: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        (y1, dx1, dw1), (y2, dx2, dw2) = halves
        if splits_input:
            return y1 + y2, torch.cat([dx1, dx2], 1), torch.cat([dw1, dw2], 1)
        return torch.cat([y1, y2], 1), dx1 + dx2, torch.cat([dw1, dw2])

    expected = (y.detach(), whole_x.grad, whole_weight.grad)
    halves = _halves(splits_input, maxima)
    for found, wanted in zip(joined(halves), expected, strict=True):
        assert wanted is not None
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
    assert collectives == [0, 0, 1, 1], "a rank exchanges maxima of both factors of the one split product"
    summand = 0 if splits_input else 1  # of the product or of the gradient by x, of the second rank
    shared, apart = halves[1][summand], _halves(splits_input, lambda _: None)[1][summand]
    assert (shared - apart).norm() > 0.01 * apart.norm()


@pytest.mark.parametrize("scaling", ["block", "mx"])
def test_blocks_are_never_split_so_ranks_exchange_no_maxima(scaling: FineScaling) -> None:
    def refuse(own: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a collective")

    for splits_input in (True, False):
        x, weight = drawn(6, 128, seed=8).requires_grad_(), drawn(128, 128, seed=9).requires_grad_()
        y = scaled_linear(x, weight, scaling=scaling, maximum=refuse, splits_input=splits_input)
        y.sum().backward()


def test_a_backward_waits_with_x_in_8_bits_and_with_no_copy_of_the_weight() -> None:
    x, weight = drawn(64, 256, seed=11).bfloat16(), drawn(128, 256, seed=12).bfloat16()
    x.requires_grad_()
    weight.requires_grad_()
    for scaling in FINE_SCALINGS:
        saved = list[torch.Tensor]()

        def keep(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scaled_linear(x, weight, scaling=scaling)
        own = [tensor for tensor in saved if tensor.data_ptr() != weight.data_ptr()]
        assert len(own) == len(saved) - 1
        scales = {"row": 256, "block": 256, "mx": 512}[scaling]
        assert sum(tensor.nbytes for tensor in own) == 64 * 256 + 4 * scales


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_a_compiler_for_cpus_sees_each_conversion_to_and_from_8_bits_as_one_operator(
    scaling: FineScaling,
) -> None:
    """The compiler of torch 2.13 splits blocks wrongly; `make soak PART=compiled` compiles a real layer."""

    def forward_and_backward(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        y = scaled_linear(x, weight, scaling=scaling)
        return list(torch.autograd.grad(y.sum(), (x, weight)))

    x, weight = drawn(40, 200, seed=13).requires_grad_(), drawn(150, 200, seed=14).requires_grad_()
    traced = make_fx(forward_and_backward, tracing_mode="fake")(x, weight)
    for found, expected in zip(traced(x, weight), forward_and_backward(x, weight), strict=True):
        assert torch.equal(found, expected)
    converting = list[object]()
    for node in traced.graph.nodes:
        dtypes = {part.meta["val"].dtype for part in (node, *node.all_input_nodes) if "val" in part.meta}
        if FP8_FORWARD in dtypes and len(dtypes) > 1:
            converting.append(node.target)
    operators = torch.ops.bloomery
    # Each of three products has two factors of its own.
    assert converting.count(operators.fp8_blocks.default) == 6
    assert converting.count(operators.fp8_widened.default) == 6 and len(converting) == 12
