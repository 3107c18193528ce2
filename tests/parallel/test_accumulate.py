"""What adds a gradient to its fp32 sum: torch, or on GPUs a kernel where that pays."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bloomery.parallel import accumulate
from bloomery.parallel.accumulate import LEAST_FOR_KERNEL, add_gradient, kernel_adds

ROWS = LEAST_FOR_KERNEL // 16


def adds(device: str, dtype: torch.dtype, *, rows: int = ROWS, transposed: str = "") -> bool:
    """Whether the kernel adds a gradient [rows, 16] like this to its sum."""
    with FakeTensorMode():
        total = torch.empty(rows, 16, device=device)
        gradient = torch.empty(rows, 16, device=device, dtype=dtype)
        if transposed == "total":
            total = torch.empty(16, rows, device=device).t()
        if transposed == "gradient":
            gradient = torch.empty(16, rows, device=device, dtype=dtype).t()
        return kernel_adds(total, gradient)


def test_the_kernel_adds_large_gradients_of_16_bits_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "has_triton", lambda: True)
    assert adds("cuda", torch.bfloat16)
    assert adds("cuda", torch.float16)
    assert not adds("cuda", torch.float32), "sums of one dtype are quick already"
    assert not adds("cpu", torch.bfloat16)
    assert not adds("cuda", torch.bfloat16, rows=ROWS - 1), "norms and biases are left to torch"
    assert not adds("cuda", torch.bfloat16, transposed="total")
    assert not adds("cuda", torch.bfloat16, transposed="gradient")
    monkeypatch.setattr(accumulate, "has_triton", lambda: False)
    assert not adds("cuda", torch.bfloat16)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_kernel_is_told_the_sum_the_gradient_and_whether_it_is_the_first(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    kernels: Any = ModuleType("bloomery.kernels.triton_accumulate")
    kernels.add_widened = lambda *tensors, is_first: calls.append((*tensors, is_first))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(accumulate, "kernel_adds", lambda total, gradient: True)
    total, gradient = torch.zeros(3), torch.ones(3).bfloat16()
    add_gradient(total, gradient, is_first=is_first)
    assert len(calls) == 1 and calls[0][0] is total and calls[0][1] is gradient
    assert calls[0][2] is is_first
    assert not total.any(), "nothing else adds it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_elements_are_widened_before_they_are_added(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    total, gradient = (torch.randn(5, 7, generator=generator) for _ in range(2))
    gradient = gradient.to(dtype)
    expected = total + gradient.float()
    add_gradient(total, gradient, is_first=False)
    assert torch.equal(total, expected)
    add_gradient(total, gradient, is_first=True)
    assert torch.equal(total, gradient.float())
