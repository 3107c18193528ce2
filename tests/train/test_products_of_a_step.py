"""A step in bf16 makes no product in fp32, so there is none that TF32 would make quicker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.test_loop import go
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery import torch_private
from bloomery.model import attention, loss
from bloomery.train import loop

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "_scaled_mm"}


class _Products(TorchDispatchMode):
    """Counts the products of a step, and kernels of attention, by the dtype of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS or "dot_product" in name:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 0]
            # A product's last arguments are its factors; of attention's backward those are statistics.
            self.counted[name, tensors[0 if "dot_product" in name else -1].dtype] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, torch.dtype]]:
    """What a device multiplies that has units for bf16 and no kernels of ours, as a GPU does here."""
    monkeypatch.setattr(torch_private, "has_bf16_matmul", lambda: True)
    for module in (attention, loss):
        monkeypatch.setattr(module, "has_amx", lambda: False)
    products, real_step = _Products(), loop.train_step

    def train_step(*told: Any) -> Any:
        with products:
            return real_step(*told)

    monkeypatch.setattr(loop, "train_step", train_step)
    return products.counted


@pytest.mark.parametrize(
    "settings",
    [
        ("optim.name=muon",),
        ("optim.name=adamw", "optim.clip_method=tensor", "model.qk_norm=true", "train.recompute=elementwise"),
        ("model.position=alibi", "model.norm=layernorm", "model.bias=true", "model.attention_dropout=0.1"),
        ("optim.name=muon", "data.mask_documents=true", "optim.qk_clip=0.1", "guard.growth_steps=2"),
    ],
    ids=["Muon", "AdamW", "BLOOM style", "documents, QK-clip, sizes"],
)
def test_no_product_of_a_step_in_bf16_has_factors_in_fp32(
    settings: tuple[str, ...], start: Callable[..., Any], counted: Counter[tuple[str, torch.dtype]]
) -> None:
    go(*start(*settings, "train.precision=bf16", "guard.stop_at_step=2", "train.compile=off"))
    assert {dtype for _, dtype in counted} == {torch.bfloat16}, counted
    assert sum(counted.values()) > 50


def test_a_step_in_fp32_is_seen_to_multiply_in_fp32(
    start: Callable[..., Any], counted: Counter[tuple[str, torch.dtype]]
) -> None:
    go(*start("train.precision=fp32", "guard.stop_at_step=1", "train.compile=off"))
    assert {dtype for _, dtype in counted} == {torch.float32}, counted
