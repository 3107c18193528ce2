"""Plans of loads: each wanted byte read once, and work that grows with the boxes, not with their square."""

import itertools
import sys
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.checkpoint.format.manifest import IndexedBox
from bloomery.checkpoint.format.state import Box
from bloomery.checkpoint.load import load_plan
from bloomery.checkpoint.load.load_plan import LoadPlan, WantedBox, plan_load

ITEM = 4


def stored(boxes: list[Box], shape: tuple[int, ...], *, files: int = 3) -> list[IndexedBox]:
    """Return the boxes as they would lie in files, one behind the other in each."""
    ends = [0] * files
    indexed = []
    for number, box in enumerate(boxes):
        begin = ends[number % files]
        ends[number % files] = begin + box.size * ITEM
        indexed.append(
            IndexedBox(
                name="model.a",
                dtype="float32",
                global_shape=shape,
                offset=box.offset,
                shape=box.shape,
                scope="shared",
                file=f"{number % files}.safetensors",
                begin=begin,
                end=ends[number % files],
            )
        )
    return indexed


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))))


def cut_flat(shape: tuple[int, int], pieces: int) -> list[list[Box]]:
    """Cut a matrix into equal runs of its row-major elements, as ZeRO does: up to three boxes a piece."""
    rows, columns = shape
    size = -(-rows * columns // pieces)
    cut = []
    for piece in range(pieces):
        first, stop, boxes = piece * size, min((piece + 1) * size, rows * columns), []
        while first < stop:
            row, column = divmod(first, columns)
            if column or stop - first < columns:
                length = min(columns - column, stop - first)
                boxes.append(Box((row, column), (1, length)))
            else:
                length = (stop - first) // columns * columns
                boxes.append(Box((row, 0), (length // columns, columns)))
            first += length
        cut.append(boxes)
    return cut


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))

    def box() -> Box:
        spans = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))

    saved = [box() for _ in range(draw(st.integers(0, 6)))]
    wanted = [[box() for _ in range(draw(st.integers(0, 3)))] for _ in range(draw(st.integers(1, 4)))]
    return shape, saved, wanted


@settings(max_examples=200, deadline=None)
@given(tensors(), st.sampled_from([4, 16, 1 << 20]), st.sampled_from([4, 1 << 20]))
def test_every_rank_gets_of_each_saved_box_what_it_wants_of_it(tensor, unit_bytes, deep_bytes):
    shape, saved, wanted = tensor
    boxes = stored(saved, shape)
    with _limits(unit_bytes, deep_bytes):
        plan = plan_load({"model.a": boxes}, [[WantedBox("model.a", box) for box in of] for of in wanted])
    received: Counter = Counter()
    units_of: Counter = Counter()
    for unit in plan.units:
        assert unit.round == units_of[unit.reader], "each rank reads its units in turn"
        units_of[unit.reader] += 1
        spans = [item.span for item in unit.items]
        assert len(spans) == 1 or sum(end - begin for begin, end in spans) <= unit_bytes
        assert spans == sorted(spans) and {item.saved.file for item in unit.items} == {unit.file}
        for item in unit.items:
            begin, end = item.span
            assert item.saved.begin <= begin and end <= item.saved.end
            assert end - begin == item.box.size * ITEM
            for destination in item.destinations:
                region = elements(destination.region)
                assert region <= elements(item.box) & elements(wanted[destination.rank][destination.wanted])
                received.update(
                    (destination.rank, destination.wanted, id(item.saved), place) for place in region
                )
    expected = Counter(
        (rank, number, id(box), place)
        for rank, of in enumerate(wanted)
        for number, want in enumerate(of)
        for box in boxes
        for place in elements(want) & elements(box.box)
    )
    assert received == expected
    assert plan.rounds == max(units_of.values(), default=0)
    places = [(unit.file, unit.items[0].span[0]) for unit in plan.units]
    assert places == sorted(places)


class _limits:
    """Plans with other sizes of units within the block, so that small tensors take every path."""

    def __init__(self, unit_bytes: int, deep_bytes: int) -> None:
        self._sizes = {"UNIT_BYTES": unit_bytes, "_DEEP_BYTES": deep_bytes}

    def __enter__(self) -> None:
        self._before = {name: getattr(load_plan, name) for name in self._sizes}
        for name, size in self._sizes.items():
            setattr(load_plan, name, size)

    def __exit__(self, *error: object) -> None:
        for name, size in self._before.items():
            setattr(load_plan, name, size)


def test_the_plan_of_a_rank_is_its_part_of_the_whole_plan():
    shape = (96, 64)
    boxes = stored([box for piece in cut_flat(shape, 24) for box in piece], shape, files=24)
    wanted = [[WantedBox("model.a", box) for box in piece] for piece in cut_flat(shape, 18)]
    whole = plan_load({"model.a": boxes}, wanted)
    assert len({unit.reader for unit in whole.units}) > 1
    for rank in range(18):
        part = plan_load({"model.a": boxes}, wanted, rank=rank)
        assert part == LoadPlan(
            rounds=whole.rounds,
            units=tuple(
                unit
                for unit in whole.units
                if unit.reader == rank
                or any(d.rank == rank for item in unit.items for d in item.destinations)
            ),
        )


def test_the_plan_of_a_rank_takes_few_calls_for_each_box_of_the_others():
    shape = (1024, 1000)
    boxes = stored([box for piece in cut_flat(shape, 384) for box in piece], shape, files=384)
    wanted = [[WantedBox("model.a", box) for box in piece] for piece in cut_flat(shape, 320)]
    calls = 0

    def seen(frame, event, argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(seen)
    try:
        plan_load({"model.a": boxes}, wanted, rank=0)
    finally:
        sys.setprofile(None)
    assert calls < 12 * len(boxes)


def test_planning_compares_each_box_with_its_neighbours_alone(monkeypatch):
    """384 ranks on either side: each with each would be 1.3 million comparisons."""
    compared = 0
    intersection = Box.intersection

    def counted(self: Box, other: Box) -> Box | None:
        nonlocal compared
        compared += 1
        return intersection(self, other)

    monkeypatch.setattr(Box, "intersection", counted)
    shape = (1024, 1000)
    before = [box for piece in cut_flat(shape, 384) for box in piece]
    after = cut_flat(shape, 320)
    boxes = stored(before, shape, files=384)
    wanted = [[WantedBox("model.a", box) for box in piece] for piece in after]
    plan = plan_load({"model.a": boxes}, wanted)
    assert sum(item.box.size for unit in plan.units for item in unit.items) == 1024 * 1000
    assert len(before) > 1000
    assert compared < 8 * (len(before) + sum(map(len, after)))
