"""The loss whose gradient replaces the logits against the loss in separate operations; prints JSON."""

from __future__ import annotations

import json
import sys

import torch

from bloomery.model.loss import IGNORED, loss_and_gradients, next_token_loss

Z_LOSS = 0.01


def differences(*, tokens: int, vocabulary: int, device: str, dtype: torch.dtype) -> list[float]:
    """Return the differences of the terms, and of the gradients by hidden states and weight, relative to the
    largest number of each.
    """
    random = torch.Generator(device).manual_seed(vocabulary)
    hidden = torch.randn(tokens, 32, generator=random, device=device).to(dtype)
    weight = torch.randn(vocabulary, 32, generator=random, device=device).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=random, device=device)
    targets[::5], targets[1] = IGNORED, 0
    *gradients, cross_entropy, z = loss_and_gradients(
        hidden, weight, targets, z_loss=Z_LOSS, chunk=tokens // 2
    )
    wide = [factor.double().requires_grad_() for factor in (hidden, weight)]
    expected = next_token_loss(*wide, targets, z_loss=Z_LOSS, chunk=tokens)
    expected.total.backward()
    pairs = [(cross_entropy, expected.cross_entropy), (z, expected.z)]
    pairs += [(own, factor.grad) for own, factor in zip(gradients, wide, strict=True)]
    return [float((own - other).detach().abs().max() / other.detach().abs().max()) for own, other in pairs]


if __name__ == "__main__":
    found = [
        differences(tokens=6, vocabulary=size, device="cpu", dtype=torch.float32) for size in (7, 100, 9000)
    ]
    sys.stdout.write(json.dumps(found) + "\n")
