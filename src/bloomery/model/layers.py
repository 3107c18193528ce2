"""The decoder's layers: linear layers, embeddings, the MLP and norms.

A CPU without bf16 units multiplies bf16 200 times slower than fp32. There the factors of a matmul are
widened to fp32 and the result is rounded once, which are the numerics of units that accumulate in fp32. An
embedding's gradient is summed in one order, so it is the same on every run. Norms are computed in fp32.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bloomery import torch_private
from bloomery.model.fp8 import Fp8Weight, Maximum, fp8_linear
from bloomery.model.fp8_scaling import ScaledWeight, Scaling, scaled_linear
from bloomery.model.shape import ResolvedModel

MatmulMode = Literal["native", "fp32", "fp8"]
"""How a matmul is computed: in the factors' dtype, in fp32, or from 8-bit factors."""


def matmul_mode_for(device: torch.device, dtype: torch.dtype) -> MatmulMode:
    """Return the fastest way to multiply `dtype` on `device`. Call it outside of compiled code."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return "native"
    has_units = (
        torch_private.has_bf16_matmul() if dtype is torch.bfloat16 else torch_private.has_fp16_matmul()
    )
    return "native" if has_units else "fp32"


def set_matmul_mode(module: nn.Module, matmul_mode: MatmulMode) -> None:
    """Set how every matmul inside `module` is computed."""
    for part in module.modules():
        if hasattr(part, "matmul_mode"):
            cast(Any, part).matmul_mode = matmul_mode  # a module's stub cannot know this attribute


def use_fp8_matmuls(module: nn.Module, scaling: Scaling = "tensor") -> None:
    """Compute the matmuls of every `Linear` inside `module` with factors rounded to 8 bits.

    scaling: what shares a scale.
    """
    for part in module.modules():
        if isinstance(part, Linear):
            part.matmul_mode, part.scaling = "fp8", scaling


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    matmul_mode: MatmulMode,
) -> Tensor:
    """Return x · weightᵀ + bias in x's dtype. x: [..., in], weight: [out, in], bias: [out]."""
    if matmul_mode == "fp8":
        product = fp8_linear(x, weight)
        return product if bias is None else product + bias
    if matmul_mode == "native" or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


class Linear(nn.Module):
    """A weight [out, in] and perhaps a bias [out]. Values are undefined until initialised or loaded.

    maximum, splits_input: how tensor-parallel ranks split the products, see `fp8_linear`.
    scaling: what shares a scale in products of 8 bits.
    rounds_apart: see `fp8_linear`.
    fp8_weight, scaled_weight: what products of 8 bits know of the weight as it is now, with one scale or with
        many; None: they find it themselves.
    """

    maximum: Maximum | None = None
    splits_input: bool = False
    scaling: Scaling = "tensor"
    rounds_apart: bool = False
    fp8_weight: Fp8Weight | None = None
    scaled_weight: ScaledWeight | None = None

    def __init__(
        self, rows: int, columns: int, *, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.matmul_mode: MatmulMode = matmul_mode_for(device, dtype)
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] from [..., in]."""
        if self.matmul_mode == "fp8":
            return self.add_bias(self.matmul(x))
        return linear(x, self.weight, self.bias, matmul_mode=self.matmul_mode)

    def matmul(self, x: Tensor) -> Tensor:
        """Do the same as `forward` without the bias, which is added after tensor-parallel ranks were
        summed.
        """
        if self.matmul_mode == "fp8":
            return self._fp8_product(x)
        return linear(x, self.weight, matmul_mode=self.matmul_mode)

    def add_bias(self, product: Tensor) -> Tensor:
        """Return `product` with the bias added, if there is one."""
        return product if self.bias is None else product + self.bias

    def _fp8_product(self, x: Tensor) -> Tensor:
        if self.scaling == "tensor":
            return fp8_linear(
                x,
                self.weight,
                self.maximum,
                splits_input=self.splits_input,
                fp8_weight=self.fp8_weight,
                rounds_apart=self.rounds_apart,
            )
        return scaled_linear(
            x,
            self.weight,
            scaling=self.scaling,
            maximum=self.maximum,
            splits_input=self.splits_input,
            scaled_weight=self.scaled_weight,
        )


class Embedding(nn.Module):
    """A table [rows, h]; values are undefined until initialised or loaded."""

    def __init__(self, rows: int, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))

    def forward(self, indices: Tensor) -> Tensor:
        """Return [..., h] from integers [...]."""
        return rows_of(indices, self.weight)


def rows_of(indices: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of `weight` [rows, h] at integers [...] as [..., h]; their gradient is summed in one
    order.
    """
    return _Rows.apply(indices, weight)


class _Rows(torch.autograd.Function):
    """F.embedding with a gradient of its own, because compiled code sums in the order in which threads
    arrive.
    """

    @staticmethod
    def forward(ctx, indices: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[no-untyped-def]
        (indices,) = ctx.saved_tensors
        return None, torch.ops.bloomery.sum_of_rows(gradient.contiguous(), indices, ctx.rows)


# An operator, so that torch.compile leaves it whole; torch offers no way to make one but at import. Not
# torch.library.custom_op: its operators import the compiler at their first call, used or not.
torch.library.define("bloomery::sum_of_rows", "(Tensor gradient, Tensor indices, int rows) -> Tensor")


@torch.library.impl("bloomery::sum_of_rows", "default")
def _sum_of_rows(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Return [rows, h]: the gradients [..., h] of each row, added in the order of positions, in fp32."""
    wide = gradient.float() if gradient.device.type == "cpu" else gradient  # GPU kernels widen by themselves
    summed = torch.ops.aten.embedding_dense_backward(
        wide, indices, rows, padding_idx=-1, scale_grad_by_freq=False
    )
    return summed.to(gradient.dtype)


@torch.library.register_fake("bloomery::sum_of_rows")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    return gradient.new_empty(rows, gradient.shape[-1])


class MLP(nn.Module):
    """hidden → ffn → hidden, with SwiGLU (Shazeer 2020) or GELU (Hendrycks & Gimpel 2016).

    With SwiGLU, gate and up share one stored matrix, gate's rows first.
    """

    def __init__(self, model: ResolvedModel, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = model.section.activation
        inner = 2 * model.ffn if self.activation == "swiglu" else model.ffn
        bias = model.section.mlp_bias
        self.expand = Linear(inner, model.section.hidden, bias=bias, device=device, dtype=dtype)
        self.down = Linear(model.section.hidden, model.ffn, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, s, h] from [b, s, h], without the output's bias (see `Linear.matmul`)."""
        return self.down.matmul(self._activate(self.expand(x)))

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, *, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., h] from [..., h]."""
        return rms_norm(x, self.weight, epsilon=self.epsilon)


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Return x / rms(x) · weight over the last dimension, computed in fp32 and returned in x's dtype.

    weight: broadcast to x.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight.float()).to(x.dtype)


class LayerNorm(nn.Module):
    """(x − mean) / std · weight + bias over the last dimension (Ba et al. 2016)."""

    def __init__(self, width: int, *, epsilon: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., h] from [..., h]."""
        wide_norm = F.layer_norm(
            x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.epsilon
        )
        return wide_norm.to(x.dtype)


def norm(kind: str, width: int, *, epsilon: float, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the norm that the setting `model.norm` names."""
    family = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[kind]
    return family(width, epsilon=epsilon, device=device, dtype=dtype)
