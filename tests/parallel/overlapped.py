"""What one of two ranks does for test_overlapped_linear.py, in a process of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.parallel.small import CPU, Trained, build, mesh_for, train
from torch import Tensor, nn
from torch.distributed import _symmetric_memory as symmetric_memory

from bloomery.model.layers import Linear
from bloomery.parallel import build as building
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.overlapped_linear import GatheringLinear, ScatteringLinear
from bloomery.parallel.tensor_collectives import (
    EnterTensorParallelRegion,
    LeaveTensorParallelRegion,
    tensor_group_of,
)

SAMPLES, LENGTH, WIDTH, INNER = 3, 8, 12, 10


class CountedFallbacks:
    """Gives torch's operators an implementation for CPUs, which torch has but does not register, and counts
    its calls.
    """

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self._library = torch.library.Library("symm_mem", "IMPL")
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            self._library.impl(name, self._counted(name), "CPU")

    def _counted(self, name: str) -> Any:
        fallback = getattr(symmetric_memory, f"_{name}_fallback")

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls[name] += 1
            return fallback(*arguments, **keywords)

        return call


@dataclass(frozen=True, kw_only=True)
class Products:
    """The result of a layer, and the gradients of its input, weight and bias."""

    values: list[np.ndarray]
    calls: dict[str, int]


def products_of_both_forms(rank: int) -> dict[str, tuple[Products, Products]]:
    fallbacks, group = CountedFallbacks(), tensor_group_of(mesh_for(rank, tensor=2).tensor)
    enter, leave = (
        EnterTensorParallelRegion(group, sequence=True),
        LeaveTensorParallelRegion(group, sequence=True),
    )
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for kind, length, plain_of, overlapped_of in (
        ("gather", LENGTH // 2, lambda layer: nn.Sequential(enter, layer), GatheringLinear),
        ("scatter", LENGTH, lambda layer: _Summed(layer, leave), _Scattering),
    ):
        x = torch.randn(SAMPLES, length, WIDTH, generator=generator)
        layer = Linear(INNER, WIDTH, bias=True, device=CPU, dtype=torch.float32)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        out = torch.randn(SAMPLES, LENGTH if kind == "gather" else LENGTH // 2, INNER, generator=generator)
        found[kind] = (
            _products(plain_of(layer), layer, x, out, fallbacks),
            _products(overlapped_of(layer, group), layer, x, out, fallbacks),
        )
    return found


class _Summed(nn.Module):
    def __init__(self, layer: Linear, leave: nn.Module) -> None:
        super().__init__()
        self.layer, self.leave = layer, leave

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.add_bias(self.leave(self.layer.matmul(x)))


class _Scattering(nn.Module):
    def __init__(self, layer: Linear, group: Any) -> None:
        super().__init__()
        self.layer = ScatteringLinear(layer, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.add_bias(self.layer.matmul(x))


def _products(
    module: nn.Module, layer: Linear, x: Tensor, gradient: Tensor, fallbacks: CountedFallbacks
) -> Products:
    fallbacks.calls.clear()
    x = x.clone().requires_grad_()
    result = module(x)
    gradients = torch.autograd.grad(result, (x, layer.weight, layer.bias), gradient)
    values = [tensor.detach().numpy() for tensor in (result, *gradients)]
    return Products(values=values, calls=dict(fallbacks.calls))


def trained_with_and_without(rank: int) -> dict[str, tuple[Trained, dict[str, int]]]:
    """plain: without the setting. cpu: with it, as CPUs train. overlapped: as GPUs train."""
    fallbacks, mesh = CountedFallbacks(), mesh_for(rank, tensor=2)
    found = {}
    for style in ("llama", "gpt"):
        for form in ("plain", "cpu", "overlapped"):
            fallbacks.calls.clear()
            model = (
                build_overlapped(style, mesh)
                if form == "overlapped"
                else build(style, mesh, sequence=True, async_tensor=form == "cpu")
            )
            found[f"{style} {form}"] = (train(model, mesh), dict(fallbacks.calls))
    return found


def calls_by_recomputation(rank: int) -> dict[str, tuple[list[Any], dict[str, int]]]:
    fallbacks, mesh = CountedFallbacks(), mesh_for(rank, tensor=2)
    found = {}
    for mode in ("none", "elementwise", "mlp", "full"):
        fallbacks.calls.clear()
        model = build_overlapped("llama", mesh)
        model.set_phase(precision="fp32", recompute=mode)
        found[mode] = (train(model, mesh, steps=1).steps, dict(fallbacks.calls))
    return found


def traced_and_eager(rank: int) -> list[list[Any]]:
    torch._dynamo.reset()
    fallbacks, mesh = CountedFallbacks(), mesh_for(rank, tensor=2)
    eager, traced = (build_overlapped("llama", mesh) for _ in range(2))
    traced.decoder.blocks[0].compile(backend="aot_eager", dynamic=False, fullgraph=True)
    found = []
    for model in (eager, traced):
        fallbacks.calls.clear()
        found.append([train(model, mesh, steps=2).steps, dict(fallbacks.calls)])
    return found


def build_overlapped(style: str, mesh: Mesh) -> TrainingModel:
    """Return a model that overlaps, as on GPUs."""
    with mock.patch.object(building, "can_overlap_products", return_value=True):
        return build(style, mesh, sequence=True, async_tensor=True)
