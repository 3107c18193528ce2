"""Mixtures by rule 3: each dataset is within one sample of its share at every index."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data import native_kernels
from bloomery.data.fair_quotas import FairQuotas
from bloomery.data.mixture import BLOCK, Mixture, shares_to_end, whole_shares
from bloomery.data.order import Order, order_through
from bloomery.errors import DataError

weights = st.one_of(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.sampled_from([0, 1, 1, 50, 1e-3]), min_size=1, max_size=30).filter(any),
)
blocks = st.sampled_from([1, 2, 3, 8, 32, 200])


def laid_out(quotas: FairQuotas, count: int, *, numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(dataset, turn) of each sample of `count` blocks, which are asked for in the order of `numbers`."""
    parts = {number: quotas.samples_of(number) for number in numbers}
    return (
        np.concatenate([parts[number][0] for number in range(count)]),
        np.concatenate([parts[number][1] for number in range(count)]),
    )


def most_off(shares: list[int], datasets: np.ndarray) -> Fraction:
    """How many samples a dataset is off its share at worst, at any prefix: counted one by one, exactly."""
    index = np.arange(1, datasets.size + 1).astype(object)
    one, worst = sum(shares), 0
    for dataset, share in enumerate(shares):
        given_so_far = np.cumsum(datasets == dataset).astype(object)
        worst = max(worst, int(np.abs(given_so_far * one - share * index).max()))
    return Fraction(worst, one)


@settings(max_examples=60, deadline=None)
@given(weights, blocks, st.sampled_from([60, 46, 20]), st.integers(0, 900), st.randoms())
def test_at_every_index_each_dataset_is_within_one_sample_of_its_share(
    drawn: list[float], block: int, bits: int, length: int, random
) -> None:
    shares = whole_shares(drawn, share_sum=1 << bits)
    count = -(-(length or 900) // block)
    numbers = list(range(count))
    in_turn = laid_out(FairQuotas(shares, block=block, length=length), count, numbers=numbers)
    assert most_off(shares, in_turn[0]) < 1
    for dataset in range(len(shares)):
        turns = in_turn[1][in_turn[0] == dataset]
        assert np.array_equal(turns, np.arange(turns.size))
    random.shuffle(numbers)
    quotas = FairQuotas(shares, block=block, length=length)
    jumping = laid_out(quotas, count, numbers=numbers)
    assert all(np.array_equal(one, other) for one, other in zip(in_turn, jumping, strict=True))
    for dataset in {0, len(shares) - 1}:
        place = np.flatnonzero((in_turn[0] == dataset) & (in_turn[1] == 3))
        wanted = int(place[0]) // block if place.size else None
        assert quotas.block_of(dataset, 3, below=count) == wanted


@settings(max_examples=40, deadline=None)
@given(weights, blocks, st.sampled_from([60, 46, 20]), st.integers(0, 900))
def test_native_and_python_lay_out_the_same(drawn: list[float], block: int, bits: int, length: int) -> None:
    if not native_kernels._functions().get("fair_block"):
        pytest.skip("the native library is not built")
    shares, count = whole_shares(drawn, share_sum=1 << bits), -(-(length or 900) // block)
    native = laid_out(FairQuotas(shares, block=block, length=length), count, numbers=list(range(count)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_kernels, "_functions", dict)
        plain = laid_out(FairQuotas(shares, block=block, length=length), count, numbers=list(range(count)))
    assert all(np.array_equal(one, other) for one, other in zip(native, plain, strict=True))


def test_a_short_run_of_three_datasets_has_their_shares_at_each_of_its_samples() -> None:
    datasets, _ = Order([900, 900, 900], [0.5, 0.2, 0.3], 1234).locate((range(3_000),))
    for index in range(1, 3_001):
        counts = np.bincount(datasets[:index], minlength=3)
        assert (np.abs(counts - np.array([0.5, 0.2, 0.3]) * index) < 1 + 1e-9).all()


def test_far_out_native_and_python_agree_and_a_dataset_of_few_samples_a_run_is_on_time() -> None:
    if not native_kernels._functions().get("fair_block"):
        pytest.skip("the native library is not built")
    shares = whole_shares([0.3, 0.2, 0.17, 1e-5, 0.0, *[0.01] * 20, 3e-9])
    far = 1_100 * BLOCK

    def located() -> list[np.ndarray]:
        order = Order([10**6] * len(shares), shares, 5)
        return [*order.locate((range(far - 200, far + 200),)), order.given_before(far + 5)]

    native = located()
    for share, count in zip(shares, native[2].tolist(), strict=True):
        assert abs(Fraction(share, sum(shares)) * (far + 5) - count) < 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_kernels, "_functions", dict)
        assert all(np.array_equal(one, other) for one, other in zip(native, located(), strict=True))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=6),
    st.lists(st.floats(1e-4, 1.0), max_size=6),
    st.integers(1, 20_000),
)
def test_budgets_end_exactly_and_are_spent_evenly_on_the_way(
    budgets: list[int], others: list[float], rest: int
) -> None:
    rest = rest if others else 0
    samples = sum(budgets) + rest
    scale = Fraction(rest, 1) / sum(map(Fraction, others)) if others else Fraction(0)
    drawn = [*map(Fraction, budgets), *(Fraction(weight) * scale for weight in others)]
    shares = shares_to_end(whole_shares(drawn), samples=samples)
    quotas = FairQuotas(shares, block=BLOCK, length=samples)
    count = -(-samples // BLOCK)
    assert quotas.before(count)[: len(budgets)].tolist() == budgets
    datasets, _ = laid_out(quotas, count, numbers=list(range(count)))
    assert datasets.size == samples and most_off(shares, datasets) < 1
    for share, weight in zip(shares, drawn, strict=True):
        assert abs(Fraction(share, sum(shares)) * samples - weight) < Fraction(1, 2**20)


def test_a_checkpoint_of_an_earlier_rule_goes_on_by_it_and_one_of_a_later_rule_is_refused() -> None:
    windows, drawn = [4000, 100, 5000], [0.5, 0.1234, 0.3]
    stored = Mixture.of(windows, drawn).to_json()
    assert stored["rule"] == 3
    earlier = Mixture.from_json({**stored, "rule": 2}, windows=windows)
    span = (range(BLOCK - 200, BLOCK + 200),)
    by_rule_2 = Order(windows, earlier.shares, 3, rule=2).locate(span)
    assert np.array_equal(np.stack(order_through([earlier], 3).locate(span)), np.stack(by_rule_2))
    assert not np.array_equal(Order(windows, drawn, 3).locate(span)[0], by_rule_2[0])
    with pytest.raises(DataError, match="follows rule 4, and this version knows rules up to 3"):
        Mixture.from_json({**stored, "rule": 4}, windows=windows)
