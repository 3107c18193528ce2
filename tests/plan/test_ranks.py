from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.config.parallel import ParallelSection
from bloomery.plan.ranks import OUTERMOST_FIRST, Degrees, degrees_of

degree = st.integers(1, 5)


@given(pipeline=degree, data=degree, tensor=degree)
def test_every_rank_has_one_place_and_every_place_one_rank(pipeline: int, data: int, tensor: int) -> None:
    degrees = Degrees(pipeline=pipeline, data=data, tensor=tensor)
    for rank in range(degrees.world):
        assert degrees.rank_at(**degrees.place(rank)) == rank
    for axis in OUTERMOST_FIRST:
        groups = degrees.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(degrees.world))
        assert {len(group) for group in groups} == {degrees.of(axis)}


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    degrees = Degrees(pipeline=12, data=8, tensor=4)  # BLOOM on 384
    assert degrees.along("tensor", 0) == (0, 1, 2, 3)
    assert degrees.along("data", 0) == tuple(range(0, 32, 4))
    assert degrees.along("pipeline", 0) == tuple(range(0, 384, 32))


def test_groups_are_made_once_each_and_come_by_their_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    along = Degrees.along
    monkeypatch.setattr(Degrees, "along", lambda own, axis, rank: made.append(rank) or along(own, axis, rank))
    groups = Degrees(pipeline=2, data=64, tensor=2).groups("data")
    assert made == [group[0] for group in groups] == [0, 1, 128, 129]  # for each rank it would be a square


@pytest.mark.parametrize(
    ("data", "world", "expected"),
    [("auto", 24, 3), (3, 24, 3), (2, 24, None), ("auto", 20, None), ("auto", 4, None), ("auto", 8, 1)],
)
def test_degrees_multiply_to_the_ranks_or_are_refused(
    data: int | str, world: int, expected: int | None
) -> None:
    found = degrees_of(ParallelSection(data=data, tensor=4, pipeline=2), world=world)
    assert (found and found.data) == expected


def test_neighbours_share_a_copy_and_ranks_with_the_same_part_of_it_lie_a_copy_apart() -> None:
    degrees = Degrees(pipeline=2, data=4, tensor=2, shard=2)
    assert degrees.shard_groups()[:2] == ((0, 2), (4, 6))
    assert degrees.replica_groups()[:2] == ((0, 4), (2, 6))
    for groups in (degrees.shard_groups(), degrees.replica_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(degrees.world))


@pytest.mark.parametrize(("zero", "shard_degree", "shard"), [(0, 2, 1), (1, 2, 2), (3, "auto", 4)])
def test_only_zero_shards_over_neighbours(zero: int, shard_degree: int | str, shard: int) -> None:
    parallel = ParallelSection(zero=zero, shard_degree=shard_degree, tensor=2)  # type: ignore[arg-type]
    found = degrees_of(parallel, world=8)
    assert found is not None and (found.shard or 1, found.data) == (shard, 4)
    assert degrees_of(ParallelSection(data=0), world=0) is None  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        found.place(8)
