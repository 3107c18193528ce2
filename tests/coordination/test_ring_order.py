"""Rings against every order there is."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.coordination import attempts
from bloomery.coordination.attempts import hops, ring_order


def slowest(order, rates):
    return min((rates[one][two] for one, two in hops(order)), default=0.0)


@given(seed=st.integers(0, 2**32), count=st.integers(2, 6))
def test_no_order_has_a_faster_slowest_hop(seed, count):
    chance = random.Random(seed)
    names = "abcdef"[:count]
    rates = {one: {two: chance.choice((10.0, 20.0, 50.0)) for two in names if two != one} for one in names}
    order, dropped = ring_order(names, rates=rates)
    best = max(slowest(other, rates) for other in itertools.permutations(names))
    assert dropped == () and sorted(order) == list(names)
    assert slowest(order, rates) == best


@given(seed=st.integers(0, 2**32), count=st.integers(2, 7))
def test_a_broken_link_is_avoided_where_an_order_avoids_it_and_else_the_worst_goes(seed, count):
    chance = random.Random(seed)
    names = "abcdefg"[:count]
    pairs = [frozenset(pair) for pair in itertools.combinations(names, 2)]
    broken = set(chance.sample(pairs, chance.randint(0, len(pairs))))
    order, dropped = ring_order(names, broken=broken)
    assert not any(frozenset(hop) in broken for hop in hops(order))
    assert sorted([*order, *dropped]) == list(names)
    avoidable = any(
        not any(frozenset(hop) in broken for hop in hops(other)) for other in itertools.permutations(names)
    )
    assert avoidable == (dropped == ())


@pytest.mark.parametrize("count", [8, 12, 24])
def test_a_large_ring_avoids_its_broken_links_and_its_slow_ones(count):
    names = [f"p{number:02d}" for number in range(count)]
    sites = {name: number % 2 for number, name in enumerate(names)}
    # Two sites whose names alternate: in the order of names every hop is a slow one; two have to be.
    rates = {
        one: {two: 1000.0 if sites[one] == sites[two] else 50.0 for two in names if two != one}
        for one in names
    }
    order, dropped = ring_order(names, rates=rates, broken={frozenset(names[:2])})
    assert dropped == () and frozenset(names[:2]) not in map(frozenset, hops(order))
    assert sum(sites[one] != sites[two] for one, two in hops(order)) == 2


def test_without_measurements_the_order_is_that_of_names():
    assert ring_order("cab") == (("a", "b", "c"), ())
    assert ring_order("a") == (("a",), ())
    assert ring_order("ba", broken={frozenset("ab")}) == (("a",), ("b",))


def test_what_is_known_of_others_than_the_members_of_a_ring_changes_nothing():
    rates = {"a": {"b": 5.0, "c": 9.0, "z": 50.0}, "b": {"c": 9.0}, "c": {"a": 9.0}, "z": {"a": 1.0}}
    assert ring_order("abc", rates=rates, broken={frozenset("az"), frozenset("a")}) == (("a", "b", "c"), ())


def test_the_member_with_most_broken_links_to_those_who_are_left_goes_and_of_several_the_last_by_name():
    def broken(*pairs):
        return {frozenset(pair) for pair in pairs}

    assert ring_order("abcd", broken=broken("ba", "bc", "bd")) == (("a", "c", "d"), ("b",))
    assert ring_order("abce", broken=broken("ab", "ce", "ae")) == (("a", "c"), ("e", "b"))


def test_two_pieces_of_the_ring_change_places_or_one_is_reversed_where_that_helps():
    """Rates under which the order of the fastest links ends with a slow hop that only an exchange removes."""
    chance = random.Random(3)
    names = [f"p{number:02d}" for number in range(9)]
    for _ in range(20):
        rates = {
            one: {two: round(chance.uniform(10.0, 1000.0)) for two in names if two != one} for one in names
        }
        order, _ = ring_order(names, rates=rates)
        best = max(slowest((names[0], *rest), rates) for rest in itertools.permutations(names[1:]))
        assert slowest(order, rates) >= 0.9 * best


@pytest.mark.parametrize("count", [64, 500])
def test_the_search_for_the_order_of_many_members_is_bounded(count, monkeypatch):
    looked_at = []
    exchange = attempts._with_exchange
    monkeypatch.setattr(
        attempts, "_with_exchange", lambda table, path: looked_at.append(path) or exchange(table, path)
    )
    chance = random.Random(count)
    names = [f"p{number:03d}" for number in range(count)]
    rates = {one: {two: chance.uniform(10.0, 1000.0) for two in names if two != one} for one in names}
    order, dropped = ring_order(names, rates=rates)
    assert dropped == () and sorted(order) == names
    reachable = min(max(row.values()) for row in rates.values())  # nobody's slowest hop can be faster
    assert slowest(order, rates) > 0.95 * reachable
    assert 0 < len(looked_at) * count**2 <= 3 * 25_000_000
    asked = len(looked_at)
    assert ring_order(names, rates=rates) == (order, dropped) and len(looked_at) == asked  # remembered


@pytest.mark.parametrize(("size", "starts"), [(32, 13), (33, 3), (64, 3), (65, 1)])
def test_the_search_begins_from_fewer_orders_the_more_members_there_are(size, starts):
    rates = np.random.default_rng(size).random((size, size), np.float32)
    orders = list(attempts._starts(rates))
    assert len(orders) == starts and all(sorted(order) == list(range(size)) for order in orders)
