"""Sets of samples as ranges, against Python's own sets."""

from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.position import (
    EVERYTHING,
    Position,
    SampleShare,
    fewer,
    first,
    from_pairs,
    lease,
    merged,
    to_pairs,
    total,
    within,
    without,
)

SETS = st.lists(
    st.builds(lambda start, count: range(start, start + count), st.integers(0, 40), st.integers(0, 6))
)


def samples(ranges):
    return [sample for piece in ranges for sample in piece]


@given(one=SETS, other=SETS)
def test_what_is_in_both_and_what_is_in_one_alone_is_as_of_sets(one, other):
    one, other = merged(one), merged(other)
    assert samples(within(one, other)) == sorted(set(samples(one)) & set(samples(other)))
    assert samples(without(one, other)) == sorted(set(samples(one)) - set(samples(other)))
    assert merged(without(one, other)) == without(one, other)


def test_many_ranges_against_as_many_cost_no_square_of_them():
    evens = tuple(range(4 * i, 4 * i + 1) for i in range(65_536))
    odds = tuple(range(4 * i + 2, 4 * i + 3) for i in range(65_536))
    assert within(evens, odds) == () and without(evens, odds) == evens
    assert total(within(evens, (range(0, 40),))) == 10


def test_the_smallest_gaps_are_bridged_where_ranges_are_too_many():
    ranges = (range(0, 3), range(5, 6), range(13, 20), range(21, 22), range(30, 40))
    assert fewer(ranges, 5) == fewer(ranges, 9) == ranges
    assert fewer(ranges, 4) == (range(0, 3), range(5, 6), range(13, 22), range(30, 40))
    assert fewer(ranges, 3) == (range(0, 6), range(13, 22), range(30, 40))
    assert fewer(ranges, 2) == (range(0, 22), range(30, 40))
    assert fewer(ranges, 1) == (range(0, 40),)


def test_the_first_samples_end_within_a_range_and_are_all_where_there_are_fewer():
    ranges = (range(2, 5), range(9, 11))
    assert first(ranges, 4) == (range(2, 5), range(9, 10)) and first(ranges, 3) == (range(2, 5),)
    assert first(ranges, 0) == () and first(ranges, 99) == ranges
    assert from_pairs(to_pairs(ranges)) == ranges and to_pairs(ranges) == [[2, 5], [9, 11]]


def test_who_may_take_everything_holds_no_sample_back():
    position = Position(consumed=10, holes=(range(3, 6),))
    shares, opened = lease(position, samples=[2, 3], outstanding=[EVERYTHING])
    assert [share.lease for share in shares] == [(range(3, 5),), (range(5, 6), range(13, 15))]
    assert opened.holes == (range(3, 6), range(13, 15)) and opened.consumed == 10
    (late,), _ = lease(opened, samples=[2], outstanding=[*shares, SampleShare(lease=())])
    assert late.lease == (range(15, 17),)
