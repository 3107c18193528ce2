"""Where first epochs end, against counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.mixture import BLOCK
from bloomery.data.order import Order
from bloomery.data.stream import DatasetRow, ends_passed, epoch_ends, group_rows


def counted(order: Order | MegatronOrder, sizes: list[int], below: int) -> list[tuple[int, int]]:
    datasets, _ = order.locate((range(below),))
    found = []
    for dataset, size in enumerate(sizes):
        places = np.flatnonzero(datasets == dataset)
        if places.size >= size:
            found.append((dataset, int(places[size - 1]) + 1))
    return sorted(found, key=lambda end: end[1])


@settings(max_examples=25)
@given(st.data())
def test_an_epoch_ends_with_the_sample_that_completes_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 60_000), min_size=count, max_size=count))
    weights = data.draw(st.lists(st.floats(1e-5, 1.0), min_size=count, max_size=count))
    below = data.draw(st.integers(0, 3 * BLOCK))
    order = Order(sizes, weights, 3, rule=data.draw(st.integers(1, 3)))
    assert list(epoch_ends(order, below=below)) == counted(order, sizes, below)
    at = data.draw(st.integers(0, 2 * BLOCK))
    changed = order.changed([*sizes, 500], [*[0.5] * count, 0.1], at=at)
    assert list(epoch_ends(changed, below=below)) == counted(changed, [*sizes, 500], below)


@pytest.mark.parametrize("lengths", [[[40] * 50], [[40] * 50, [17] * 20, [90] * 9]])
def test_in_megatrons_order_it_is_the_sample_that_makes_it_as_many(lengths: list[list[int]]) -> None:
    arrays = [np.array(one, np.int32) for one in lengths]
    order = MegatronOrder(arrays, [0.4] * len(arrays), samples=700, sequence_length=16, seed=2)
    sizes = [(sum(one) - 1) // 16 for one in lengths]
    for below in (10, 90, 350, 700):
        assert list(epoch_ends(order, below=below)) == counted(order, sizes, below)


def test_far_ends_are_found_without_walking_every_sample() -> None:
    sizes = [10**8 + number for number in range(46)]
    ends = epoch_ends(Order(sizes, [1.0] * 46, 3), below=5 * 10**9)
    assert len(ends) == 46
    for dataset, sample in ends:
        assert abs(sample - sizes[dataset] * 46) <= BLOCK


def test_an_end_is_passed_by_the_step_that_reaches_it_and_by_no_later_one() -> None:
    assert ends_passed(((3, 100), (1, 250)), after=100, up_to=250) == ((1, 250),)


def test_an_end_is_passed_by_the_step_that_reaches_it_and_by_no_other() -> None:
    ends = ((1, 10), (0, 25))
    assert ends_passed(ends, after=0, up_to=9) == () == ends_passed(ends, after=10, up_to=24)
    assert ends_passed(ends, after=9, up_to=10) == ((1, 10),) and ends_passed(ends, after=9, up_to=25) == ends


def test_a_group_is_the_sum_of_its_datasets_and_its_epochs_are_those_of_its_tokens() -> None:
    def row(name: str, group: str, tokens: int, wanted: float, epochs: float) -> DatasetRow:
        return DatasetRow(
            name=name, group=group, tokens=tokens, wanted=wanted, delivered=wanted / 2, epochs=epochs,
            first_epoch_step=3,
        )  # fmt: skip

    rows = [row("a", "web", 300, 0.1, 1.0), row("b", "code", 50, 0.6, 4.0), row("c", "web", 100, 0.2, 5.0)]
    code, web = group_rows([*rows, row("d", "", 7, 0.1, 9.0)])
    assert (code.name, code.tokens, code.wanted, code.epochs) == ("code", 50, 0.6, 4.0)
    assert (web.name, web.tokens, web.epochs, web.first_epoch_step) == ("web", 400, 2.0, None)
    assert (web.wanted, web.delivered) == pytest.approx((0.3, 0.15))
