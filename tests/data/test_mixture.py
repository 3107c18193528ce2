"""What a checkpoint keeps of a mixture."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
