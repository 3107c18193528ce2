"""Matrix products, in whatever way the device does them well.

A CPU without bf16 units emulates a bf16 product 200 times slower than it multiplies fp32. There the factors
are widened to fp32 and the result is rounded once: the numerics of units that accumulate in fp32.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bloomery.model.fp8 import fp8_linear

Products = Literal["native", "fp32", "fp8"]
"""How factors narrower than fp32 are multiplied: as they are, widened to fp32, or narrowed to 8 bits."""


def products_for(device: torch.device, dtype: torch.dtype) -> Products:
    """The faster way to multiply `dtype` on `device`. Ask once, when the model is built."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return "native"
    units = torch.ops.mkldnn
    has_units = (
        units._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else units._is_mkldnn_fp16_supported()
    )
    return "native" if has_units else "fp32"


def set_products(module: nn.Module, products: Products) -> None:
    """Make every product inside `module` the given way."""
    for part in module.modules():
        if hasattr(part, "products"):
            cast(Any, part).products = products  # an attribute that a module's stub cannot know


def narrow_products(module: nn.Module) -> None:
    """Make the products of every `Linear` inside `module` those of 8-bit factors."""
    for part in module.modules():
        if isinstance(part, Linear):
            part.products = "fp8"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, products: Products) -> Tensor:
    """X · weightᵀ + bias in x's dtype. x: [..., in], weight: [out, in], bias: [out]."""
    if products == "fp8":
        product = fp8_linear(x, weight)
        return product if bias is None else product + bias
    if products == "native" or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


class Linear(nn.Module):
    """A weight [out, in] and perhaps a bias [out]. Values are undefined until initialised or loaded."""

    def __init__(
        self, rows: int, columns: int, *, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.products: Products = products_for(device, dtype)
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        return linear(x, self.weight, self.bias, products=self.products)

    def product(self, x: Tensor) -> Tensor:
        """Like forward, without the bias: a layout that splits the columns adds it after its reduction."""
        return linear(x, self.weight, products=self.products)

    def add_bias(self, product: Tensor) -> Tensor:
        """`product` with the bias added, where there is one."""
        return product if self.bias is None else product + self.bias
