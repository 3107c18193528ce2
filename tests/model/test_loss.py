from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bloomery.model.loss import IGNORED, next_token_loss


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, z_loss: float) -> torch.Tensor:
    logits = (hidden.float() @ weight.float().t()).flatten(0, -2)
    flat = targets.flatten()
    entropy = F.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum")
    return entropy + z_loss * (logits.logsumexp(-1).square() * (flat != IGNORED)).sum()


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 17, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(40, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 40, (3, 17), generator=generator)
    targets[0, 3:6] = IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 8, 51, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_value_and_gradients_are_those_of_the_plain_formula(chunk: int, z_loss: float) -> None:
    hidden, weight, targets = inputs()
    loss = next_token_loss(hidden, weight, targets, z_loss=z_loss, chunk=chunk)
    expected = plain(hidden, weight, targets, z_loss)
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.cross_entropy, plain(hidden, weight, targets, 0.0).detach())
    torch.testing.assert_close(loss.cross_entropy + loss.z, loss.total.detach())
    ours = torch.autograd.grad(loss.total * 0.3, (hidden, weight))
    theirs = torch.autograd.grad(expected * 0.3, (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_without_gradients_the_value_is_the_same() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        quiet = next_token_loss(hidden, weight, targets, z_loss=0.01, chunk=8)
    loud = next_token_loss(hidden, weight, targets, z_loss=0.01, chunk=8)
    torch.testing.assert_close(tuple(quiet), tuple(part.detach() for part in loud))


def test_terms_for_reports_cannot_be_differentiated_by_mistake() -> None:
    loss = next_token_loss(*inputs(), z_loss=0.01)
    assert loss.total.requires_grad
    assert not loss.cross_entropy.requires_grad and not loss.z.requires_grad


def test_widened_bf16_differs_from_native_by_roundings_alone() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    wide = next_token_loss(hidden, weight, targets, chunk=8, matmul_mode="fp32")
    native = next_token_loss(hidden, weight, targets, chunk=8)
    torch.testing.assert_close(wide.total, native.total, rtol=1e-3, atol=0)
    assert wide.total.dtype == torch.float32
    for one, other in zip(
        torch.autograd.grad(wide.total, (hidden, weight)),
        torch.autograd.grad(plain(hidden, weight, targets, 0.0), (hidden, weight)),
        strict=True,
    ):
        assert one.dtype == torch.bfloat16
        assert ((one - other).float().norm() / other.float().norm()).item() < 0.02


def test_a_batch_of_ignored_targets_costs_nothing() -> None:
    hidden, weight, targets = inputs()
    loss = next_token_loss(hidden, weight, torch.full_like(targets, IGNORED), z_loss=0.1)
    assert loss.total.item() == 0.0
    assert not torch.autograd.grad(loss.total, hidden)[0].any()
