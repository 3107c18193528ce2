"""Rotary positions and their scaling against plain formulas, and who sees whom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bloomery.config.model import ModelSection
from bloomery.model.attention import (
    KeyValueCache,
    positions_within,
    rotary_frequencies,
    rotary_table,
    rotate,
    visible,
)
from bloomery.model.shape import RopeScaling, resolve, scaling_of

CPU = torch.device("cpu")
WIDTH, THETA = 16, 10_000.0
SCALING = RopeScaling(
    kind="linear",
    factor=4.0,
    positions=4096,
    original_positions=1024,
    low_rotations=1.0,
    high_rotations=4.0,
    attention_factor=1.0,
)


def frequencies(kind: str | None = None, *, length: int = 0) -> list[float]:
    scaling = None if kind is None else replace(SCALING, kind=kind)
    found = rotary_frequencies(head_dim=WIDTH, theta=THETA, scaling=scaling, length=length, device=CPU)
    return found.tolist()


def plain(theta: float = THETA) -> list[float]:
    return [theta ** (-2 * pair / WIDTH) for pair in range(WIDTH // 2)]


def test_frequencies_fall_from_one_radian_by_equal_factors() -> None:
    assert frequencies() == pytest.approx(plain())
    assert frequencies("linear") == pytest.approx([one / 4 for one in plain()])


def test_dynamic_scaling_begins_where_the_context_ends() -> None:
    assert frequencies("dynamic", length=4096) == pytest.approx(plain())
    stretch = 4.0 * 8192 / 4096 - 3.0
    assert frequencies("dynamic", length=8192) == pytest.approx(
        plain(THETA * stretch ** (WIDTH / (WIDTH - 2)))
    )


def test_llama_3_keeps_what_turns_often_and_stretches_what_turns_seldom() -> None:
    expected = []
    for one in plain():
        turns = 1024 * one / (2 * math.pi)
        kept = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(kept * one + (1 - kept) * one / 4)
    assert frequencies("llama3") == pytest.approx(expected)
    assert sum(0.25 < found / one < 1.0 for found, one in zip(expected, plain(), strict=True)) >= 1


def test_yarn_is_a_ramp_over_the_channels_between_two_numbers_of_turns() -> None:
    def channel(turns: float) -> float:
        """Where a pair makes so many turns in the original context."""
        return WIDTH / 2 * math.log(1024 / (2 * math.pi * turns)) / math.log(THETA)

    first, last = math.floor(channel(4.0)), math.ceil(channel(1.0))
    assert 0 < first < last - 1 < WIDTH // 2 - 1
    shares = [min(max((pair - first) / (last - first), 0.0), 1.0) for pair in range(WIDTH // 2)]
    expected = [one * (1 - share) + one / 4 * share for one, share in zip(plain(), shares, strict=True)]
    assert frequencies("yarn") == pytest.approx(expected)


def test_yarn_of_a_short_context_begins_its_ramp_with_the_first_channel() -> None:
    short = replace(SCALING, kind="yarn", original_positions=16)  # no pair makes four turns in it
    found = rotary_frequencies(head_dim=WIDTH, theta=THETA, scaling=short, length=0, device=CPU).tolist()
    last = math.ceil(WIDTH / 2 * math.log(16 / (2 * math.pi)) / math.log(THETA))
    assert last == 1 and found == pytest.approx([1.0, *(one / 4 for one in plain()[1:])])
    shortest = replace(short, original_positions=6)  # where the ramp would end with its first channel
    found = rotary_frequencies(head_dim=WIDTH, theta=THETA, scaling=shortest, length=0, device=CPU).tolist()
    assert found == pytest.approx([1.0, *(one / 4 for one in plain()[1:])])


@pytest.mark.parametrize(("power", "last"), [(1.5, math.ceil(0.75 * WIDTH)), (3.0, WIDTH - 1)])
def test_yarn_of_a_long_context_ends_its_ramp_beyond_the_last_pair(power: float, last: int) -> None:
    """As in transformers, the ramp ends at the latest at the last channel, not at the last pair."""
    positions = int(2 * math.pi * THETA**power)
    long = replace(SCALING, kind="yarn", original_positions=positions)
    found = rotary_frequencies(head_dim=WIDTH, theta=THETA, scaling=long, length=0, device=CPU).tolist()
    first = math.floor(WIDTH / 2 * math.log(positions / (2 * math.pi * 4.0)) / math.log(THETA))
    shares = [min(max((pair - first) / (last - first), 0.0), 1.0) for pair in range(WIDTH // 2)]
    expected = [one * (1 - share) + one / 4 * share for one, share in zip(plain(), shares, strict=True)]
    assert found == pytest.approx(expected)


def test_the_same_distance_gives_the_same_product_wherever_it_is() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 1, 1, WIDTH, generator=generator, dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        table = rotary_table(torch.tensor([position]), head_dim=WIDTH, theta=THETA, dtype=torch.float64)
        return rotate(x, table)

    product = (at(query, 7) * at(key, 3)).sum()
    torch.testing.assert_close((at(query, 107) * at(key, 103)).sum(), product, rtol=0, atol=1e-4)
    assert abs(float((at(query, 8) * at(key, 3)).sum() - product)) > 1e-2
    torch.testing.assert_close(at(key, 50).norm(), key.norm(), rtol=1e-6, atol=0)
    assert torch.equal(at(key, 0), key)


def test_an_attention_factor_multiplies_cosines_and_sines() -> None:
    scaled = replace(SCALING, attention_factor=1.5)
    positions = torch.arange(9)
    for scaling, factor in ((SCALING, 1.0), (scaled, 1.5)):
        cosine, sine = rotary_table(
            positions, head_dim=WIDTH, theta=THETA, dtype=torch.float32, scaling=scaling
        )
        torch.testing.assert_close(cosine**2 + sine**2, torch.full((9, WIDTH // 2), factor**2))


def test_the_context_that_scaling_starts_from_is_the_models_unless_the_recipe_names_another() -> None:
    def scaling(**settings: object) -> RopeScaling | None:
        section = ModelSection(**{"layers": 1, "hidden": 32, "heads": 2, "max_positions": 512, **settings})  # type: ignore[arg-type]
        return scaling_of(resolve(section, vocabulary=64, sequence_length=128))

    assert scaling() is None
    model_wide = scaling(rope_scaling="linear", rope_factor=2.0)
    assert model_wide is not None and (model_wide.positions, model_wide.original_positions) == (512, 512)
    assert (model_wide.kind, model_wide.factor) == ("linear", 2.0)
    named = scaling(rope_scaling="yarn", rope_factor=2.0, rope_original_positions=256)
    assert named is not None and (named.positions, named.original_positions) == (512, 256)


def test_positions_begin_anew_with_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 5, 5, 5, 5, 5]])
    assert positions_within(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


def test_a_query_sees_itself_and_what_came_before_in_its_document() -> None:
    queries, keys = torch.arange(1, 3), torch.arange(4)
    assert visible(queries, keys, None)[0, 0].tolist() == [
        [True, True, False, False],
        [True, True, True, False],
    ]
    documents, every = torch.tensor([[0, 0, 1], [0, 1, 1]]), torch.arange(3)
    seen = visible(every, every, documents)[:, 0].int().tolist()
    assert seen == [[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]]


def test_a_cache_returns_all_it_was_given_and_refuses_more_than_it_holds() -> None:
    cache = KeyValueCache(
        blocks=2, batch=1, capacity=5, kv_heads=1, head_dim=2, device=CPU, dtype=torch.bfloat16
    )
    key, value = torch.randn(2, 1, 5, 1, 2, generator=torch.Generator().manual_seed(3)).bfloat16()
    for begin, end in ((0, 2), (2, 5)):
        for block in range(2):
            sign = 1 - 2 * block
            keys, values = cache.extended(block, sign * key[:, begin:end], value[:, begin:end])
            assert torch.equal(keys, sign * key[:, :end]) and torch.equal(values, value[:, :end])
            assert keys.dtype == values.dtype == torch.bfloat16
        cache.advance(end - begin)
    assert cache.length == cache.capacity == 5
    with pytest.raises(ValueError, match="a cache of 5 tokens was given 6"):
        cache.extended(0, key[:, :1], value[:, :1])
