"""Frozen dataclasses with shared methods behave as those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, asdict, field, fields, replace

import pytest

from bloomery import frozen
from bloomery.config.load import load_recipe


@frozen.dataclass(frozen=True, kw_only=True)
class Point:
    """A point."""

    x: int
    y: float = 0.5
    names: list[str] = field(default_factory=list)


@frozen.dataclass(frozen=True, kw_only=True)
class Named(Point):
    """A point with a name."""

    name: str = "a"

    def __hash__(self) -> int:
        return 7


@frozen.dataclass(frozen=True, kw_only=True)
class Single:
    """One field."""

    seconds: float


@frozen.dataclass(frozen=True, kw_only=True, eq=False)
class Identity:
    """Equal only to itself."""

    x: int = 1


def generated(name: str, *of: tuple, **options) -> type:
    """The same class as the standard library makes it."""
    return dataclasses.make_dataclass(name, of, frozen=True, kw_only=True, **options)


StandardPoint = generated(
    "Point", ("x", int), ("y", float, 0.5), ("names", list, field(default_factory=list))
)


def test_values_fields_and_texts_are_those_of_the_standard_library():
    mine, theirs = Point(x=1, names=["b"]), StandardPoint(x=1, names=["b"])
    assert asdict(mine) == asdict(theirs) == {"x": 1, "y": 0.5, "names": ["b"]}
    assert repr(mine) == repr(theirs)
    assert [part.name for part in fields(Named)] == ["x", "y", "names", "name"]
    assert replace(mine, y=2.0) == Point(x=1, y=2.0, names=["b"])
    assert Point(x=1).names is not Point(x=1).names
    assert Point.y == 0.5 and not hasattr(Point, "x")
    assert Named(x=1) == Named(x=1) and hash(Named(x=1)) == 7


def test_equality_and_hash_are_those_of_the_values():
    assert Point(x=1) == Point(x=1) and Point(x=1) != Point(x=1, y=3.0)
    assert Point(x=1) != StandardPoint(x=1) and Point(x=1) != Named(x=1)
    assert {Single(seconds=1.0), Single(seconds=1.0), Single(seconds=2.0)} == {
        Single(seconds=2.0), Single(seconds=1.0),
    }  # fmt: skip
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(x=1))
    assert Identity() != Identity() and len({Identity(), Identity()}) == 2


def test_a_value_does_not_change():
    point = Point(x=1)
    for change in (
        lambda: setattr(point, "x", 2),
        lambda: setattr(point, "z", 2),
        lambda: delattr(point, "x"),
    ):
        with pytest.raises(FrozenInstanceError):
            change()
    assert point.x == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "missing required keyword-only arguments: 'x'"),
        ({"x": 1, "z": 2}, "unexpected keyword argument 'z'"),
        ({"z": 2}, "unexpected keyword argument 'z'"),
    ],
)
def test_wrong_names_are_refused_and_named(given, message):
    with pytest.raises(TypeError, match=message):
        Point(**given)
    with pytest.raises(TypeError):
        Point(1)


def test_copies_in_this_process_and_another_are_equal():
    point = Point(x=1, names=["b"])
    for made in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert made == point and type(made) is Point
    recipe = load_recipe("demo").recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe and replace(recipe) == recipe


@pytest.mark.parametrize("option", ["init", "repr", "compare", "hash"])
def test_what_is_left_out_here_is_refused(option):
    given = field(default=1, **{option: False})
    with pytest.raises(TypeError, match=r"needs dataclasses\.dataclass"):
        frozen.dataclass(frozen=True, kw_only=True)(
            type("Part", (), {"__annotations__": {"x": int}, "x": given})
        )
    computes = {"__annotations__": {"x": int}, "__post_init__": lambda self: None}
    with pytest.raises(TypeError, match=r"needs dataclasses\.dataclass"):
        frozen.dataclass(frozen=True, kw_only=True)(type("Computed", (), computes))


def test_it_says_what_it_takes():
    with pytest.raises(TypeError):
        frozen.dataclass(frozen=True, kw_only=True, order=True)
