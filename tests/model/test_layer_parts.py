"""Names and shapes of weights, what a layer multiplies with, and factors of 8 bits at their edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bloomery.config.model import ModelSection
from bloomery.model import fp8, layers
from bloomery.model.attention import Attention, AttentionContext, alibi_bias
from bloomery.model.decoder import build
from bloomery.model.dropout import BlockDropout
from bloomery.model.fp8 import FP8_FORWARD, padded_to_tiles, to_fp8
from bloomery.model.initial_filling import initialise
from bloomery.model.initial_values import InitialRule, initial_rule
from bloomery.model.layers import (
    LayerNorm,
    Linear,
    RMSNorm,
    linear,
    norm,
    set_matmul_mode,
    use_fp8_matmuls,
)
from bloomery.model.shape import logical_shapes, resolve

CPU = torch.device("cpu")


def shapes_of(**settings: Any) -> dict[str, tuple[int, ...]]:
    section = ModelSection(**{"layers": 1, "hidden": 8, "heads": 4, **settings})
    return logical_shapes(resolve(section, vocabulary=20, sequence_length=6))


def test_a_llama_has_these_weights_in_the_order_in_which_a_token_meets_them() -> None:
    assert list(shapes_of(kv_heads=2, ffn=12, head_dim=3, qk_norm=True).items()) == [
        ("embedding.weight", (20, 8)),
        ("blocks.0.attention_norm.weight", (8,)),
        ("blocks.0.attention.query.weight", (12, 8)),
        ("blocks.0.attention.key.weight", (6, 8)),
        ("blocks.0.attention.value.weight", (6, 8)),
        ("blocks.0.attention.query_norm.weight", (3,)),
        ("blocks.0.attention.key_norm.weight", (3,)),
        ("blocks.0.attention.output.weight", (8, 12)),
        ("blocks.0.mlp_norm.weight", (8,)),
        ("blocks.0.mlp.gate.weight", (12, 8)),
        ("blocks.0.mlp.up.weight", (12, 8)),
        ("blocks.0.mlp.down.weight", (8, 12)),
        ("final_norm.weight", (8,)),
        ("head.weight", (20, 8)),
    ]


def test_a_gpt_has_these_weights_in_the_order_in_which_a_token_meets_them() -> None:
    settings = dict(norm="layernorm", position="learned", activation="gelu", bias=True, tied=True)
    assert shapes_of(**settings, max_positions=6)["positions.weight"] == (6, 8), "as many as a sample has"
    assert "positions.weight" not in shapes_of(max_positions=5), "others may be fewer"
    found = shapes_of(**settings, embedding_norm=True, max_positions=9, vocabulary=24)
    assert list(found.items()) == [
        ("embedding.weight", (24, 8)),
        ("positions.weight", (9, 8)),
        ("embedding_norm.weight", (8,)),
        ("embedding_norm.bias", (8,)),
        ("blocks.0.attention_norm.weight", (8,)),
        ("blocks.0.attention_norm.bias", (8,)),
        ("blocks.0.attention.query.weight", (8, 8)),
        ("blocks.0.attention.query.bias", (8,)),
        ("blocks.0.attention.key.weight", (8, 8)),
        ("blocks.0.attention.key.bias", (8,)),
        ("blocks.0.attention.value.weight", (8, 8)),
        ("blocks.0.attention.value.bias", (8,)),
        ("blocks.0.attention.output.weight", (8, 8)),
        ("blocks.0.attention.output.bias", (8,)),
        ("blocks.0.mlp_norm.weight", (8,)),
        ("blocks.0.mlp_norm.bias", (8,)),
        ("blocks.0.mlp.up.weight", (32, 8)),
        ("blocks.0.mlp.up.bias", (32,)),
        ("blocks.0.mlp.down.weight", (8, 32)),
        ("blocks.0.mlp.down.bias", (8,)),
        ("final_norm.weight", (8,)),
        ("final_norm.bias", (8,)),
    ]


@pytest.mark.parametrize(
    ("residual", "scale"),
    [("same", 0.5), ("scaled", 0.5 / 8**0.5), ("zero", 0.0)],
)
def test_what_is_added_to_the_residual_stream_begins_as_the_recipe_says(residual: str, scale: float) -> None:
    section = ModelSection(layers=4, hidden=8, heads=4, init_std=0.5, residual_init=residual)
    model = resolve(section, vocabulary=20, sequence_length=6)
    kind = "constant" if residual == "zero" else "normal"
    for name in ("blocks.0.attention.output.weight", "blocks.3.mlp.down.weight"):
        found = initial_rule(name, model)
        assert found.kind == kind and found.scale == pytest.approx(scale)
    for name in ("embedding.weight", "head.weight", "positions.weight", "blocks.0.mlp.up.weight"):
        assert initial_rule(name, model) == InitialRule(kind="normal", scale=0.5)
    for name in ("final_norm.weight", "blocks.0.attention.key_norm.weight", "embedding_norm.weight"):
        assert initial_rule(name, model) == InitialRule(kind="constant", scale=1.0)
    for name in ("final_norm.bias", "blocks.0.mlp.down.bias"):
        assert initial_rule(name, model) == InitialRule(kind="constant", scale=0.0)


def test_a_layer_multiplies_in_its_mode_and_adds_its_bias_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Linear(3, 2, bias=True, device=CPU, dtype=torch.float32)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    nn.init.constant_(layer.bias, 2.0)
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(2))
    product = x @ layer.weight.detach().T
    torch.testing.assert_close(layer(x), product + 2.0)
    torch.testing.assert_close(layer.matmul(x), product)
    torch.testing.assert_close(layer.add_bias(product), product + 2.0)
    bare = Linear(3, 2, bias=False, device=CPU, dtype=torch.float32)
    assert bare.bias is None and bare.add_bias(product) is product
    given: list[Any] = []
    monkeypatch.setattr(
        layers, "fp8_linear", lambda *told, **named: given.append((*told[2:], named)) or product
    )
    layer.matmul_mode, layer.maximum = "fp8", "maximum"  # type: ignore[assignment]
    layer.splits_input, layer.fp8_weight, layer.rounds_apart = True, "codes", True  # type: ignore[assignment]
    torch.testing.assert_close(layer(x), product + 2.0)
    assert torch.equal(layer.matmul(x), product)
    named = {"splits_input": True, "fp8_weight": "codes", "rounds_apart": True}
    assert given == [("maximum", named)] * 2


def test_16_bits_are_widened_with_their_bias_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((9, 64), (5, 64), (5,))
    )
    found = linear(x, weight, bias, matmul_mode="fp32")
    exact = x.double() @ weight.double().T + bias.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.float().bfloat16(), rtol=2**-7, atol=1e-6)
    assert (found == exact.float().bfloat16()).float().mean() > 0.97


def test_modes_are_set_on_all_parts_and_8_bits_on_linear_layers_alone() -> None:
    section = ModelSection(layers=2, hidden=8, heads=2, ffn=8)
    decoder = build(section, vocabulary=20, sequence_length=6)
    set_matmul_mode(decoder, "fp32")
    modes = [part.matmul_mode for part in decoder.modules() if hasattr(part, "matmul_mode")]
    assert len(modes) == 1 + 2 * 5 and set(modes) == {"fp32"}
    use_fp8_matmuls(decoder.blocks)
    found = {
        type(part).__name__: part.matmul_mode for part in decoder.modules() if hasattr(part, "matmul_mode")
    }
    assert found == {"Decoder": "fp32", "Attention": "fp32", "Linear": "fp8"}


def test_zeros_have_a_scale_in_8_bits_and_a_factor_that_is_split_that_of_the_whole() -> None:
    narrow, scale = to_fp8(torch.zeros(3), FP8_FORWARD)
    assert narrow.float().tolist() == [0.0] * 3 and float(scale) > 0.0
    narrow, scale = to_fp8(torch.tensor([1.0, -2.0]), FP8_FORWARD, torch.tensor(4.0))
    assert float(scale) == pytest.approx(4.0 / 448.0) and narrow.float().tolist() == [112.0, -224.0]


def test_only_matrices_that_are_no_whole_tiles_are_padded() -> None:
    whole = torch.ones(16, 32).to(FP8_FORWARD)
    assert padded_to_tiles(whole) is whole
    for rows, columns in ((15, 32), (16, 31), (1, 1)):
        padded = padded_to_tiles(torch.ones(rows, columns).to(FP8_FORWARD))
        assert tuple(padded.shape) == (16, 32 if columns > 16 else 16) and padded.dtype == FP8_FORWARD
        assert float(padded.float().sum()) == rows * columns == float(padded[:rows, :columns].float().sum())


@pytest.mark.parametrize(
    ("device", "capability", "has"),
    [("cuda", (8, 9), True), ("cuda", (9, 0), True), ("cuda", (8, 6), False), ("cpu", (9, 0), False)],
)
def test_units_for_8_bits_are_those_of_gpus_from_ada_on(
    device: str, capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: capability)
    assert fp8.has_fp8_units(torch.device(device)) is has


def test_norms_are_those_that_the_recipe_names_with_its_epsilon() -> None:
    x = torch.tensor([[3.0, 4.0]])
    for kind, made, expected in (
        ("rmsnorm", RMSNorm, [3.0 / (12.5 + 0.5) ** 0.5, 4.0 / (12.5 + 0.5) ** 0.5]),
        ("layernorm", LayerNorm, [-0.5 / (0.25 + 0.5) ** 0.5, 0.5 / (0.25 + 0.5) ** 0.5]),
    ):
        one = norm(kind, 2, epsilon=0.5, device=CPU, dtype=torch.float32)
        assert type(one) is made
        for name, parameter in one.named_parameters():
            nn.init.constant_(parameter, 2.0 if name == "weight" else 10.0)
        offset = 10.0 if kind == "layernorm" else 0.0
        torch.testing.assert_close(one(x), torch.tensor([[2 * each + offset for each in expected]]))


def test_the_bias_of_alibi_falls_with_the_distance_of_a_key() -> None:
    bias = alibi_bias(torch.tensor([0.5, 0.25]), torch.tensor([2, 3]), torch.arange(4))
    assert bias.tolist() == [
        [[-1.0, -0.5, 0.0, 0.5], [-1.5, -1.0, -0.5, 0.0]],
        [[-0.5, -0.25, 0.0, 0.25], [-0.75, -0.5, -0.25, 0.0]],
    ]


def test_attention_weights_are_dropped_by_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    section = ModelSection(layers=1, hidden=8, heads=4, kv_heads=2, attention_dropout=0.5)
    decoder = build(section, vocabulary=20, sequence_length=6)
    initialise(decoder, seed=1)
    made: Attention = decoder.blocks[0].attention  # type: ignore[assignment]
    asked: list[Any] = []

    def drop(weights: torch.Tensor, rate: float, keys: Any) -> torch.Tensor:
        asked.append((rate, keys))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
        return weights

    monkeypatch.setattr("bloomery.model.attention.drop", drop)
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, heads, 3, 2, generator=generator) for heads in (4, 2, 2))
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    keys: Any = "keys"
    results = []
    for mask in (causal, torch.where(causal, 0.0, float("-inf"))):
        dropping = AttentionContext(
            mask=mask, is_causal=False, rotary=None, dropout=BlockDropout(keys, None, None)
        )
        results.append(made.attend(query, key, value, dropping))
    plain = made.attend(query, key, value, AttentionContext(mask=None, is_causal=True, rotary=None))
    assert asked == [(0.5, "keys")] * 2
    for result in results:
        torch.testing.assert_close(result, plain)


def test_the_largest_logit_of_16_bits_is_that_of_products_in_fp32_where_those_are_used() -> None:
    section = ModelSection(layers=1, hidden=32, heads=2, position="alibi")
    decoder = build(section, vocabulary=20, sequence_length=6, dtype=torch.bfloat16)
    initialise(decoder, seed=1)
    attention: Attention = decoder.blocks[0].attention  # type: ignore[assignment]
    set_matmul_mode(attention, "fp32")
    attention.has_units, attention.logit_maxima = False, torch.zeros(2)
    x = 30.0 * torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(7)).bfloat16()
    context = AttentionContext(mask=None, is_causal=True, rotary=None)
    attention(x, context)
    query, key, _ = attention.qkv(x).float().unflatten(-1, (6, 16)).transpose(1, 2).split(2, dim=1)
    scores = (query @ key.mT / 4.0).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -1e9)
    torch.testing.assert_close(attention.logit_maxima, scores.amax((0, 2, 3)).detach(), rtol=1e-6, atol=0)
    measured = attention.logit_maxima.clone()
    attention.logit_maxima.zero_()
    far = torch.where(torch.ones(6, 6, dtype=torch.bool).tril(), -10.0, float("-inf")).expand(2, 6, 6)
    attention(x, AttentionContext(mask=far, is_causal=False, rotary=None))
    assert torch.equal(attention.logit_maxima, measured), "the bias of positions is left out"
    with torch.no_grad():
        attention(2 * x, context)
    assert torch.equal(attention.logit_maxima, measured), "only forwards that a backward follows are measured"


def test_a_block_keeps_the_largest_size_that_it_returned_to_forwards_that_a_backward_follows() -> None:
    section = ModelSection(layers=1, hidden=8, heads=2, ffn=8)
    decoder = build(section, vocabulary=20, sequence_length=6)
    initialise(decoder, seed=1)
    block: Any = decoder.blocks[0]
    block.hidden_maximum = torch.zeros(())
    context = AttentionContext(mask=None, is_causal=True, rotary=None)
    x = torch.ones(1, 4, 8)
    x[0, 2, 3] = -50.0
    largest = float(block(x, context).detach().abs().max())
    block(0.1 * x, context)
    with torch.no_grad():
        block(9.0 * x, context)
    assert float(block.hidden_maximum) == pytest.approx(largest) and largest > 45.0
