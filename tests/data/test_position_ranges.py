"""Sets of samples as ranges, against Python's own sets."""

from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.position import merged, total, within, without

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
