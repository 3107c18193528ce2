"""The `bloomery` order: quotas, epochs and splits, in exact integers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data import native_kernels
from bloomery.data import order as order_module
from bloomery.data.fair_quotas import FairQuotas
from bloomery.data.mixture import BLOCK, Quotas
from bloomery.data.order import Order
from bloomery.errors import DataError

weights = st.lists(
    st.one_of(st.floats(1e-9, 1e3), st.floats(0.01, 1.0), st.just(0.0)), min_size=1, max_size=12
).filter(lambda drawn: sum(drawn) > 0)


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(1, 60), st.sampled_from([1, 2]))
def test_after_any_number_of_blocks_each_dataset_is_within_one_sample_of_its_share(
    drawn: list[float], blocks: int, rule: int
) -> None:
    quotas, whole = Quotas(drawn, rule=rule), sum(map(Fraction, drawn))
    before = np.zeros(len(drawn), dtype=np.int64)
    for block in range(1, blocks + 1):
        given_out = quotas.before(block)
        assert given_out.sum() == block * BLOCK and (given_out >= before).all()
        for count, weight in zip(given_out.tolist(), drawn, strict=True):
            # a share is rounded to 2**-46 of the mixture: nothing beside one sample
            assert abs(count - Fraction(weight) / whole * block * BLOCK) < 1 + Fraction(1, 2**20)
        before = given_out


@settings(max_examples=60, deadline=None)
@given(st.one_of(weights, st.lists(st.floats(1e-6, 1.0), min_size=46, max_size=46)), st.integers(0, 3000))
def test_each_block_by_itself_is_within_one_sample_of_its_quota(drawn: list[float], first: int) -> None:
    quotas = Quotas(drawn)
    exact = np.array([float(Fraction(weight) * BLOCK / sum(map(Fraction, drawn))) for weight in drawn])
    walked = np.array([quotas.before(block) for block in range(first, first + 40)])
    of_blocks = np.diff(walked, axis=0)
    assert (of_blocks.sum(axis=1) == BLOCK).all()
    assert (np.abs(of_blocks - exact) < 1 + 1e-6).all()


def test_datasets_that_want_most_of_a_place_each_block_are_served_on_time() -> None:
    # Deadlines alone do not tell these apart: without the rules for ties somebody comes too late.
    place = Fraction(1, BLOCK)
    heavy = [place * Fraction(*one) for one in ((3, 4), (2, 3), (1, 2), (7, 8), (1, 3), (9, 10), (1, 7))]
    drawn = [float(share) for share in [*heavy * 3, 1 - 3 * sum(heavy)]]
    quotas = Quotas(drawn)
    shares = np.array([Fraction(weight) * BLOCK / sum(map(Fraction, drawn)) for weight in drawn])
    for block in range(1, 500):
        behind = shares * block - quotas.before(block)
        assert (np.abs(behind.astype(float)) < 1 + 1e-6).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=8), st.integers(1, 8))
def test_few_small_weights_in_small_blocks_are_served_on_time_and_the_same_by_native_and_numpy(
    drawn: list[int], block: int
) -> None:
    # Small whole weights give equal deadlines, so that the rules for ties decide in nearly every block.
    weights, block, count = [float(weight) for weight in drawn], min(block, len(drawn)), 60
    native = [Quotas(weights, block=block).before(number) for number in range(1, count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_kernels, "_functions", dict)
        numpy = [Quotas(weights, block=block).before(number) for number in range(1, count)]
    for number, (one, other) in enumerate(zip(native, numpy, strict=True), 1):
        assert one.tolist() == other.tolist()
        due = np.array(drawn) * number * block / sum(drawn)
        assert (np.abs(one - due) < 1 + 1e-6).all()


def test_native_and_numpy_give_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_kernels._functions():
        pytest.skip("the native library is not built")
    shares = [0.3, 0.2, 0.17, 1e-5, 0.0, *[0.01] * 20, 3e-9]
    # Networks of six and of sixteen rounds, several epochs in a chunk, and one dataset beyond 32 bits.
    sizes = [10**6 + number if number % 3 else 37 + 500 * number for number in range(len(shares))]
    sizes[1] = 2**37 + 11
    span = (range(7 * BLOCK - 300, 8 * BLOCK + 200), range(2000 * BLOCK, 2000 * BLOCK + 50))

    def located() -> list[np.ndarray]:
        order = Order(sizes, shares, 2**70 + 9)
        return [*order.locate(span), order.given_before(9 * BLOCK + 5), Quotas(shares).before(1500)]

    quick = located()
    monkeypatch.setattr(native_kernels, "_functions", dict)
    for one, other in zip(quick, located(), strict=True):
        assert np.array_equal(one, other)


def test_quotas_do_not_depend_on_the_way_there() -> None:
    shares = [0.5, 0.3, 0.2, 1e-7]
    step_by_step = Quotas(shares)
    walked = [step_by_step.before(block).tolist() for block in range(1101)]
    jumping = Quotas(shares)
    for block in (1100, 1025, 1024, 1023, 0, 1099, 500):
        assert jumping.before(block).tolist() == walked[block]


def test_a_weight_of_zero_is_never_drawn_and_weights_of_nothing_are_refused() -> None:
    datasets, _ = Order([5, 5, 5], [1.0, 0.0, 2.0], 1).locate((range(0, 2 * BLOCK),))
    assert set(datasets.tolist()) == {0, 2}
    for none in ([0.0, 0.0], [-1.0, 2.0]):
        with pytest.raises(DataError, match="give no mixture"):
            Order([5, 5], none, 1)
    with pytest.raises(DataError, match=r"Dataset 1 .* no whole sample"):
        Order([5, 0], [1.0, 1.0], 1)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_one_dataset_gives_each_window_once_an_epoch(count: int) -> None:
    _, windows = Order([count], [1.0], 9).locate((range(0, 3 * count),))
    for epoch in windows.reshape(3, count):
        assert sorted(epoch.tolist()) == list(range(count))
    if count == 1000:
        assert (windows[:count] != windows[count : 2 * count]).any()


def test_in_a_mixture_no_window_is_more_than_one_occurrence_ahead_of_another_at_any_time() -> None:
    sizes = [3000, 100, 70_000]
    datasets, windows = Order(sizes, [0.3, 0.2, 0.5], 4).locate((range(0, 2 * BLOCK),))
    for until in (50, 777, 20_001, BLOCK + 5, 2 * BLOCK):
        for dataset, size in enumerate(sizes):
            seen = windows[:until][datasets[:until] == dataset]
            times = np.bincount(seen, minlength=size)
            assert times.max() - times.min() <= 1


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_split_of_a_span_locates_the_same_windows(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 2**40), min_size=1, max_size=5))
    order = Order(sizes, [1.0 / (i + 1) for i in range(len(sizes))], data.draw(st.integers(0, 2**64)))
    start = data.draw(st.integers(0, 5 * BLOCK))
    cuts = sorted(data.draw(st.lists(st.integers(0, 500), max_size=5)))
    edges = [start, *(start + cut for cut in cuts), start + 500]
    pieces = [range(a, b) for a, b in pairwise(edges)]
    whole = np.stack(order.locate((range(start, start + 500),)))
    assert np.array_equal(np.stack(order.locate(pieces)), whole)
    one_by_one = [np.stack(order.locate((piece,))) for piece in pieces]
    assert np.array_equal(np.concatenate(one_by_one, axis=1), whole)
    assert (whole[1] >= 0).all() and (whole[1] < np.array(sizes)[whole[0]]).all()


def test_the_order_is_exact_far_out() -> None:
    windows = 5 * 10**9  # 10**13 tokens of 2,048
    order = Order([windows], [1.0], 2)
    at = 3 * windows - 300
    _, last = order.locate((range(at, at + 300),))
    _, across = order.locate((range(at, at + 600),))
    assert len(set(last.tolist())) == 300 and np.array_equal(across[:300], last)
    assert not np.array_equal(across[300:], order.locate((range(0, 300),))[1])


def test_another_seed_is_another_order() -> None:
    one, other = (Order([1000, 10], [1.0, 1.0], seed).locate((range(0, 100),)) for seed in (1, 2))
    assert not np.array_equal(one[1], other[1])  # which dataset comes when follows from the weights alone


@settings(max_examples=8, deadline=None)
@given(
    at=st.integers(0, 2 * BLOCK),
    more=st.lists(st.integers(1, 3000), max_size=2),
    sizes=st.sampled_from([[900], [700, 40]]),
)
def test_a_changed_mixture_goes_on_where_each_dataset_was(at: int, more: list[int], sizes: list[int]) -> None:
    old = Order(sizes, [1.0] * len(sizes), 6)
    new = old.changed([*sizes, *more], [2.0, *[1.0] * (len(sizes) + len(more) - 1)], at=at)
    datasets, windows = new.locate((range(0, at + 5000),))
    assert np.array_equal(np.stack((datasets, windows))[:, :at], np.stack(old.locate((range(0, at),))))
    for sample in (0, at // 2, at, at + 777):
        counted = np.bincount(datasets[:sample], minlength=len(new.windows))
        assert new.given_before(sample).tolist() == counted.tolist()
    for dataset, size in enumerate(new.windows):  # epochs go through the change
        times = np.bincount(windows[datasets == dataset], minlength=size)
        assert times.max() - times.min() <= 1
    with pytest.raises(DataError, match="cannot become"):
        old.changed([sizes[0] + 1, *sizes[1:]], [1.0] * len(sizes), at=at)


def test_a_changed_mixture_of_a_run_with_an_end_spends_its_budgets_by_that_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    class Watched(FairQuotas):
        def __init__(self, shares: list[int], *, block: int, length: int) -> None:
            made.append(length)
            super().__init__(shares, block=block, length=length)

    monkeypatch.setattr(order_module, "FairQuotas", Watched)
    order = Order([100, 100], [0.5, 0.5], 7, rule=3, length=900)
    order.changed([100, 100], [0.2, 0.8], at=300, rule=3, length=1_000)
    assert made == [900, 1_000]


def test_blocks_of_the_second_rule_are_shuffled_otherwise_after_each_change() -> None:
    old = Order([500, 500], [1.0, 1.0], 3, rule=2)
    first, second = (
        old.changed([500, 500], [1.0, 1.0], at=at, rule=2).split(np.arange(at, at + 200))[0].tolist()
        for at in (1000, 3000)
    )
    assert first != second and abs(sum(first) - 100) < 40


def test_an_epoch_of_a_mixture_has_each_window_of_its_own_dataset_once() -> None:
    which, windows, epochs = Order([4, 9], [1.0, 2.0], 3).locate_epochs(np.arange(120))
    seen = Counter[tuple[int, int]]()
    for dataset, window, epoch in zip(which.tolist(), windows.tolist(), epochs.tolist(), strict=True):
        assert epoch == seen[dataset, window]
        seen[dataset, window] += 1
    assert {dataset for dataset, _ in seen} == {0, 1} and min(seen.values()) > 5
