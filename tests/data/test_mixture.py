"""What a checkpoint keeps of a mixture."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data import native_kernels
from bloomery.data.mixture import BLOCK, Mixture, Quotas, whole_shares
from bloomery.data.order import Order, order_through
from bloomery.data.position import Position
from bloomery.errors import DataError


@given(
    st.lists(st.tuples(st.integers(1, 2**40), st.floats(0, 1e3)), min_size=1, max_size=60).filter(
        lambda drawn: sum(weight for _, weight in drawn) > 0
    ),
    st.integers(0, 2**45),
)
def test_a_mixture_comes_back_from_its_json(drawn: list[tuple[int, float]], at: int) -> None:
    windows, weights = zip(*drawn, strict=True)
    mixture = Mixture.of(windows, weights, at=at)
    stored = json.loads(json.dumps(mixture.to_json()))
    assert Mixture.from_json(stored, windows=[*windows, 5]) == mixture
    assert whole_shares(mixture.shares) == list(mixture.shares)
    assert mixture.is_like(Mixture.of(windows, [weight * 4 for weight in weights]))


def test_a_mixture_saved_by_the_first_version_goes_on_by_its_rule() -> None:
    windows, weights = [4000, 100, 5000], [0.5, 0.1234, 0.3]
    mixture = Mixture.from_json({"at": 0, "windows": windows, "weights": weights}, windows=windows)
    assert mixture.rule == 1 and mixture.is_like(Mixture.of(windows, weights))
    order = order_through([mixture], 3)
    for block in range(1, 9):
        assert order.given_before(block * BLOCK).tolist() == Quotas(weights, rule=1).before(block).tolist()
    assert Mixture.from_json(mixture.to_json(), windows=windows) == mixture


@pytest.mark.parametrize("today", [[10, 21], [20, 10], [10]])
@pytest.mark.parametrize("first_version", [True, False])
def test_datasets_of_other_sizes_are_refused(today: list[int], first_version: bool) -> None:
    stored = Mixture.of([10, 20], [1, 2]).to_json()
    if first_version:
        stored = {"at": 0, "windows": [10, 20], "weights": [1.0, 2.0]}
    with pytest.raises(DataError, match="mixture is of 2 datasets with other numbers of samples"):
        Mixture.from_json(stored, windows=today)


def test_the_whole_data_state_of_46_datasets_and_16_ranges_is_below_a_kilobyte() -> None:
    draw = np.random.default_rng(1)
    mixture = Mixture.of(draw.integers(10**6, 10**9, 46).tolist(), draw.random(46).tolist())
    base = 5 * 10**9  # samples of 2,048 tokens: 10**13 tokens
    skips = tuple(range(base + 10**6 * i, base + 10**6 * i + 51_200) for i in range(16))
    position = Position(consumed=base - 77, skips=skips)
    state = {
        "position": position.to_json(),
        "data": {"fingerprint": "0" * 32, "mixtures": [mixture.to_json()]},
    }
    assert len(json.dumps(state)) < 1000


def test_the_order_of_a_mixture_is_that_of_its_weights() -> None:
    windows, weights = [4000, 100, 5000], [0.5, 0.1234, 0.3]
    span = (range(70_000, 70_400),)
    one = np.stack(order_through([Mixture.of(windows, weights)], 3).locate(span))
    assert np.array_equal(one, np.stack(Order(windows, weights, 3).locate(span)))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1, 1, 1], [4, 3, 3]),
        ([5, 3, 1], [6, 3, 1]),
        ([1e-9, 1.0], [1, 9]),  # what is above nothing gets something
        ([1e-9, 1e-9, 1.0], [1, 1, 8]),
        ([0, 1], [0, 10]),
        ([2, 8], [2, 8]),
        ([1, 2, 1], [3, 5, 2]),
    ],
)
def test_whole_shares_go_by_the_largest_remainders(weights: list[float], shares: list[int]) -> None:
    assert whole_shares(weights, share_sum=10) == shares


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1e-9]])
def test_weights_that_give_no_mixture_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="give no mixture"):
        whole_shares(weights)


def test_a_mixture_of_a_later_rule_is_refused_and_one_of_an_earlier_keeps_it() -> None:
    stored = Mixture.of([10, 20], [1, 2]).to_json()
    assert stored["rule"] == 3 and Mixture.from_json({**stored, "rule": 2}, windows=[10, 20]).rule == 2
    with pytest.raises(DataError, match="follows rule 4, and this version knows rules up to 3"):
        Mixture.from_json({**stored, "rule": 4}, windows=[10, 20])


def test_datasets_whose_budgets_are_spent_have_no_share_unless_all_have_one() -> None:
    mixture = replace(Mixture.of([10, 20, 30], [1, 2, 1], at=5), length=40, budgeted=(1,), demand="d")
    assert mixture.shares_after == (1 << 45, 0, 1 << 45)
    everyone = replace(mixture, budgeted=(0, 1, 2))
    assert everyone.shares_after == everyone.shares
    again = Mixture.from_json(json.loads(json.dumps(mixture.to_json())), windows=[10, 20, 30])
    assert again == mixture and (again.length, again.budgeted, again.demand, again.at) == (40, (1,), "d", 5)
    assert not mixture.is_like(Mixture.of([10, 20, 31], [1, 2, 1]))
    assert not mixture.is_like(Mixture.of([10, 20, 30], [1, 2, 2]))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("weights", "block"),
    [([1, 1, 1], 4), ([5, 3, 2, 1], 7), ([0.5, 0.26, 0.2, 0.04, 0.0], 9), ([31, 1, 1], 3)],
)
def test_by_rule_2_each_block_and_all_before_it_hold_shares_rounded_up_or_down(
    weights: list[float], block: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(native_kernels, "_functions", dict)
    quotas, due = Quotas(weights, rule=2, block=block), np.array(weights) / sum(weights) * block
    before = np.zeros(len(weights), dtype=np.int64)
    counts = [before]
    for number in range(1, 100):
        after = quotas.before(number)
        assert after.sum() == number * block
        assert (np.abs(after - number * due) < 1 + 1e-6).all() and (
            np.abs(after - before - due) < 1 + 1e-6
        ).all()
        before = after
        counts.append(after)
    assert quotas.before(70).tolist() == counts[70].tolist(), "an earlier block is walked to again"
    for dataset in range(len(weights)):
        for turn in (0, 5, 40):
            (within,) = [
                number
                for number in range(99)
                if counts[number][dataset] <= turn < counts[number + 1][dataset]
            ] or [None]
            assert quotas.block_of(dataset, turn, below=99) == within
            if within is not None:
                assert quotas.block_of(dataset, turn, below=within) is None
