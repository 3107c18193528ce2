"""Attention in the native library, against the same in double precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bloomery.config.model import ModelSection
from bloomery.model.attention import rotary_table, rotate
from bloomery.model.decoder import build
from bloomery.model.initial_filling import initialise
from bloomery.model.loss import IGNORED, next_token_loss
from bloomery.model.native_kernels import causal_attention, has_amx, supports_attention

pytestmark = pytest.mark.skipif(not has_amx(), reason="this processor has no bf16 matrix units")


@pytest.mark.parametrize("is_rotary", [True, False], ids=["rotary", "as they are"])
@pytest.mark.parametrize(
    ("samples", "heads", "kv_heads", "length", "width"),
    [
        pytest.param(2, 2, 2, 64, 64, id="whole blocks"),
        pytest.param(2, 4, 2, 7, 32, id="shorter than a block, grouped"),
        pytest.param(1, 3, 1, 333, 96, id="a block that is not full"),
        pytest.param(2, 4, 2, 65, 6, id="narrow heads"),
        pytest.param(1, 2, 2, 90, 80, id="heads between blocks"),
        pytest.param(1, 1, 1, 1100, 32, id="more keys than are held at a time"),
    ],
)
def test_attention_and_its_gradients_are_as_near_to_the_truth_as_bf16_allows(
    samples, heads, kv_heads, length, width, is_rotary
):
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(samples, length, heads + 2 * kv_heads, width, generator=generator).bfloat16() * 2
    slope = torch.randn(samples, length, heads, width, generator=generator).bfloat16()
    table = rotary_table(torch.arange(length), head_dim=width, theta=100.0, dtype=torch.bfloat16)
    rotary = table if is_rotary else None

    def attend(attention, dtype):
        x = stored.to(dtype).requires_grad_()
        mixed = attention(x, heads=heads, rotary=rotary)
        (gradient,) = torch.autograd.grad(mixed, x, slope.to(dtype))
        return mixed.detach().double(), gradient.double()

    def exact(qkv, *, heads, rotary):
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
        if rotary is not None:
            query, key = (rotate(part, tuple(one.double() for one in rotary)) for part in (query, key))
        heads_first = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    ours, truth = attend(causal_attention, torch.bfloat16), attend(exact, torch.float64)
    roundings = 3 if is_rotary else 1  # what was turned is rounded once more
    for found, wanted, bound in zip(ours, truth, (2**-8, 2**-6), strict=True):
        assert (found - wanted).norm() < roundings * bound * wanted.norm()
        assert found.shape == wanted.shape


def test_the_number_of_threads_changes_no_bit():
    x = torch.randn(3, 70, 6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    threads = torch.get_num_threads()

    def of(count):
        torch.set_num_threads(count)
        leaf = x.clone().requires_grad_()
        mixed = causal_attention(leaf, heads=2, rotary=None)
        mixed.float().square().sum().backward()
        return torch.cat([mixed.detach().flatten(), leaf.grad.flatten()])

    try:
        assert torch.equal(of(1), of(3))
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_finite_is_passed_on():
    x = torch.randn(1, 40, 3, 32).bfloat16()
    x[0, 5, 1, 3] = float("inf")

    mixed = causal_attention(x, heads=1, rotary=None)

    assert mixed[:, :5].isfinite().all()
    assert not mixed[:, 5:].isfinite().all()


def test_only_what_it_can_compute_is_given_to_it():
    qkv = torch.zeros(1, 8, 6, 64, dtype=torch.bfloat16)

    assert supports_attention(qkv)
    assert not supports_attention(qkv.float())
    assert not supports_attention(qkv[..., :47])


def test_a_decoder_in_bf16_sees_only_what_came_before():
    section = ModelSection(layers=2, hidden=64, heads=2, ffn=48, init_std=0.2)
    decoder = build(section, vocabulary=50, sequence_length=40)
    initialise(decoder, seed=1)
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    truth = decoder(tokens)

    decoder.to(torch.bfloat16)
    whole, part = decoder(tokens), decoder(tokens[:, :13])

    assert torch.equal(whole[:, :13], part)
    assert (whole - truth).norm() < 0.03 * truth.norm()


@pytest.mark.parametrize("vocabulary", [37, 512])
def test_the_loss_and_its_gradients_are_those_that_torch_computes(vocabulary):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 25, 16, generator=generator).bfloat16() * 3
    weight = torch.randn(vocabulary, 16, generator=generator).bfloat16()
    targets = torch.randint(0, vocabulary, (2, 25), generator=generator)
    targets[0, 3:9] = IGNORED

    def loss(*, on_units):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        sums = next_token_loss(*leaves, targets, z_loss=0.01, chunk=20, on_units=on_units)
        return torch.stack(sums).detach(), *torch.autograd.grad(sums.total, leaves)

    for found, wanted in zip(loss(on_units=True), loss(on_units=False), strict=True):
        assert (found - wanted).norm() <= 2**-8 * wanted.norm()
    assert torch.allclose(loss(on_units=True)[0], loss(on_units=False)[0], rtol=1e-6)
