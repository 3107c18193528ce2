"""The decoder: sizes, masks, caches and logical tensors. Against transformers: tests/checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bloomery.config.model import ModelSection
from bloomery.errors import BloomeryError, ConfigError, Mistake
from bloomery.model import decoder as decoder_module
from bloomery.model.attention import AttentionContext, alibi_slopes, rotary_table
from bloomery.model.decoder import Decoder, build
from bloomery.model.initial_filling import initialise
from bloomery.model.layers import matmul_mode_for, set_matmul_mode
from bloomery.model.logical_parameters import logical_parameters
from bloomery.model.shape import logical_shapes

VOCABULARY, LENGTH = 64, 16
STYLES = {
    "llama": ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, init_std=0.2),
    "qk_norm": ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, init_std=0.2, qk_norm=True),
    "bloom": ModelSection(
        layers=2,
        hidden=24,
        heads=3,
        norm="layernorm",
        position="alibi",
        activation="gelu_tanh",
        bias=True,
        tied=True,
        embedding_norm=True,
        init_std=0.2,
    ),
    "gpt2": ModelSection(
        layers=2,
        hidden=32,
        heads=4,
        max_positions=2 * LENGTH,
        norm="layernorm",
        position="learned",
        activation="gelu",
        bias=True,
        tied=True,
        init_std=0.2,
    ),
}


@pytest.fixture(params=STYLES)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    made = build(STYLES[request.param], vocabulary=VOCABULARY, sequence_length=LENGTH)
    initialise(made, seed=1)
    return made


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


def test_logical_tensors_cover_each_stored_row_once(decoder: Decoder) -> None:
    rows: dict[str, list[int]] = {}
    for logical in logical_parameters(decoder):
        taken = rows.setdefault(logical.parameter_name, [])
        taken.extend(range(logical.row_start, logical.row_start + logical.rows))
    assert rows == {name: list(range(len(one))) for name, one in decoder.named_parameters()}
    shapes = {logical.name: logical.shape for logical in logical_parameters(decoder)}
    assert shapes == logical_shapes(decoder.model)


def test_writing_a_logical_tensor_writes_the_parameter(decoder: Decoder) -> None:
    for logical in logical_parameters(decoder):
        logical.tensor.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in decoder.parameters())


def test_a_document_does_not_see_the_one_before(decoder: Decoder) -> None:
    tokens = some_tokens(1, LENGTH)
    documents = torch.tensor([[0] * 5 + [1] * (LENGTH - 5)], dtype=torch.int32)
    hidden = decoder(tokens, documents=documents)
    other = tokens.clone()
    other[:, :5] = some_tokens(1, 11)[:, 6:]
    changed = decoder(other, documents=documents)
    torch.testing.assert_close(hidden[:, 5:], changed[:, 5:], rtol=0, atol=1e-6)
    assert (hidden[:, :5] - changed[:, :5]).abs().max() > 1e-3
    torch.testing.assert_close(hidden[:, :5], decoder(tokens[:, :5]), rtol=0, atol=1e-5)


def test_blocks_share_the_mask_of_documents_as_numbers(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a boolean one torch makes one of numbers in every block, and keeps each for backward.
    masks: list[torch.Tensor] = []
    attend = F.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **more: Any):  # type: ignore[no-untyped-def]
        masks.append(mask)
        return attend(query, key, value, mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    decoder(some_tokens(2, LENGTH), documents=torch.zeros(2, LENGTH, dtype=torch.int32))
    assert len(masks) == len(decoder.blocks) > 1
    assert all(mask.dtype == torch.float32 and mask.data_ptr() == masks[0].data_ptr() for mask in masks)


def test_with_positions_reset_each_document_is_what_it_is_alone(decoder: Decoder) -> None:
    tokens, lengths = some_tokens(2, LENGTH), ((5, 1, 10), (16, 0, 0))
    counted = [torch.repeat_interleave(torch.arange(3), torch.tensor(one)) for one in lengths]
    decoder.resets_positions = True
    hidden = decoder(tokens, documents=torch.stack(counted).int())
    alone = [decoder(piece[None]) for piece in tokens[0].split(lengths[0])]
    torch.testing.assert_close(hidden[0], torch.cat(alone, dim=1)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden[1:], decoder(tokens[1:]), rtol=0, atol=1e-5)
    if decoder.positions is not None:  # rotary and ALiBi see distances alone
        decoder.resets_positions = False
        whole = decoder(tokens, documents=torch.stack(counted).int())
        assert (whole[0, 5:] - hidden[0, 5:]).abs().max() > 1e-2


def test_one_document_is_the_same_as_no_mask(decoder: Decoder) -> None:
    tokens = some_tokens(2, LENGTH)
    masked = decoder(tokens, documents=torch.zeros(2, LENGTH, dtype=torch.int32))
    torch.testing.assert_close(masked, decoder(tokens), rtol=0, atol=1e-5)


def test_a_cache_changes_nothing_but_the_time(decoder: Decoder) -> None:
    tokens = some_tokens(2, LENGTH)
    cache = decoder.cache(batch=2, capacity=LENGTH)
    pieces = [tokens[:, :6], tokens[:, 6:9], *tokens[:, 9:].split(1, dim=1)]
    with torch.no_grad():
        hidden = torch.cat([decoder(piece, cache=cache) for piece in pieces], dim=1)
    torch.testing.assert_close(hidden, decoder(tokens), rtol=0, atol=1e-5)


def test_the_norm_of_queries_and_keys_is_the_papers() -> None:
    """Each head's query and key is x / rms(x) · weight, so no logit exceeds √d × the largest weights."""
    section = replace(STYLES["qk_norm"], norm_epsilon=0.5)
    made = build(section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    initialise(made, seed=1)
    attention = made.blocks[0].attention
    with torch.no_grad():
        for head_norm in (attention.query_norm, attention.key_norm):
            head_norm.weight.copy_(torch.linspace(0.5, 2.0, 8))
    seen: list[torch.Tensor] = []

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: AttentionContext
    ) -> torch.Tensor:
        seen.extend((query, key))
        return type(attention).attend(attention, query, key, value, sight)

    attention.__dict__["attend"] = attend
    x = 30.0 * torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(4))
    attention(x, AttentionContext(mask=None, is_causal=True, rotary=None))
    raw = (x @ attention.qkv.weight.T).unflatten(-1, (-1, 8))
    for found, rows in zip(seen, (raw[:, :, :4], raw[:, :, 4:6]), strict=True):
        expected = torch.empty_like(rows)
        for head in range(rows.shape[2]):
            vectors = rows[:, :, head].double()
            rms = ((vectors**2).sum(-1, keepdim=True) / 8 + 0.5) ** 0.5
            expected[:, :, head] = (vectors / rms * torch.linspace(0.5, 2.0, 8)).float()
        torch.testing.assert_close(found, expected.transpose(1, 2))
    logits = seen[0] @ seen[1].repeat_interleave(2, dim=1).mT / 8**0.5
    assert float(logits.detach().abs().max()) <= 8**0.5 * 2.0**2


def test_the_embedding_norm_is_the_layer_norm_of_the_embedding() -> None:
    made = build(STYLES["bloom"], vocabulary=VOCABULARY, sequence_length=LENGTH)
    initialise(made, seed=1)
    tokens = some_tokens(2, LENGTH)
    rows = made.embedding.weight[tokens].double()
    centred = rows - rows.mean(-1, keepdim=True)
    expected = centred / ((centred**2).mean(-1, keepdim=True) + 1e-5) ** 0.5
    entering: list[torch.Tensor] = []
    made.blocks[0].register_forward_pre_hook(lambda _, arguments: entering.append(arguments[0]))
    made(tokens)
    torch.testing.assert_close(entering[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_alibi_and_rotary_run_past_the_trained_length() -> None:
    for style in ("llama", "bloom"):
        made = build(STYLES[style], vocabulary=VOCABULARY, sequence_length=LENGTH)
        initialise(made, seed=1)
        assert made(some_tokens(1, 4 * LENGTH)).isfinite().all()


def test_learned_positions_end_with_a_clear_error() -> None:
    made = build(STYLES["gpt2"], vocabulary=VOCABULARY, sequence_length=LENGTH)
    with pytest.raises(BloomeryError, match="32 learned positions"):
        made(some_tokens(1, 2 * LENGTH + 1))
    cache = made.cache(batch=1, capacity=4 * LENGTH)
    made(some_tokens(1, 2 * LENGTH), cache=cache)
    with pytest.raises(BloomeryError, match="33 tokens do not fit a model with 32 learned positions") as told:
        made(some_tokens(1, 1), cache=cache)
    assert told.value.remedy == "Give a shorter prompt, or ask for fewer new tokens."


def test_products_widened_to_fp32_stay_within_a_rounding_of_bf16(decoder: Decoder) -> None:
    tokens = some_tokens(2, LENGTH)
    exact = decoder(tokens)
    narrow = decoder.bfloat16()
    set_matmul_mode(narrow, "fp32")
    hidden = narrow(tokens)
    assert hidden.dtype == torch.bfloat16
    assert ((hidden.float() - exact).norm() / exact.norm()).item() < 0.05
    narrow.logits(hidden).float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in narrow.parameters())


def test_a_published_model_is_built_on_meta_at_full_size() -> None:
    bloom = ModelSection(
        layers=70,
        hidden=14336,
        heads=112,
        norm="layernorm",
        position="alibi",
        activation="gelu_tanh",
        bias=True,
        tied=True,
        embedding_norm=True,
    )
    made = build(bloom, vocabulary=250_880, sequence_length=2048, device="meta")
    assert sum(parameter.numel() for parameter in made.parameters()) == 176_247_271_424
    assert made(torch.zeros(1, 8, dtype=torch.int64, device="meta")).shape == (1, 8, 14336)


def test_slopes_of_a_power_of_two_are_a_geometric_sequence_and_others_interleave() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    twelve = alibi_slopes(12).tolist()
    assert twelve[:8] == alibi_slopes(8).tolist()
    assert twelve[8:] == pytest.approx([2.0 ** (-k / 2) for k in (1, 3, 5, 7)])


def test_a_forward_brings_no_numbers_from_the_host_and_asks_for_none(decoder: Decoder) -> None:
    """Either makes the host wait for a GPU in each forward."""
    waits = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.item, torch.Tensor.tolist}
    waits |= {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.numpy}
    found = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function in waits:
                found.append(function)
            return function(*args, **(kwargs or {}))

    tokens = some_tokens(2, LENGTH)
    with Watch():
        sums = decoder.loss(decoder(tokens), tokens)
        sums.total.backward()
    assert found == []


def test_sizes_that_cannot_hold_the_data_are_refused_together() -> None:
    section = ModelSection(
        layers=1, hidden=8, heads=2, position="learned", norm="layernorm", vocabulary=10, max_positions=4
    )
    with pytest.raises(ConfigError) as refused:
        build(section, vocabulary=11, sequence_length=5)
    assert refused.value.mistakes == (
        Mistake(
            key="model.vocabulary",
            value=10,
            source="resolved recipe",
            problem="the tokenizer has 11 tokens",
            remedy="Set it to 'auto', or to 11 or more.",
        ),
        Mistake(
            key="model.max_positions",
            value=4,
            source="resolved recipe",
            problem="a sample has 5 tokens, and each needs its learned position",
            remedy="Set it to 'auto', or to 5 or more.",
        ),
    )
    assert build(section, vocabulary=10, sequence_length=4).model.max_positions == 4, "it just fits"


def test_an_embedding_adds_up_its_gradient_in_fp32() -> None:
    made = build(STYLES["llama"], vocabulary=VOCABULARY, sequence_length=LENGTH, dtype=torch.bfloat16)
    rows = made.embedding(torch.zeros(1000, dtype=torch.int64))
    (rows * 1.0).backward(torch.ones_like(rows))
    assert made.embedding.weight.grad[0, 0].item() == 1000.0  # in bf16, ones add up to 256 and no further


@pytest.mark.parametrize(("units", "others"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_products_are_native_where_the_processor_has_units_for_their_format(
    monkeypatch: pytest.MonkeyPatch, units: str, others: str
) -> None:
    monkeypatch.setattr(f"bloomery.torch_private.has_{units}_matmul", lambda: True)
    monkeypatch.setattr(f"bloomery.torch_private.has_{others}_matmul", lambda: False)
    formats, cpu = {"bf16": torch.bfloat16, "fp16": torch.float16}, torch.device("cpu")
    assert (
        matmul_mode_for(cpu, formats[units]) == "native" and matmul_mode_for(cpu, formats[others]) == "fp32"
    )
    assert matmul_mode_for(cpu, torch.float32) == "native"
    assert matmul_mode_for(torch.device("cuda"), formats[others]) == "native"


def test_positions_are_scaled_by_the_number_of_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    section = replace(STYLES["llama"], rope_scaling="dynamic", rope_factor=2.0)
    made = build(section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    initialise(made, seed=1)
    lengths: list[int] = []

    def table(*told: Any, length: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lengths.append(length)
        return rotary_table(*told, length=length, **more)

    monkeypatch.setattr(decoder_module, "rotary_table", table)
    cache = made.cache(batch=1, capacity=LENGTH + 8)
    with torch.no_grad():
        for count in (LENGTH, 3, 1):
            made(some_tokens(1, count), cache=cache)
    assert lengths == [LENGTH, LENGTH + 3, LENGTH + 4]


@pytest.mark.parametrize("style", ["llama", "bloom"])
@pytest.mark.parametrize(
    ("mode", "drops", "dtype"),
    [
        ("native", False, torch.bfloat16),
        ("fp32", False, torch.float32),
        ("native", True, torch.float32),
        ("fp32", True, torch.float32),
    ],
)
def test_a_mask_has_the_dtype_that_scores_are_computed_in(
    style: str, mode: Any, drops: bool, dtype: torch.dtype
) -> None:
    section = replace(STYLES[style], attention_dropout=0.5)
    made = build(section, vocabulary=VOCABULARY, sequence_length=LENGTH, dtype=torch.bfloat16)
    made.matmul_mode = mode
    context = made._attention_context(
        torch.zeros(1, LENGTH, section.hidden, dtype=torch.bfloat16),
        torch.arange(LENGTH),
        before=0,
        documents=torch.zeros(1, LENGTH, dtype=torch.int32),
        drops=drops,
    )
    assert context.mask is not None
    assert context.mask.dtype == (torch.bool if drops and style == "llama" else dtype)


def test_the_loss_of_a_decoder_is_cross_entropy_alone_unless_more_is_asked_for(decoder: Decoder) -> None:
    tokens = some_tokens(2, LENGTH)
    hidden = decoder(tokens)
    plain, both = decoder.loss(hidden, tokens), decoder.loss(hidden, tokens, z_loss=0.5)
    assert float(plain.z) == 0.0 < float(both.z)
    assert torch.equal(plain.total, plain.cross_entropy)


@pytest.mark.parametrize(
    ("style", "block", "held"),
    [
        ("gpt2", 0, {"embedding", "positions"}),
        ("gpt2", 1, set()),
        ("gpt2", 2, {"embedding", "final_norm"}),
        ("bloom", 0, {"embedding", "embedding_norm"}),
        ("bloom", 1, set()),
        ("llama", 0, {"embedding"}),
        ("llama", 2, {"head", "final_norm"}),
    ],
)
def test_embedding_positions_norms_and_head_are_where_a_stage_needs_them(
    style: str, block: int, held: set[str]
) -> None:
    section = replace(STYLES[style], layers=3)
    made = build(section, vocabulary=VOCABULARY, sequence_length=LENGTH, device="meta", blocks=[block])
    assert {name.partition(".")[0] for name, _ in made.named_parameters()} == held | {"blocks"}
    assert (made.embeds, made.finishes) == (block == 0, block == 2)


@pytest.mark.parametrize("held", [range(3), range(1, 3), range(1)])
def test_scores_are_biased_by_the_slopes_of_the_heads_that_a_rank_holds(held: range) -> None:
    made = build(STYLES["bloom"], vocabulary=VOCABULARY, sequence_length=LENGTH)
    made.heads = held
    context = made._attention_context(
        torch.zeros(1, 4, 24), torch.arange(4), before=0, documents=None, drops=False
    )
    assert context.mask is not None
    slopes = alibi_slopes(3).tolist()
    assert context.mask[0, :, 3, 1].tolist() == pytest.approx([-2.0 * slopes[head] for head in held])
