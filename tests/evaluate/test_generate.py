from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.config.model import ModelSection
from bloomery.errors import BloomeryError
from bloomery.evaluate import generate as generate_module
from bloomery.evaluate.generate import Sampling, _default, _draw, _text, generate, generate_together
from bloomery.evaluate.open_checkpoint import must_load_by_block
from bloomery.model.decoder import Decoder, build
from bloomery.model.initial_filling import initialise
from bloomery.model.shape import resolve

EOD = 0
GREEDY = Sampling(temperature=0.0)


def small(position: str = "alibi") -> Decoder:
    section = ModelSection(layers=2, hidden=16, heads=2, ffn=24, position=position, init_std=0.5)
    decoder = build(section, vocabulary=30, sequence_length=8)
    initialise(decoder, seed=4)
    return decoder


def test_greedy_tokens_are_those_of_whole_forward_passes() -> None:
    decoder = small()  # and 20 tokens are well past its trained length
    drawn = list(generate(decoder, [99 % 30, 3, 4], max_new_tokens=20, sampling=GREEDY, ends={99 % 30}))
    seen = [99 % 30, 3, 4]
    for token in drawn:
        assert token == int(decoder.logits(decoder(torch.tensor([seen])))[0, -1].argmax())
        seen.append(token)
    assert len(drawn) == 20 or drawn[-1] == 99 % 30


def test_the_same_seed_writes_the_same_and_another_does_not() -> None:
    decoder = small()
    one, again, other = (
        list(
            generate(
                decoder, [29, 1], max_new_tokens=12, sampling=Sampling(temperature=2.0, seed=seed), ends={29}
            )
        )
        for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_it_ends_with_the_end_of_the_document() -> None:
    decoder = small()
    likeliest = next(generate(decoder, [7, 5], max_new_tokens=1, sampling=GREEDY, ends={7}))
    # With that token as the end, the first token drawn after the same context would end it.
    drawn = list(
        generate(
            decoder,
            [likeliest, 5],
            max_new_tokens=50,
            sampling=Sampling(temperature=5.0, seed=3),
            ends={likeliest},
        )
    )
    assert likeliest not in drawn[:-1]


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-6)])
def test_one_candidate_left_is_the_likeliest(sampling: Sampling) -> None:
    decoder = small()
    drawn = list(generate(decoder, [29, 5], max_new_tokens=8, sampling=sampling, ends={29}))
    assert drawn == list(generate(decoder, [29, 5], max_new_tokens=8, sampling=GREEDY, ends={29}))


def test_too_many_tokens_for_learned_positions_are_refused_before_the_first() -> None:
    decoder = small("learned")
    with pytest.raises(BloomeryError, match="8 learned positions") as refused:
        generate(decoder, [EOD, 1, 2], max_new_tokens=7, sampling=GREEDY, ends={EOD})
    assert "ask for fewer new tokens (--max-tokens)" in refused.value.remedy


def test_more_tokens_than_memory_holds_are_refused_before_the_first() -> None:
    with pytest.raises(BloomeryError, match="1 × 1,000,000,000,002 tokens take"):
        generate(small(), [1, 2], max_new_tokens=10**12, sampling=Sampling(), ends=())


def test_the_memory_of_all_texts_counts_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small()  # 2 tensors × 2 blocks × 16 channels × 4 bytes a token
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=3 * 10 * 256))
    assert (
        len(list(generate_together(decoder, [[1, 2]] * 3, max_new_tokens=8, sampling=GREEDY, ends=()))) == 8
    )
    with pytest.raises(BloomeryError, match="4 × 10 tokens take"):
        generate_together(decoder, [[1, 2]] * 4, max_new_tokens=8, sampling=GREEDY, ends=())


@pytest.mark.parametrize(
    ("dtype", "bytes_each"), [(torch.float32, 2 * 2 * 8 * 4), (torch.bfloat16, 2 * 2 * 8 * 2)], ids=str
)
def test_keys_and_values_take_as_much_as_their_heads_and_their_type(
    dtype: torch.dtype, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)
    decoder = build(section, vocabulary=30, sequence_length=8).to(dtype)
    for free, is_refused in ((10 * bytes_each, False), (10 * bytes_each - 1, True)):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: SimpleNamespace(available=free))
        if is_refused:
            with pytest.raises(BloomeryError, match="1 × 10 tokens take"):
                generate(decoder, [1, 2], max_new_tokens=8, sampling=GREEDY, ends=())
        else:
            generate(decoder, [1, 2], max_new_tokens=8, sampling=GREEDY, ends=())


def test_the_first_token_of_the_vocabulary_is_one_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([(0,), (7,), (0,), (None,)])
    monkeypatch.setattr(generate_module, "generate_together", lambda *told, **more: drawn)
    assert list(generate(small(), [1], max_new_tokens=4, sampling=GREEDY, ends=())) == [0, 7, 0]


def test_nothing_is_drawn_once_all_texts_have_ended() -> None:
    steps = list(generate_together(small(), [[1], [2]], max_new_tokens=6, sampling=GREEDY, ends=range(30)))
    assert len(steps) == 1 and None not in steps[0]


@pytest.mark.parametrize(
    "position", ["alibi", "rotary", "stretched", "stretched while it goes on", "learned"]
)
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1.5, top_k=9, seed=5)], ids=["likeliest", "drawn"]
)
def test_texts_of_several_lengths_together_are_those_of_each_alone(position: str, sampling: Sampling) -> None:
    section = ModelSection(layers=2, hidden=16, heads=2, ffn=24, init_std=0.5, max_positions=32)
    if position.startswith("stretched"):
        positions = 4 if position == "stretched" else 9
        section = replace(section, rope_scaling="dynamic", rope_factor=4.0, max_positions=positions)
    else:
        section = replace(section, position=position)
    decoder = build(section, vocabulary=30, sequence_length=8)
    initialise(decoder, seed=4)
    openings = [[29, 3], [29, 1, 2, 3, 4, 5, 6], [29], [29, 8, 8]]
    ends = {5, 11}
    texts: list[list[int]] = [[] for _ in openings]
    for tokens in generate_together(decoder, openings, max_new_tokens=12, sampling=sampling, ends=ends):
        for text, token in zip(texts, tokens, strict=True):
            if token is not None:
                text.append(token)
    alone = [
        list(
            generate(
                decoder,
                opening,
                max_new_tokens=12,
                sampling=replace(sampling, seed=sampling.seed + place),
                ends=ends,
            )
        )
        for place, opening in enumerate(openings)
    ]
    assert texts == alone
    assert len({len(text) for text in texts}) > 1 or all(len(text) == 12 for text in texts)


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(temperature=1.0), {3, 0, 2, 1}),
        (Sampling(temperature=1.0, top_k=2), {3, 0}),
        (Sampling(temperature=1.0, top_k=3), {3, 0, 2}),
        (Sampling(temperature=1.0, top_p=0.5), {3}),
        (Sampling(temperature=1.0, top_p=0.52), {3, 0}),
        (Sampling(temperature=1.0, top_p=0.81), {3, 0, 2}),
        (Sampling(temperature=0.01), {3}),
        (Sampling(temperature=0.0), {3}),
        (Sampling(temperature=2.0, top_p=0.64), {3, 0}),  # its share is less where all are more alike
    ],
)
def test_a_token_is_drawn_of_the_likeliest_that_reach_the_share(sampling: Sampling, drawn: set[int]) -> None:
    logits = torch.log(torch.tensor([0.29, 0.05, 0.15, 0.51]))
    generator = torch.Generator().manual_seed(1)
    assert {_draw(logits.clone(), sampling, generator) for _ in range(200)} == drawn


def test_a_share_near_one_leaves_out_what_is_beyond_it() -> None:
    logits, generator = torch.log(torch.tensor([0.6, 0.394, 0.006])), torch.Generator().manual_seed(1)
    sampling = Sampling(temperature=1.0, top_p=0.993)
    assert {_draw(logits.clone(), sampling, generator) for _ in range(500)} == {0, 1}


def test_where_nobody_chose_no_token_is_left_out_and_likelier_ones_are_likelier_still() -> None:
    assert Sampling() == Sampling(temperature=0.8, top_k=0, top_p=1.0, seed=0)


def test_of_two_that_are_as_likely_the_first_has_half() -> None:
    generator = torch.Generator().manual_seed(1)
    half, more = (Sampling(temperature=1.0, top_p=share) for share in (0.5, 0.51))
    assert {_draw(torch.zeros(2), half, generator) for _ in range(50)} == {0}
    assert {_draw(torch.zeros(2), more, generator) for _ in range(50)} == {0, 1}


def test_weights_that_leave_too_little_of_the_memory_are_read_block_by_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = ModelSection(layers=2, hidden=16, heads=2, ffn=24)
    model = resolve(section, vocabulary=30, sequence_length=8)
    parameters = 2 * 30 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16
    for itemsize, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        for free, is_too_large in (
            (parameters * itemsize / 0.8 + 1, False),
            (parameters * itemsize / 0.8 - 1, True),
        ):
            monkeypatch.setattr("psutil.virtual_memory", lambda free=free: SimpleNamespace(available=free))
            assert must_load_by_block(model, device=torch.device("cpu"), dtype=dtype) is is_too_large


def test_the_template_for_plain_conversations_is_taken_of_several() -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}, "odd"]
    assert (_default(named), _default("P"), _default(None), _default(named[:1])) == ("D", "P", "", "")
    assert (_text("<s>"), _text({"content": "</s>", "lstrip": True}), _text({})) == ("<s>", "</s>", "")


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1e-45), Sampling(temperature=1e-30), Sampling(top_p=1e-300)]
)
def test_the_least_temperature_and_share_leave_the_likeliest_token(sampling: Sampling) -> None:
    logits = torch.tensor([1.0, 9e3, 8.9e3, -2e4])
    assert _draw(logits, sampling, torch.Generator().manual_seed(0)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
    ],
    ids=str,
)
def test_settings_by_which_no_token_can_be_drawn_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BloomeryError, match="No token can be drawn with") as refused:
        Sampling(**wrong)
    assert "at least 0, and a top_p above 0 and at most 1" in refused.value.remedy
