"""Products that are added up in fp32: by a GPU's units where there is one, else from widened factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bloomery.model import products
from bloomery.model.products import add_product, rounded_product


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(33, size, generator=generator).to(dtype) for size in (6, 9))
    return left.t(), right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_not_rounded_to_their_factors_before_they_are_added(dtype: torch.dtype) -> None:
    left, right = factors(dtype)
    product = left.double() @ right.double()
    total = torch.full((6, 9), float("nan"))
    add_product(total, left, right, is_first=True)
    torch.testing.assert_close(total.double(), product, rtol=1e-5, atol=1e-5)
    add_product(total, left, right, is_first=False)
    torch.testing.assert_close(total.double(), 2 * product, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_adds_products_of_16_bits_to_the_total_itself(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    for name in ("mm", "addmm"):
        monkeypatch.setattr(
            products.torch, name, lambda *told, name=name, **more: calls.append((name, told, more))
        )
    with FakeTensorMode():
        total = torch.empty(6, 9, device="cuda")
        left, right = (torch.empty(*shape, device="cuda", dtype=dtype) for shape in ((6, 3), (3, 9)))
        add_product(total, left, right, is_first=True)
        if dtype != torch.float32:
            add_product(total, left, right, is_first=False)
    if dtype == torch.float32:
        assert [(name, more) for name, _, more in calls] == [("mm", {"out": total})]
        return
    wide = {"out_dtype": torch.float32, "out": total}
    assert calls == [("mm", (left, right), wide), ("addmm", (total, left, right), wide)]


def test_torch_knows_products_with_wide_results() -> None:
    """Only a GPU computes them; which operator is called is found before that."""
    total = torch.empty(6, 9)
    left, right = (torch.ones(*shape).bfloat16() for shape in ((6, 3), (3, 9)))
    with pytest.raises(NotImplementedError, match=r"'aten::mm\.dtype_out'"):
        torch.mm(left, right, out_dtype=torch.float32, out=total)
    with pytest.raises(NotImplementedError, match=r"'aten::addmm\.dtype_out'"):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scaled_gradient_is_rounded_once(dtype: torch.dtype) -> None:
    gradient, scale = torch.randn(9, 70), torch.tensor(3.3e-3)
    found = rounded_product(gradient, scale, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, (gradient * scale).to(dtype))
