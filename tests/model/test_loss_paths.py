"""Which of its ways a loss is computed in, and that each gets what it needs and gives what the others do."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.model.test_loss import inputs, plain
from torch._subclasses.fake_tensor import FakeTensorMode

from bloomery.model import loss as loss_module
from bloomery.model.loss import IGNORED, LossSums, NextTokenLoss, next_token_loss, supports_fused_loss


def gradients(sums: LossSums, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(sums.total * 0.5, leaves)


@pytest.fixture
def on_units(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the native library's slopes had; in its place torch differentiates."""
    calls: list[int] = []

    def slopes(logits: torch.Tensor, targets: torch.Tensor, z_loss: float) -> tuple[torch.Tensor, ...]:
        assert logits.dtype == torch.bfloat16
        calls.append(len(logits))
        with torch.enable_grad():
            leaf = logits.float().detach().requires_grad_()
            z = z_loss * leaf.logsumexp(-1).square() * (targets != IGNORED)
            entropy = torch.nn.functional.cross_entropy(leaf, targets, ignore_index=IGNORED, reduction="none")
            (slope,) = torch.autograd.grad((entropy + z).sum(), leaf)
        return slope.bfloat16(), entropy.detach(), z.detach()

    monkeypatch.setattr(loss_module, "entropy_gradient", slopes)
    return calls


def test_slopes_from_the_units_give_the_terms_and_gradients_of_the_plain_formula(on_units: list[int]) -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    found = next_token_loss(hidden, weight, targets, z_loss=0.01, chunk=20, on_units=True)
    assert on_units == [20, 20, 11]
    wanted = next_token_loss(hidden, weight, targets, z_loss=0.01, chunk=20)
    torch.testing.assert_close(tuple(found), tuple(wanted))
    for one, other in zip(gradients(found, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other)


def test_the_units_compute_no_other_dtype_and_nothing_without_gradients(
    on_units: list[int],
) -> None:
    next_token_loss(*inputs(), on_units=True)
    with torch.no_grad():
        next_token_loss(*inputs(torch.bfloat16), on_units=True)
    hidden, weight, targets = inputs(torch.bfloat16)
    next_token_loss(hidden.detach(), weight.detach(), targets, on_units=True)
    assert on_units == []
    next_token_loss(hidden.detach(), weight, targets, on_units=True)
    next_token_loss(hidden, weight.detach(), targets, on_units=True)
    assert on_units == [51, 51]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """The z_loss and chunk of each fused loss, which is computed in fp32 by torch here."""
    calls: list[tuple[float, int]] = []

    def both(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, z_loss: float, chunk: int
    ) -> tuple[torch.Tensor, ...]:
        calls.append((z_loss, chunk))
        with torch.enable_grad():
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            total = plain(*leaves, targets, z_loss)
            by_hidden, by_weight = torch.autograd.grad(total, leaves)
            entropy = plain(*leaves, targets, 0.0)
        return by_hidden, by_weight.float(), entropy.detach(), (total - entropy).detach()

    monkeypatch.setattr(loss_module, "loss_and_gradients", both)
    monkeypatch.setattr(loss_module, "supports_fused_loss", lambda hidden: hidden.dtype == torch.bfloat16)
    return calls


def test_a_fused_loss_gives_terms_and_gradients_of_the_plain_formula(fused: list[tuple[float, int]]) -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    found = next_token_loss(hidden, weight, targets, z_loss=0.01, chunk=20, fused=True)
    assert fused == [(0.01, 20)] and found.total.requires_grad
    assert not found.cross_entropy.requires_grad and not found.z.requires_grad
    torch.testing.assert_close(found.total, plain(hidden, weight, targets, 0.01))
    torch.testing.assert_close(found.cross_entropy, plain(hidden, weight, targets, 0.0).detach())
    torch.testing.assert_close(found.z, (found.total - found.cross_entropy).detach())
    wanted = torch.autograd.grad(plain(hidden, weight, targets, 0.01) * 0.5, (hidden, weight))
    for one, other in zip(gradients(found, hidden, weight), wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other)


def test_a_loss_is_fused_where_the_device_can_and_matmuls_are_native(fused: list[tuple[float, int]]) -> None:
    next_token_loss(*inputs(torch.bfloat16), fused=True, matmul_mode="fp32")
    next_token_loss(*inputs(torch.bfloat16))
    next_token_loss(*inputs(), fused=True)
    assert fused == []
    next_token_loss(*inputs(torch.bfloat16), fused=True)
    assert fused == [(0.0, 1024)]


@pytest.mark.parametrize(
    ("device", "dtype", "can"),
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
        ("cuda", torch.float32, False),
        ("cpu", torch.bfloat16, False),
    ],
)
def test_half_precision_on_gpus_can_be_fused(device: str, dtype: torch.dtype, can: bool) -> None:
    hidden: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert supports_fused_loss(hidden) is can


def test_the_loss_of_a_decoder_passes_on_what_it_is_given_and_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(loss_module, "next_token_loss", lambda *parts, **named: given.append((parts, named)))
    for units, triton in ((True, False), (False, True)):
        monkeypatch.setattr(loss_module, "has_amx", lambda units=units: units)
        monkeypatch.setattr(loss_module, "has_triton", lambda triton=triton: triton)
        NextTokenLoss()("hidden", "weight", "targets", z_loss=0.5, chunk=9, matmul_mode="fp32")
        parts, named = given.pop()
        assert parts == ("hidden", "weight", "targets")
        assert named == {
            "z_loss": 0.5,
            "chunk": 9,
            "matmul_mode": "fp32",
            "on_units": units,
            "fused": triton,
        }


def test_a_compiler_is_told_the_shapes_and_dtypes_of_a_fused_loss() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(50, 8, dtype=torch.bfloat16)
        found = loss_module.loss_and_gradients(hidden, weight, torch.zeros(6).long(), z_loss=0.1, chunk=4)
    assert [(tuple(one.shape), one.dtype) for one in found] == [
        ((6, 8), torch.bfloat16),
        ((50, 8), torch.float32),
        ((), torch.float32),
        ((), torch.float32),
    ]


@pytest.mark.parametrize("chunk", [4, 6, 100])
def test_the_rows_of_a_fused_loss_are_computed_a_chunk_at_a_time(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself is tried in tests/kernels; torch stands in for it here."""
    asked: list[tuple[int, float]] = []

    def write(
        logits: torch.Tensor, targets: torch.Tensor, z_loss: float, entropy: torch.Tensor, z: torch.Tensor
    ) -> None:
        asked.append((len(logits), z_loss))
        counts = targets != IGNORED
        partition = logits.logsumexp(-1)
        entropy.copy_(counts * (partition - logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]))
        z.copy_(z_loss * counts * partition.square())
        pull = 1 + 2 * z_loss * partition
        hits = torch.nn.functional.one_hot(targets.clamp(min=0), logits.shape[1])
        logits.copy_(counts[:, None] * (logits.softmax(-1) * pull[:, None] - hits))

    kernel = SimpleNamespace(write_loss_gradient=write)
    monkeypatch.setitem(sys.modules, "bloomery.kernels.triton_loss", kernel)
    hidden, weight, targets = (one.detach() for one in inputs())
    rows, wanted = hidden.flatten(0, -2)[:10].clone(), targets.flatten()[:10].clone()
    by_hidden, by_weight, entropy, z = loss_module.loss_and_gradients(
        rows, weight, wanted, z_loss=0.01, chunk=chunk
    )
    assert asked == [(n, 0.01) for n in {4: (4, 4, 2), 6: (6, 4), 100: (10,)}[chunk]]
    leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    total = plain(*leaves, wanted, 0.01)
    expected = torch.autograd.grad(total, leaves)
    torch.testing.assert_close((by_hidden, by_weight), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, plain(*leaves, wanted, 0.0).detach())
    torch.testing.assert_close(entropy + z, total.detach())


def test_an_evaluation_multiplies_as_a_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    multiply = loss_module.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, *, matmul_mode: Any) -> torch.Tensor:
        modes.append(matmul_mode)
        return multiply(x, weight, matmul_mode=matmul_mode)

    monkeypatch.setattr(loss_module, "linear", linear)
    with torch.no_grad():
        next_token_loss(*inputs(torch.bfloat16), chunk=30, matmul_mode="fp32")
    assert modes == ["fp32", "fp32"]
