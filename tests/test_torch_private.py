"""Private functions of torch: they stand in one module, and do what it says of them."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest
import torch

import bloomery
from bloomery import torch_private
from bloomery.model.layers import matmul_mode_for
from bloomery.parallel.precision import resolve_precision

_SOURCE = Path(bloomery.__file__).parent


_PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._[A-Za-z][\w.]*|from torch(?:\.\w+)* import _[a-z]\w*")


def _private_names(path: Path) -> list[str]:
    """The places of a file that name something of torch with a leading underscore."""
    return [f"{path.name}: {name}" for name in _PRIVATE.findall(path.read_text())]


def test_private_names_of_torch_stand_in_one_module() -> None:
    modules = [path for path in _SOURCE.rglob("*.py") if path.name != "torch_private.py"]
    assert [name for path in modules for name in _private_names(path)] == []
    assert _private_names(_SOURCE / "torch_private.py"), "the search finds what is there"


def test_the_version_of_torch_is_one_that_was_tried() -> None:
    """Who moves to another version runs the suite and the tests for GPUs on it, and adds it to the list."""
    assert ".".join(torch.__version__.split(".")[:2]) in torch_private.TRIED_VERSIONS


@pytest.mark.parametrize("is_refused", [0.0, 1.0])
def test_one_update_is_that_of_adamw_or_none(is_refused: float) -> None:
    start, gradient = torch.randn(64), torch.randn(64)
    expected = torch.nn.Parameter(start.clone())
    expected.grad = gradient / 4
    optimizer = torch.optim.AdamW([expected], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-6)
    if not is_refused:
        optimizer.step()

    master, moments, updates = start.clone(), (torch.zeros(64), torch.zeros(64)), torch.tensor(1.0)
    torch_private.fused_adamw(
        master,
        gradient.clone(),
        moments,
        updates,
        learning_rate=0.1,
        betas=(0.8, 0.9),
        weight_decay=0.2,
        epsilon=1e-6,
        gradient_divisor=torch.tensor(4.0),
        is_refused=torch.tensor(is_refused),
    )

    torch.testing.assert_close(master, expected.detach())
    taken = 0.0 if is_refused else gradient / 4
    torch.testing.assert_close(moments[0], torch.zeros(64) + 0.2 * taken)
    torch.testing.assert_close(moments[1], torch.zeros(64) + 0.1 * taken**2)
    assert float(updates) == 1.0, "it is read, not counted up"


def test_norms_and_factors_are_of_each_tensor() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[1.0], [2.0], [2.0]])]
    assert torch_private.tensor_norms(tensors).tolist() == [5.0, 3.0]
    torch_private.scale_tensors(tensors, [torch.tensor(2.0), torch.tensor(0.5)])
    assert torch_private.tensor_norms(tensors).tolist() == [10.0, 1.5]


def test_a_backward_in_two_halves_gives_the_gradients_of_one() -> None:
    layer = torch.nn.Linear(5, 3)
    x, output_gradient = torch.randn(2, 5, requires_grad=True), torch.randn(2, 3)
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], output_gradient)

    parameters = tuple(layer.parameters())
    gradient, groups = torch_private.backward_of_input(layer(x), output_gradient, x, iter(parameters))
    assert torch.equal(gradient, expected[0]) and all(p.grad is None for p in parameters)
    torch_private.backward_of_weights(parameters, groups)()
    for parameter, of_one in zip(parameters, expected[1:], strict=True):
        torch.testing.assert_close(parameter.grad, of_one)


def test_the_limit_of_compilations_is_only_raised() -> None:
    before = torch._dynamo.config.recompile_limit
    torch_private.allow_compilations(before + 5)
    torch_private.allow_compilations(1)
    assert torch._dynamo.config.recompile_limit == before + 5
    torch._dynamo.config.recompile_limit = before


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="reads Linux's flags of x86"
)
def test_a_cpu_without_units_for_narrow_products_multiplies_in_fp32() -> None:
    """The library oneDNN emulates bf16 on each CPU with AVX-512, five times as slowly as products in fp32."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    assert flags is not None
    has_units = bool({"avx512_bf16", "amx_bf16"} & set(flags[1].split()))
    assert torch_private.has_bf16_matmul() == has_units
    assert matmul_mode_for(torch.device("cpu"), torch.bfloat16) == ("native" if has_units else "fp32")
    assert resolve_precision("auto", torch.device("cpu")) == ("bf16" if has_units else "fp32")
    has_fp16 = "amx_fp16" in flags[1].split()
    assert matmul_mode_for(torch.device("cpu"), torch.float16) == ("native" if has_fp16 else "fp32")
