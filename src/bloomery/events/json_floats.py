"""Writes NaN and infinities, which JSON does not have, as texts, and reads them back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias, Union

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]

_TEXTS = {"NaN", "Infinity", "-Infinity"}


def as_json(value: object) -> Json:
    """Return `value` in a form that every JSON reader accepts: tuples as lists, non-finite floats as texts.

    The texts are "NaN", "Infinity" and "-Infinity", which `float()` of most languages reads back.
    Finite floats stay floats, and Python writes them so that they read back to the same bits.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else _text(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no place in a JSON record: {value!r}")


def as_float(value: object) -> float:
    """Return the number that `as_json` wrote, its texts included."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in _TEXTS:
        return float(value)
    raise ValueError(f"not a number: {value!r}")


def _text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
