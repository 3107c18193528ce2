"""Packing by best fit, against a slow one that looks at every sample for every piece."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.sample_layout import best_fit


def slow_rooms(lengths: list[int], capacity: int) -> list[int]:
    """What best fit leaves in each sample, sorted."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=120))))
def test_it_leaves_what_best_fit_leaves_and_packs_every_piece_once(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    packing = best_fit(np.bincount(lengths, minlength=capacity + 1), capacity=capacity)
    samples = np.arange(packing.sample_count)
    pieces = packing.pieces(samples)
    held = np.bincount(pieces.row, weights=pieces.length, minlength=samples.size).astype(int)
    assert sorted((capacity - held).tolist()) == slow_rooms(lengths, capacity)
    assert packing.filled(samples).tolist() == held.tolist()
    assert packing.empty_places == int((capacity - held).sum())
    each = [(length, rank) for length in range(1, capacity + 1) for rank in range(lengths.count(length))]
    assert sorted(zip(pieces.length.tolist(), pieces.rank.tolist(), strict=True)) == each
    for row in samples:  # pieces of a sample adjoin, from its first place on
        mine = pieces.row == row
        ends = np.cumsum(pieces.length[mine])
        assert pieces.column[mine].tolist() == (ends - pieces.length[mine]).tolist()


def test_a_sample_is_the_same_whoever_asks_for_it_and_with_which_others() -> None:
    packing = best_fit(np.array([0, 9, 14, 3, 8, 2, 1, 0, 5]), capacity=8)
    every = packing.pieces(np.arange(packing.sample_count))
    asked = np.array([5, 0, 5, packing.sample_count - 1])
    some = packing.pieces(asked)
    for row, sample in enumerate(asked):
        for name in ("column", "length", "rank"):
            ours, theirs = getattr(some, name)[some.row == row], getattr(every, name)[every.row == sample]
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("capacity", [512, 4096])
def test_its_table_grows_with_the_length_of_a_sample_and_not_with_the_documents(capacity: int) -> None:
    draw = np.random.default_rng(1)
    lengths = np.minimum(capacity, draw.lognormal(5, 1.2, 50_000).astype(int) + 1)
    counts = np.bincount(lengths, minlength=capacity + 1)
    few, many = (best_fit(counts * times, capacity=capacity) for times in (1, 10_000))
    bound = capacity * math.log2(capacity)
    assert len(few._fills) < bound and len(many._fills) < bound  # of half a billion documents
    assert many.sample_count < 1.001 * (counts * np.arange(capacity + 1)).sum() * 10_000 / capacity + 1
