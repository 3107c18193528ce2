"""Which rank reads which bytes of a load, in which units, by value: plans of a few boxes, looked at whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bloomery.checkpoint.format.manifest import BLOCK_BYTES, IndexedBox
from bloomery.checkpoint.format.state import Box, BoxOverlaps, all_overlaps
from bloomery.checkpoint.load import load_plan
from bloomery.checkpoint.load.load_plan import (
    Destination,
    LoadPlan,
    ReadItem,
    ReadUnit,
    WantedBox,
    _merged,
    _span,
    plan_load,
)
from bloomery.checkpoint.load.planned_spans import DistinctBox, PlannedSpans


def stored(rows: int, first: int = 0, *, file: str = "f", begin: int = 0, whole: int = 8) -> IndexedBox:
    """Rows of a tensor of bytes, two to a row."""
    return IndexedBox(
        name="a",
        dtype="int8",
        global_shape=(whole, 2),
        offset=(first, 0),
        shape=(rows, 2),
        scope="shared",
        file=file,
        begin=begin,
        end=begin + 2 * rows,
    )


def rows_of(start: int, stop: int) -> WantedBox:
    return WantedBox("a", Box((start, 0), (stop - start, 2)))


def readers_of(plan: LoadPlan) -> list[tuple[str, int, int]]:
    return [(unit.file, unit.reader, unit.round) for unit in plan.units]


FILES = [stored(2, 2 * number, file=f"f{number}", begin=10) for number in range(4)]


def test_the_reader_of_a_file_is_who_wants_it_and_has_the_least_to_read() -> None:
    everybody = [[rows_of(0, 8)]] * 3
    plan = plan_load({"a": FILES}, everybody)
    assert readers_of(plan) == [("f0", 0, 0), ("f1", 1, 0), ("f2", 2, 0), ("f3", 0, 1)] and plan.rounds == 2
    uneven = [[rows_of(0, 2)], [rows_of(0, 8)], []]
    assert readers_of(plan_load({"a": FILES}, uneven)) == [
        ("f0", 0, 0), ("f1", 1, 0), ("f2", 1, 1), ("f3", 1, 2)
    ]  # fmt: skip
    assert plan_load({"a": FILES}, [[], []]) == LoadPlan(units=(), rounds=0)
    assert plan_load({"b": FILES}, everybody) == LoadPlan(units=(), rounds=0)


def test_a_file_that_only_some_ranks_have_is_read_by_one_of_them() -> None:
    readers = {"f0": [2], "f1": [1, 0], "f2": [2, 1], "f3": [0]}
    wanted = [[rows_of(0, 4)], [rows_of(0, 8)], []]
    plan = plan_load({"a": FILES}, wanted, readers=readers)
    assert readers_of(plan) == [("f0", 2, 0), ("f1", 0, 0), ("f2", 1, 0), ("f3", 0, 1)]
    assert [[d.rank for item in unit.items for d in item.destinations] for unit in plan.units] == [
        [0, 1], [0, 1], [1], [1]
    ]  # fmt: skip
    third = plan_load({"a": FILES}, wanted, readers=readers, rank=2)
    assert third == LoadPlan(units=plan.units[:1], rounds=2), "it reads what it does not want itself"


def test_an_item_says_what_goes_where() -> None:
    saved = stored(4, 2, begin=100)
    plan = plan_load({"a": [saved]}, [[rows_of(0, 4)], [rows_of(7, 8), rows_of(3, 5)]])
    assert plan == LoadPlan(
        rounds=1,
        units=(
            ReadUnit(
                reader=0,
                file="f",
                round=0,
                items=(
                    ReadItem(
                        saved=saved,
                        box=Box((2, 0), (3, 2)),
                        destinations=(
                            Destination(rank=0, wanted=0, region=Box((2, 0), (2, 2))),
                            Destination(rank=1, wanted=1, region=Box((3, 0), (2, 2))),
                        ),
                    ),
                ),
            ),
        ),
    )
    assert plan.units[0].items[0].span == (100, 106)
    assert _span(stored(4, 2, begin=100), Box((4, 1), (1, 1))) == (105, 106)


def spans(*places: tuple[int, int, int]) -> PlannedSpans:
    """Spans of (file, begin, end)."""
    file, begin, end = (np.array(column, np.int64) for column in zip(*places, strict=True))
    none = np.zeros(len(places), np.int64)
    one = DistinctBox(Box((0,), (1,)), [(4, 0), (1, 2)])
    other = DistinctBox(Box((0,), (1,)), [(2, 0), (1, 0)])
    return PlannedSpans(
        saved=[], wanted_boxes=[one, other], boxes=[], file=file, begin=begin, end=end, source=none,
        first_row=none, stop_row=none, box=none, wanted=np.array([0, 1] * len(places)),
        wanted_stops=np.arange(2, 2 * len(places) + 2, 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("places", "units"),
    [
        ([(0, 0, 5), (0, 5, 10)], [(0, 2)]),
        ([(0, 0, 5), (0, 5, 11)], [(0, 1), (1, 2)]),
        ([(0, 0, 5), (1, 5, 10)], [(0, 1), (1, 2)]),
        ([(0, 0, 5), (0, 5 + BLOCK_BYTES, 10 + BLOCK_BYTES)], [(0, 2)]),
        ([(0, 0, 5), (0, 6 + BLOCK_BYTES, 10 + BLOCK_BYTES)], [(0, 1), (1, 2)]),
        ([(0, 0, 50), (0, 50, 100)], [(0, 1), (1, 2)]),
        ([(0, 0, 4), (0, 4, 8), (0, 8, 12), (0, 12, 14)], [(0, 2), (2, 4)]),
    ],
)
def test_a_unit_is_of_neighbours_and_as_large_as_asked(
    places: list[tuple[int, int, int]], units: list[tuple[int, int]]
) -> None:
    assert list(spans(*places).units(10)) == units


def test_all_who_want_something_of_a_unit_receive_it_once() -> None:
    planned = spans((0, 0, 5), (0, 5, 10), (0, 10, 12))
    assert planned.receivers(0, 2).tolist() == [1, 2, 4]
    assert [wanted.wanted_by for wanted in planned.wanted_of(1)] == [[(4, 0), (1, 2)], [(2, 0), (1, 0)]]


def test_what_is_wanted_of_a_row_that_is_too_large_is_read_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_plan, "_DEEP_BYTES", 1)
    saved: Any = stored(4)
    columns = [[WantedBox("a", Box((1, 1), (2, 1)))]]
    plan = plan_load({"a": [saved]}, columns)
    assert [item.box for unit in plan.units for item in unit.items] == [
        Box((1, 1), (1, 1)),
        Box((2, 1), (1, 1)),
    ]
    monkeypatch.setattr(load_plan, "_DEEP_BYTES", 2)
    plan = plan_load({"a": [saved]}, columns)
    assert [item.box for unit in plan.units for item in unit.items] == [Box((1, 0), (2, 2))]


def test_intervals_that_touch_are_one() -> None:
    assert _merged([(5, 7), (0, 2), (2, 3), (1, 2), (9, 9)]) == [(0, 3), (5, 7), (9, 9)]
    assert _merged([(0, 9), (2, 3)]) == [(0, 9)] and _merged([]) == []


def test_boxes_that_overlap_are_found_with_what_they_share() -> None:
    many = [Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((2, 2), (2, 2)), Box((4, 0), (0, 4))]
    found = list(BoxOverlaps(many).with_box(Box((1, 1), (2, 1))))
    assert found == [(many[0], Box((1, 1), (1, 1))), (many[1], Box((2, 1), (1, 1)))]
    assert list(BoxOverlaps(many).with_box(Box((4, 0), (1, 4)))) == []
    assert list(BoxOverlaps([]).with_box(Box((4, 0), (1, 4)))) == []
    assert list(BoxOverlaps([Box((), ())]).with_box(Box((), ()))) == [(Box((), ()), Box((), ()))]
    overlaps = all_overlaps(many, [Box((3, 0), (3, 4)), Box((0, 3), (3, 1)), Box((4, 0), (1, 1))])
    assert overlaps.saved.tolist() == [0, 1, 2]
    assert overlaps.stops.tolist() == [1, 2, 4]
    assert overlaps.wanted.tolist()[:2] == [1, 0] and sorted(overlaps.wanted.tolist()[2:]) == [0, 1]
    places = list(zip(overlaps.wanted.tolist(), overlaps.start.tolist(), overlaps.stop.tolist(), strict=True))
    assert places[:2] == [(1, 0, 2), (0, 3, 4)] and sorted(places[2:]) == [(0, 3, 4), (1, 2, 3)]
    alone = all_overlaps([Box((), ())] * 2, [Box((), ())] * 3)
    assert (alone.saved.tolist(), alone.wanted.tolist()) == ([0, 1], [0, 1, 2, 0, 1, 2])
    assert alone.stops.tolist() == [3, 6] and set(alone.start.tolist()) == {0}
    assert set(alone.stop.tolist()) == {1}


def test_boxes_are_compared_along_the_dimension_that_parts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Box((0, 2 * number), (8, 2)) for number in range(50)]
    compared, intersection = list[Box](), Box.intersection
    monkeypatch.setattr(
        Box, "intersection", lambda box, other: compared.append(box) or intersection(box, other)
    )
    found = [box for box, _ in BoxOverlaps(many).with_box(Box((3, 41), (1, 2)))]
    assert found == many[20:22] == compared
