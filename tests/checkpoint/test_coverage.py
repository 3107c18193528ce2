"""Boxes that fill their tensors exactly pass, and no others: held against a count of each element."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.checkpoint.format import coverage
from bloomery.checkpoint.format.coverage import check_coverage
from bloomery.checkpoint.format.manifest import IndexedBox
from bloomery.errors import CheckpointError


def indexed(name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> IndexedBox:
    return IndexedBox(
        name=name,
        dtype="int8",
        global_shape=shape,
        offset=offset,
        shape=size,
        scope="shared",
        file="f",
        begin=0,
        end=1,
    )


def cuts(shape: tuple[int, ...], draw) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into boxes, along one dimension after the other."""
    pieces = [((0,) * len(shape), shape)]
    for dim in range(len(shape)):
        for _ in range(draw(st.integers(0, 2))):
            offset, size = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
            at = draw(st.integers(0, size[dim]))
            for start, length in ((0, at), (at, size[dim] - at)):
                pieces.append(
                    (
                        (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]),
                        (*size[:dim], length, *size[dim + 1 :]),
                    )
                )
    return pieces


@st.composite
def checkpoints(draw) -> list[IndexedBox]:
    """Tensors of several numbers of dimensions, filled, or with one box moved, doubled or lost."""
    boxes = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        boxes += [indexed(name, shape, *piece) for piece in cuts(shape, draw)]
    match draw(st.sampled_from(["filled", "moved", "doubled", "lost"])):
        case "moved":
            number = draw(st.integers(0, len(boxes) - 1))
            item = boxes[number]
            offset = tuple(max(0, start + draw(st.integers(-1, 1))) for start in item.offset)
            boxes[number] = indexed(item.name, item.global_shape, offset, item.shape)
        case "doubled":
            boxes.append(draw(st.sampled_from(boxes)))
        case "lost":
            boxes.remove(draw(st.sampled_from(boxes)))
    return draw(st.permutations(boxes))


def elements(offset: tuple[int, ...], size: tuple[int, ...]) -> list[tuple[int, ...]]:
    spans = [range(start, start + length) for start, length in zip(offset, size, strict=True)]
    return list(itertools.product(*spans))


@settings(max_examples=120, deadline=None)
@given(checkpoints(), st.sampled_from([1, 3, 1 << 20]))
def test_each_element_of_each_tensor_lies_in_one_box(boxes, pairs_at_once):
    names = {item.name: item.global_shape for item in boxes}
    whole = Counter(
        (name, place) for name, shape in names.items() for place in elements((0,) * len(shape), shape)
    )
    saved = Counter((item.name, at) for item in boxes for at in elements(item.offset, item.shape))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(coverage, "_PAIRS_AT_ONCE", pairs_at_once)
        if saved == whole and all(item.is_within_tensor() for item in boxes):
            check_coverage(boxes)
        else:
            with pytest.raises(CheckpointError, match=r"not filled exactly|overlap"):
                check_coverage(boxes)


def test_boxes_that_overlap_are_found_in_whichever_group_of_pairs_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coverage, "_PAIRS_AT_ONCE", 1)
    columns = [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    check_coverage([indexed("a", (3, 4), place, (1, 2)) for place in columns])
    for number in (1, 3, 5):
        moved = [
            (row, 1) if place == number else (row, column) for place, (row, column) in enumerate(columns)
        ]
        with pytest.raises(CheckpointError, match="a has boxes that overlap"):
            check_coverage([indexed("a", (3, 4), place, (1, 2)) for place in moved])


def test_a_box_of_other_dimensions_is_refused():
    with pytest.raises(CheckpointError, match="a has a box of other dimensions"):
        check_coverage([indexed("a", (2, 2), (0, 0), (2, 2)), indexed("a", (2, 2), (0,), (0,))])


@pytest.mark.parametrize("change", [{"dtype": "int16"}, {"scope": "peer"}, {"global_shape": (3, 2)}], ids=str)
def test_ranks_that_declare_one_tensor_differently_are_refused(change: dict[str, object]):
    boxes = [indexed("a", (2, 2), (row, 0), (1, 2)) for row in range(2)]
    check_coverage(boxes)
    fields = {name: getattr(boxes[1], name) for name in boxes[1].__struct_fields__}
    other = IndexedBox(**{**fields, **change})
    said = "the checkpoint was not saved: a is declared differently by different ranks"
    with pytest.raises(CheckpointError) as refused:
        check_coverage([boxes[0], other])
    assert refused.value.message == said and "report it with the recipe" in refused.value.remedy


def test_what_is_wrong_is_told_by_the_tensor_that_has_it():
    good = indexed("good", (2, 2), (0, 0), (2, 2))
    lacking = indexed("lacking", (3, 2), (0, 0), (2, 2))
    with pytest.raises(CheckpointError, match=r"lacking of shape \(3, 2\) is not filled exactly"):
        check_coverage([good, lacking])
    doubled = [indexed("twice", (4,), (0,), (2,)), indexed("twice", (4,), (1,), (2,))]
    with pytest.raises(CheckpointError, match="twice has boxes that overlap"):
        check_coverage([indexed("fine", (2,), (0,), (2,)), *doubled])
    outside = [indexed("out", (4,), (0,), (2,)), indexed("out", (4,), (3,), (2,))]
    with pytest.raises(CheckpointError, match="out of shape"):
        check_coverage([good, *outside])
