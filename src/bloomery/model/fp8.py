"""Matmuls of 8-bit floats: E4M3 forward, E5M2 for gradients (Micikevicius et al., 2022).

Each factor is scaled by its largest element: that of inputs and gradients is found at each matmul, that of a
weight once after each update (`Fp8Weight`). Where tensor parallelism splits a factor, the largest element is
that of the whole factor, so each layout rounds alike. Devices without units for 8 bits compute the same
numbers with fp32 matmuls of the rounded factors: these are exact, and the units sum in fp32 too.

The units read the left factor by rows and the right one by columns. Of the three products of a linear layer
each factor is in two, in different directions, so it is rounded into two copies, one the transpose of the
other. Legend: n rows of x, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bloomery import torch_private
from bloomery.kernels.available import has_triton

FP8_FORWARD, FP8_BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MULTIPLE = 16
"""The units need sizes that are multiples of this number; other sizes are padded with zeros."""
FP8_CAPABILITY = (8, 9)
"""The first compute capability with units for 8 bits."""
SMALLEST_SCALE = 1e-30

Maximum = Callable[[Tensor], Tensor]
"""Returns the elementwise maximum of a tensor over the ranks that hold parts of one factor. Collective."""


@dataclass(frozen=True, kw_only=True)
class Fp8Weight:
    """The scale of a linear layer's weight in 8 bits, and its 8-bit copies where they are kept.

    A `Linear` carries it in `fp8_weight`. Whoever changes weights writes the new values into the same tensors
    before the next product (`parallel/fp8_weights.py`), so that compiled code stays valid.

    scale: fp32 scalar, by which codes are multiplied to give about the weight.
    codes: E4M3 [o, i]; None where each product rounds the weight, because the weight is in memory only then.
    transposed: E4M3 [i, o], contiguous; None where `codes` is, and on devices without units for 8 bits.
    master: fp32 [o, i], whose elements each product rounds to bf16 and then to 8 bits; the weight, in bf16,
        then need not be in memory. None where a product reads the weight or its codes.
    """

    scale: Tensor
    codes: Tensor | None = None
    transposed: Tensor | None = None
    master: Tensor | None = None


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    maximum: Maximum | None = None,
    *,
    splits_input: bool = False,
    fp8_weight: Fp8Weight | None = None,
    rounds_apart: bool = False,
) -> Tensor:
    """Return x · weightᵀ in x's dtype, from 8-bit factors, with 8-bit factors backward. [..., i] → [...,
    o].

    maximum: over the tensor-parallel ranks; None where this rank holds whole factors.
    splits_input: whether those ranks hold parts of the inputs of one product; else they hold parts of its
        outputs. It is called for split factors only: the other ones are equal on all ranks.
    fp8_weight: of `weight`, as it is now; None: the weight is scaled here.
    rounds_apart: whether the two copies of x are made by an operator each, so that compiled code may leave
        out either. One operator for both reads x once.
    """
    rows = x.flatten(0, -2)
    if fp8_weight is None:
        scale = fp8_scale(_largest(weight.detach(), maximum), FP8_FORWARD)
        fp8_weight = Fp8Weight(scale=scale)
    known = (fp8_weight.scale, fp8_weight.codes, fp8_weight.transposed, fp8_weight.master)
    product = _Fp8Product.apply(rows, weight, *known, maximum, splits_input, rounds_apart)
    return product.unflatten(0, x.shape[:-1])


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        codes: Tensor | None,
        transposed: Tensor | None,
        master: Tensor | None,
        maximum: Maximum | None,
        splits_input: bool,  # noqa: FBT001  — autograd's functions have positional arguments only
        rounds_apart: bool,  # noqa: FBT001
    ) -> Tensor:
        scale_x = fp8_scale(_largest(x, maximum if splits_input else None), FP8_FORWARD)
        if rounds_apart:
            codes_x = to_fp8_codes(x, scale_x, FP8_FORWARD, through=x.dtype)
            transposed_x = to_fp8_transposed(x, scale_x, FP8_FORWARD, through=x.dtype)
        else:
            codes_x, transposed_x = to_fp8_twice(x, scale_x, FP8_FORWARD)
        ctx.is_kept, ctx.dtype = codes is not None, x.dtype
        read_backward = transposed
        if codes is None:
            # Rounded again in the backward, when it is in memory again.
            read_backward = weight if master is None else master
            codes = to_fp8_codes(read_backward, scale, FP8_FORWARD, through=x.dtype)
        elif transposed is None:
            read_backward = codes.t()
        ctx.save_for_backward(transposed_x, scale_x, read_backward, scale)
        ctx.maximum = None if splits_input else maximum
        return _fp8_product(codes_x, codes.t(), (scale_x, scale), x.dtype, is_fast=True)  # [n, o]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        transposed_x, scale_x, weight, scale = ctx.saved_tensors
        if not ctx.is_kept:
            weight = to_fp8_transposed(weight, scale, FP8_FORWARD, through=ctx.dtype)
        scale_g = fp8_scale(_largest(gradient, ctx.maximum), FP8_BACKWARD)
        codes, transposed = to_fp8_twice(gradient, scale_g, FP8_BACKWARD)
        by_x = _fp8_product(codes, weight.t(), (scale_g, scale), ctx.dtype)  # [n, i]
        by_weight = _fp8_product(transposed, transposed_x.t(), (scale_g, scale_x), ctx.dtype)  # [o, i]
        return by_x, by_weight, None, None, None, None, None, None, None


def to_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `x` in 8 bits, and the fp32 scale by which it is multiplied to give about x again.

    largest: the largest magnitude of the whole factor, a scalar; that of `x` if it is not given.
    """
    scale = fp8_scale(largest_magnitude(x) if largest is None else largest, dtype)
    return rounded_to_fp8(x, scale, dtype), scale


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest |element| of `x` in its dtype, a scalar; NaN where one is NaN."""
    if torch.compiler.is_compiling():
        return x.abs().amax()  # which the compiler computes in the pass that makes x
    smallest, largest = x.aminmax()  # one pass, without |x| in memory
    return torch.maximum(largest, -smallest)


def fp8_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 scales of factors whose largest magnitudes are `largest`, in that shape."""
    return (largest.float() / torch.finfo(dtype).max).clamp(min=SMALLEST_SCALE)


def rounded_to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / scale in 8 bits, rounded to nearest, ties to even."""
    return (x.float() / scale).to(dtype)


def to_fp8_twice(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x` [a, b] / scale in 8 bits, and its transpose [b, a], which is a copy where units read it."""
    if has_fp8_units(x.device):
        codes, transposed = torch.ops.bloomery.fp8_twice(x, scale, dtype)
        return codes, transposed
    codes = rounded_to_fp8(x, scale, dtype)
    return codes, codes.t()


def to_fp8_codes(x: Tensor, scale: Tensor, dtype: torch.dtype, *, through: torch.dtype) -> Tensor:
    """Return only the codes that `to_fp8_twice` returns of `x` in the dtype `through`."""
    if has_fp8_units(x.device):
        codes: Tensor = torch.ops.bloomery.fp8_codes(x, scale, dtype, through)
        return codes
    return rounded_to_fp8(x.to(through), scale, dtype)


def to_fp8_transposed(x: Tensor, scale: Tensor, dtype: torch.dtype, *, through: torch.dtype) -> Tensor:
    """Return only the transpose that `to_fp8_twice` returns of `x` in the dtype `through`."""
    if has_fp8_units(x.device):
        transposed: Tensor = torch.ops.bloomery.fp8_transposed(x, scale, dtype, through)
        return transposed
    return rounded_to_fp8(x.to(through), scale, dtype).t()


def write_fp8(
    x: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    transposed: Tensor | None,
    *,
    through: torch.dtype | None = None,
) -> None:
    """Write `x` [a, b] / scale in 8 bits to `codes` [a, b] and to `transposed` [b, a], those that are given.

    Both are contiguous, of one dtype. On GPUs with Triton one kernel reads `x` once and writes both.
    through: the dtype to which `x` is rounded before it is divided; None: its own.
    """
    if x.device.type == "cuda" and has_triton():
        from bloomery.kernels.triton_fp8 import write_codes  # only where Triton is

        write_codes(x, scale, codes, transposed, through=through)
        return
    written = codes if transposed is None else transposed
    assert written is not None, "there is something to write"
    rounded = rounded_to_fp8(x.to(through or x.dtype), scale, written.dtype)
    if codes is not None:
        codes.copy_(rounded)
    if transposed is not None:
        transposed.copy_(rounded.t())


# Operators, so that torch.compile leaves them whole; see `layers.py` for why they are made like this.
torch.library.define(
    "bloomery::fp8_twice", "(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor codes, Tensor transposed)"
)
torch.library.define(
    "bloomery::fp8_codes", "(Tensor x, Tensor scale, ScalarType dtype, ScalarType through) -> Tensor codes"
)
torch.library.define(
    "bloomery::fp8_transposed",
    "(Tensor x, Tensor scale, ScalarType dtype, ScalarType through) -> Tensor transposed",
)


@torch.library.impl("bloomery::fp8_twice", "default")
def _fp8_twice(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, transposed = _room_for_codes(x, dtype)
    write_fp8(x, scale, codes, transposed)
    return codes, transposed


@torch.library.register_fake("bloomery::fp8_twice")  # type: ignore[untyped-decorator]
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _room_for_codes(x, dtype)


@torch.library.impl("bloomery::fp8_codes", "default")
def _fp8_codes(x: Tensor, scale: Tensor, dtype: torch.dtype, through: torch.dtype) -> Tensor:
    codes, _ = _room_for_codes(x, dtype)
    write_fp8(x, scale, codes, None, through=through)
    return codes


@torch.library.register_fake("bloomery::fp8_codes")  # type: ignore[untyped-decorator]
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, through: torch.dtype) -> Tensor:
    return _room_for_codes(x, dtype)[0]


@torch.library.impl("bloomery::fp8_transposed", "default")
def _fp8_transposed(x: Tensor, scale: Tensor, dtype: torch.dtype, through: torch.dtype) -> Tensor:
    _, transposed = _room_for_codes(x, dtype)
    write_fp8(x, scale, None, transposed, through=through)
    return transposed


@torch.library.register_fake("bloomery::fp8_transposed")  # type: ignore[untyped-decorator]
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, through: torch.dtype) -> Tensor:
    return _room_for_codes(x, dtype)[1]


def _room_for_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


def _largest(x: Tensor, maximum: Maximum | None) -> Tensor:
    largest = largest_magnitude(x)
    return largest if maximum is None else maximum(largest)


def _fp8_product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return [a, b] · [b, c] of 8-bit factors, times both scales, in `dtype`.

    is_fast: whether the units may add up with fewer bits than fp32 has: Transformer Engine's choice for a
        forward, and not for gradients.
    """
    if has_fp8_units(left.device):
        return scaled_product(left, right, scales, dtype, is_fast=is_fast)
    return (left.float() @ right.float() * (scales[0] * scales[1])).to(dtype)


def scaled_product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return what `_fp8_product` does, computed by the units for 8 bits, which want whole tiles.

    Nothing is copied if sizes are whole tiles, `left` is contiguous, and `right` the transpose of what is.
    """
    rows, columns = left.shape[0], right.shape[1]
    by_rows, by_columns = (padded_to_tiles(factor).contiguous() for factor in (left, right.t()))
    product = torch_private.scaled_matmul(by_rows, by_columns.t(), scales, dtype, is_fast=is_fast)
    return product[:rows, :columns]


def padded_to_tiles(matrix: Tensor) -> Tensor:
    """Return an 8-bit matrix with rows and columns of zeros added up to whole tiles, which change no sum."""
    rows, columns = (-size % FP8_MULTIPLE for size in matrix.shape)
    if not rows and not columns:
        return matrix
    codes = F.pad(matrix.contiguous().view(torch.uint8), (0, columns, 0, rows))  # a code of 0 is the number 0
    return codes.view(matrix.dtype)


def has_fp8_units(device: torch.device) -> bool:
    """Return whether a device has units for 8 bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
