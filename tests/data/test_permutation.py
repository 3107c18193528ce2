"""The keyed permutation, against what a permutation is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data import native_kernels
from bloomery.data.order import derive_key, permute


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**70))
def test_every_key_permutes_range_n(n: int, seed: int) -> None:
    image = permute(np.arange(n), n, derive_key(seed))
    assert np.array_equal(np.sort(image), np.arange(n))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2**31, 2**62), seed=st.integers(0, 2**63), data=st.data())
def test_past_2_31_no_two_indices_meet_and_none_leaves_the_range(
    n: int, seed: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, n - 2000))
    index = np.concatenate([np.arange(start, start + 1000), np.arange(n - 1000, n)])
    image = permute(index, n, derive_key(seed))
    assert len(set(image.tolist())) == len(set(index.tolist()))
    assert image.min() >= 0 and image.max() < n


def test_a_key_for_each_element_gives_what_each_key_gives_alone() -> None:
    keys = derive_key(7, 3, np.arange(50))
    index = np.arange(50) % 13
    alone = [permute(index[i : i + 1], 13, keys[i : i + 1])[0] for i in range(50)]
    assert permute(index, 13, keys).tolist() == alone


def test_all_orders_of_a_small_range_are_equally_likely() -> None:
    draws = 24_000
    keys = derive_key(11, np.arange(draws))
    orders = Counter(zip(*(permute(np.full(draws, i), 4, keys).tolist() for i in range(4)), strict=True))
    chi_square = sum((count - 1000) ** 2 / 1000 for count in orders.values())
    assert len(orders) == 24 and chi_square < 60  # 23 degrees of freedom: 60 is one in 30,000


def test_neighbours_do_not_stay_neighbours() -> None:
    n = 100_000
    image = permute(np.arange(n), n, derive_key(5))
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(image)) == 1).sum() < 20


@pytest.mark.parametrize("n", [2048, 2049, 4096, 4097])
def test_native_and_numpy_permute_alike_where_the_number_of_rounds_changes(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, key = np.arange(n, dtype=np.int64), derive_key(7, n)
    by_native = permute(index, n, key)
    monkeypatch.setattr(native_kernels, "permute", lambda *arguments: False)
    assert np.array_equal(permute(index, n, key), by_native)
