"""Makes frozen dataclasses quickly: their methods are shared, and not generated for each class.

`dataclasses.dataclass` writes and compiles six methods for each class, about a millisecond's work. Whoever
reads a recipe loads some 30 such classes, and a plan as many again: that was a third of a plan's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # type checkers see what it stands for
else:

    def dataclass(
        *, frozen: Literal[True], kw_only: Literal[True], eq: bool = True
    ) -> Callable[[type], type]:
        """Make a class a frozen dataclass whose fields are given by name.

        eq: whether values are compared and hashed by their fields; else each is equal only to itself.

        `fields`, `replace`, `asdict`, equality, hash and text are those of `dataclasses.dataclass`.
        Raises TypeError for what is left out here: `__post_init__`, and fields that are left out of the
        constructor, the text, the hash or comparisons.
        """
        return partial(_make, eq=eq)


def _make(cls: type, *, eq: bool) -> type:
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
    fields = dataclasses.fields(made)
    is_plain = all(part.init and part.repr and part.compare and part.hash is None for part in fields)
    if not is_plain or hasattr(made, "__post_init__"):
        raise TypeError(f"{cls.__qualname__} needs dataclasses.dataclass: bloomery.frozen has less")
    made._field_names = frozenset(part.name for part in fields)
    made._values = attrgetter(*(part.name for part in fields))
    made._defaults = {part.name: part.default for part in fields if part.default is not dataclasses.MISSING}
    made._factories = {
        part.name: part.default_factory for part in fields if part.default_factory is not dataclasses.MISSING
    }
    shared = ["__init__", "__repr__", "__setattr__", "__delattr__"]
    for name in [*shared, "__eq__", "__hash__"] if eq else shared:
        if name not in cls.__dict__:
            setattr(made, name, vars(_Methods)[name])
    return cls


class _Methods:
    """The methods of the classes that `dataclass` makes."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _field_names: frozenset[str]
    _values: attrgetter[Any]
    """Returns the values of the fields: a tuple, or of a single field its value."""
    _defaults: dict[str, Any]
    _factories: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        values = self._defaults | given
        for name in self._factories.keys() - given.keys():
            values[name] = self._factories[name]()
        if values.keys() != self._field_names:
            raise TypeError(_wrong_names(type(self).__qualname__, self._field_names, values.keys()))
        self.__dict__.update(values)

    def __repr__(self) -> str:
        values = (f"{part.name}={getattr(self, part.name)!r}" for part in dataclasses.fields(self))
        return f"{type(self).__qualname__}({', '.join(values)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self is other or self._values(self) == self._values(other)

    def __hash__(self) -> int:
        return hash(self._values(self))

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _wrong_names(cls: str, declared: Set[str], given: Set[str]) -> str:
    unknown, missing = sorted(given - declared), sorted(declared - given)
    if unknown:
        return f"{cls}.__init__() got an unexpected keyword argument {unknown[0]!r}"
    return f"{cls}.__init__() missing required keyword-only arguments: {', '.join(map(repr, missing))}"
