"""What the decoder tells the kernels of attention, with attention written out in their place."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.attention_cases import written_out

from bloomery.config.model import ModelSection
from bloomery.kernels.available import has_triton
from bloomery.kernels.rules import Rules
from bloomery.model import attention, decoder
from bloomery.model.attention_choice import use_attention
from bloomery.model.dropout import ElementKeys, dropout_address
from bloomery.model.fused_attention import MOST_WIDTH, Visibility, document_ranges, supports_tiled_attention
from bloomery.model.initial_filling import initialise
from bloomery.plan.block_cost import WIDEST_TILED_HEAD

SECTION = ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, init_std=0.2)
TOKENS = torch.arange(24).view(2, 12)
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 8, [0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3]])


def test_the_ranges_of_documents_are_their_first_and_last_positions() -> None:
    starts, ends = document_ranges(DOCUMENTS)
    assert starts.tolist() == [[0] * 4 + [4] * 8, [0, 0, 2, 3, 3, 3, 3, 3, 3, 3, 10, 10]]
    assert ends.tolist() == [[3] * 4 + [11] * 8, [1, 1, 2, 9, 9, 9, 9, 9, 9, 9, 11, 11]]


def test_kernels_take_16_bits_on_gpus_alone() -> None:
    assert not supports_tiled_attention(torch.device("cpu"), torch.bfloat16, 64)
    assert not supports_tiled_attention(torch.device("cuda"), torch.float32, 64)
    assert not supports_tiled_attention(torch.device("cuda"), torch.bfloat16, 256)


@pytest.mark.parametrize("position", ["alibi", "rotary"])
def test_a_model_that_is_compiled_whole_for_a_cpu_asks_nothing_that_cannot_be_traced(position: str) -> None:
    section = replace(SECTION, position=position, kv_heads=4)
    model = decoder.build(section, vocabulary=24, sequence_length=12, dtype=torch.bfloat16)
    initialise(model, seed=1)
    has_triton.cache_clear()
    traced = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(traced(TOKENS, documents=DOCUMENTS), model(TOKENS, documents=DOCUMENTS))
    torch.compiler.reset()


def test_the_planner_knows_the_widest_head_that_kernels_take() -> None:
    assert WIDEST_TILED_HEAD == MOST_WIDTH


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have attention computed where kernels would, and count it."""
    calls: list[bool] = []

    def twin(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visibility: Visibility,
        *,
        keys: ElementKeys | None = None,
        rate: float = 0.0,
    ) -> torch.Tensor:
        calls.append(True)
        seen = {name: getattr(visibility, name) for name in ("starts", "ends", "slopes")}
        rows, columns = (None, None) if keys is None else (keys.rows, keys.columns)
        rules = Rules(**seen, row_keys=rows, column_keys=columns, rate=rate)
        return written_out(query.double(), key.double(), value.double(), rules).to(query.dtype)

    monkeypatch.setattr(attention, "tiled_attention", twin)
    return calls


@pytest.mark.parametrize("position", ["rotary", "alibi"])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_a_decoder_with_kernels_is_the_one_without(
    tiles: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    position: str,
    drops: bool,
    documents: torch.Tensor | None,
) -> None:
    section = replace(SECTION, position=position, attention_dropout=0.3)
    model = decoder.build(section, vocabulary=50, sequence_length=12)
    initialise(model, seed=1)
    address = None
    if drops:
        address = dropout_address(seed=3, step=1, samples=torch.arange(2), positions=range(12))
    expected = model(TOKENS, documents=documents, address=address)
    assert not tiles
    monkeypatch.setattr(decoder, "supports_tiled_attention", lambda *_: True)
    torch.testing.assert_close(
        model(TOKENS, documents=documents, address=address), expected, rtol=0, atol=2e-5
    )
    is_plain = position == "rotary" and documents is None and not drops
    assert len(tiles) == (0 if is_plain else 2)


def test_plain_attention_is_computed_by_tiles_where_that_was_chosen_and_can_be(
    tiles: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder.build(SECTION, vocabulary=50, sequence_length=12)
    initialise(model, seed=1)
    expected = model(TOKENS)
    use_attention(model, "triton")
    assert torch.equal(model(TOKENS), expected) and not tiles, "of fp32 there are no tiles"
    monkeypatch.setattr(decoder, "supports_tiled_attention", lambda *_: True)
    torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=2e-5)
    assert len(tiles) == 2
    use_attention(model, "flash")
    assert torch.equal(model(TOKENS), expected) and len(tiles) == 2


def test_a_prompt_fills_the_cache_where_kernels_compute_it(
    tiles: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder.build(replace(SECTION, position="alibi"), vocabulary=50, sequence_length=12)
    initialise(model, seed=1)
    with torch.no_grad():
        expected = model(TOKENS)
        monkeypatch.setattr(decoder, "supports_tiled_attention", lambda *_: True)
        cache = model.cache(batch=2, capacity=12)
        parts = [model(TOKENS[:, :8], cache=cache), model(TOKENS[:, 8:9], cache=cache)]
        parts += [model(TOKENS[:, 9:], cache=cache)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=2e-5)
    assert len(tiles) == 2


def test_the_largest_logits_are_measured_among_what_is_seen(
    tiles: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder.build(SECTION, vocabulary=50, sequence_length=12)
    initialise(model, seed=1)
    maxima = []
    for by_tiles in (False, True):
        monkeypatch.setattr(decoder, "supports_tiled_attention", lambda *_, answer=by_tiles: answer)
        for block in model.blocks:
            block.attention.logit_maxima = torch.zeros(4)
        model(TOKENS, documents=DOCUMENTS)
        maxima.append(torch.stack([block.attention.logit_maxima for block in model.blocks]))
    assert len(tiles) == 2 and maxima[0].min() > 0.0
    torch.testing.assert_close(*maxima, rtol=1e-5, atol=0)


def test_rows_of_several_lengths_are_masked_where_kernels_could_compute_those_of_one(
    tiles: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder.build(replace(SECTION, position="alibi"), vocabulary=50, sequence_length=12)
    initialise(model, seed=1)
    padding = torch.tensor([0, 5])
    with torch.no_grad():
        expected = model(TOKENS, cache=model.cache(batch=2, capacity=12, padding=padding))
        monkeypatch.setattr(decoder, "supports_tiled_attention", lambda *_: True)
        found = model(TOKENS, cache=model.cache(batch=2, capacity=12, padding=padding))
        alone = model(TOKENS[1:, 5:])
    assert torch.equal(found, expected) and len(tiles) == 2, "those of the lone row"
    torch.testing.assert_close(found[1:, 5:], alone, rtol=0, atol=2e-5)


def test_kernels_read_the_numbers_of_a_head_side_by_side_however_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[torch.Tensor] = []

    def forward(query, key, value, rules, mixed, log_partition, tiles) -> None:
        taken.extend((query, key, value))

    def backward(gradient, query, key, value, rules, mixed, log_partition, results, *, tiles) -> None:
        taken.extend((gradient, query, key, value))

    for name, kernel in (("", forward), ("_backward", backward)):
        module = SimpleNamespace(**{kernel.__name__: kernel})
        monkeypatch.setitem(sys.modules, f"bloomery.kernels.triton_attention{name}", module)
    heads = [torch.randn(1, 5, 16, 2).transpose(2, 3) for _ in range(4)]
    rules = (None, None, None, None, None)
    mixed, log_partition = torch.ops.bloomery.tiled_attention(*heads[1:], *rules, 0.0)
    torch.ops.bloomery.tiled_attention_backward(*heads, *rules, mixed, log_partition, 0.0)
    for own, given in zip(taken, (*heads[1:], *heads), strict=True):
        assert own.stride(-1) == 1 and torch.equal(own, given)
