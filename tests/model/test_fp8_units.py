"""What the units of a GPU are given: layouts that torch's own checks accept, whole tiles, and refusals.

torch checks shapes and strides of factors and scales on the device 'meta' as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from bloomery import torch_private
from bloomery.model import fp8_scaling
from bloomery.model.fp8_scaling import (
    FINE_SCALINGS,
    FineScaling,
    ScaledFactor,
    scaled,
    scaled_linear,
    widened,
)
from bloomery.model.fp8_units import lacking_units, units_product

SIZES = ((256, 512, 384), (40, 130, 24), (128, 128, 128), (5, 33, 21))
"""Rows of both factors and what is summed, whole and not."""


def factors(
    sizes: tuple[int, int, int], scaling: FineScaling, *, is_weight: bool
) -> tuple[ScaledFactor, ScaledFactor]:
    rows, inner, columns = sizes
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, inner, generator=generator) * torch.linspace(0.01, 10, inner)
    right = torch.randn(columns, inner, generator=generator) * torch.linspace(0.1, 3, columns)[:, None]
    return scaled(left, scaling), scaled(right, scaling, is_weight=is_weight)


class Units:
    """Stands for the units: computes from what it is given in fp64, read as cuBLAS documents its layouts."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        *,
        is_fast: bool,
    ) -> torch.Tensor:
        assert_accepted(left, right, scales, dtype, is_fast=is_fast)
        self.calls.append({"is_fast": is_fast, "scales": [tuple(part.shape) for part in scales]})
        rows, columns = left.shape[0], right.shape[1]
        wide_left = left.double() * self._spread(scales[0], rows, left.shape[1])
        wide_right = right.double().t() * self._spread(scales[1].t(), columns, left.shape[1])
        return (wide_left @ wide_right.t()).to(dtype)

    def _spread(self, scales: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
        """The scale of each element [rows, inner]."""
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(inner), indexing="ij")
        if scales.dtype == torch.float8_e8m0fnu:
            tiles_wide = -(-inner // 128)
            tile = row // 128 * tiles_wide + column // 128
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column // 32 % 4
            exponents = scales.view(torch.uint8).int()[place] - 127
            return torch.exp2(exponents.double())
        high, wide = scales.shape[0], scales.shape[1]
        return scales[row * high // rows, column * wide // inner].double()


def assert_accepted(
    left: torch.Tensor,
    right: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    *,
    is_fast: bool,
) -> None:
    """Have torch check a product as on a GPU, by both of its functions."""
    on_meta = [tensor.to("meta") for tensor in (left, right, *scales)]
    assert [tensor.stride() for tensor in on_meta] == [tensor.stride() for tensor in (left, right, *scales)]
    torch_private.scaled_matmul(*on_meta[:2], (on_meta[2], on_meta[3]), dtype, is_fast=is_fast)
    recipes, swizzles = [], SwizzleType.NO_SWIZZLE
    second = on_meta[3]
    if scales[0].dtype == torch.float8_e8m0fnu:
        recipes, swizzles = [ScalingType.BlockWise1x32] * 2, SwizzleType.SWIZZLE_32_4_4
    elif scales[0].shape[1] == 1 and scales[1].shape == (1, right.shape[1]):
        recipes = [ScalingType.RowWise] * 2
    elif scales[1].shape[1] == right.shape[1]:
        recipes, second = [ScalingType.BlockWise1x128] * 2, second.t()
    else:
        recipes = [ScalingType.BlockWise1x128, ScalingType.BlockWise128x128]
    torch.nn.functional.scaled_mm(
        *on_meta[:2],
        on_meta[2],
        recipes[0],
        second,
        recipes[1],
        swizzles,
        swizzles,
        output_dtype=dtype,
        use_fast_accum=is_fast,
    )


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Units:
    stand_in = Units()
    monkeypatch.setattr(torch_private, "scaled_matmul", _checked(stand_in, torch_private.scaled_matmul))
    return stand_in


def _checked(stand_in: Units, on_meta: Any) -> Any:
    def product(left: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return (on_meta if left.is_meta else stand_in)(left, *arguments, **keywords)

    return product


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("scaling", "is_square"), [("row", False), ("block", False), ("block", True), ("mx", False)]
)
def test_torch_accepts_the_layouts_and_the_product_is_that_of_the_factors(
    units: Units, scaling: FineScaling, is_square: bool, sizes: tuple[int, int, int]
) -> None:
    left, right = factors(sizes, scaling, is_weight=is_square)
    found = units_product(
        left.codes,
        right.codes,
        (left.scales, right.scales),
        torch.float32,
        scaling=scaling,
        is_square=is_square,
    )
    expected = widened(left).double() @ widened(right).double().t()
    assert len(units.calls) == 1
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_rows_are_multiplied_for_real_by_the_units_of_this_machine() -> None:
    """On CPUs torch has products of scaled rows too, but none of blocks; 2.11 had those of tensors alone."""
    left, right = factors((40, 130, 24), "row", is_weight=False)
    scales = (left.scales, right.scales)
    try:
        found = units_product(left.codes, right.codes, scales, torch.bfloat16, scaling="row")
    except RuntimeError as refusal:
        if "only supports per-tensor scaling" not in str(refusal):
            raise
        pytest.skip("this torch has no products of scaled rows on CPUs")
    expected = widened(left).double() @ widened(right).double().t()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_a_layer_gives_the_units_what_cpus_compute_and_only_rows_add_up_fast(
    units: Units, monkeypatch: pytest.MonkeyPatch, scaling: FineScaling
) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, slope = (
        torch.randn(*shape, generator=generator) for shape in ((200, 260), (130, 260), (200, 130))
    )

    def computed() -> list[torch.Tensor]:
        own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = scaled_linear(own_x, own_weight, scaling=scaling)
        y.backward(slope)
        assert own_x.grad is not None and own_weight.grad is not None
        return [y.detach(), own_x.grad, own_weight.grad]

    expected = computed()
    assert not units.calls
    monkeypatch.setattr(fp8_scaling, "has_fp8_units", lambda _device: True)
    for found, wanted in zip(computed(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
    assert [call["is_fast"] for call in units.calls] == [scaling == "row", False, False]


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_traced_code_passes_the_layouts_that_were_made(
    monkeypatch: pytest.MonkeyPatch, scaling: FineScaling
) -> None:
    """`make soak PART=compiled` does the same with compiled code."""
    assert_compiled_alike(monkeypatch, scaling, backend="aot_eager")


def assert_compiled_alike(monkeypatch: pytest.MonkeyPatch, scaling: FineScaling, *, backend: str) -> None:
    """Compile a product and its gradients as on a GPU, and check what the units are given."""
    units = Units()
    monkeypatch.setattr(torch_private, "scaled_matmul", _checked(units, torch_private.scaled_matmul))
    monkeypatch.setattr(fp8_scaling, "has_fp8_units", lambda _device: True)
    generator = torch.Generator().manual_seed(3)
    x, weight, slope = (
        torch.randn(*shape, generator=generator) for shape in ((200, 260), (130, 260), (200, 130))
    )

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return scaled_linear(x * 2, weight, scaling=scaling)

    def computed(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(own_x, own_weight)
        y.backward(slope)
        assert own_x.grad is not None and own_weight.grad is not None
        return [y.detach(), own_x.grad, own_weight.grad]

    expected = computed(product)
    compiled = computed(torch.compile(product, fullgraph=True, dynamic=False, backend=backend))
    assert len(units.calls) == 6, "three products each"
    for found, wanted in zip(compiled, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("scaling", "capability", "cuda", "lacks"),
    [
        ("tensor", (8, 0), "12.4", ""),
        ("row", (8, 0), "13.0", "compute capability 8.9 or higher, and a GPU has 8.0"),
        ("row", (8, 9), "12.4", ""),
        ("row", (9, 0), "13.0", ""),
        ("block", (8, 9), "13.0", "compute capability 9.x (Hopper), and a GPU has 8.9"),
        ("block", (9, 0), "13.0", ""),
        ("block", (9, 0), "12.8", "a torch built for CUDA 12.9 or later, and this one is built for 12.8"),
        ("block", (10, 0), "13.0", "compute capability 9.x (Hopper), and a GPU has 10.0"),
        ("mx", (9, 0), "13.0", "compute capability 10.0 or higher (Blackwell), and a GPU has 9.0"),
        ("mx", (10, 0), "13.0", ""),
        ("mx", (12, 0), "13.0", ""),
    ],
)
def test_a_gpu_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, scaling: str, capability: tuple[int, int], cuda: str, lacks: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = lacking_units(scaling, torch.device("cuda"))
    assert lacks in found and bool(lacks) == bool(found)
    assert lacking_units(scaling, torch.device("cpu")) == ""
