"""Parses the lines of Megatron-style logs into numbers, all lines of one shape at once.

The shape of a line is what is left of it without digits, signs and spaces: the names of its fields, and words
for values that are no numbers. Lines of a log have few shapes, and lines of one shape have their numbers in
the same order, so that a few passes over all their bytes find every number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from numpy.typing import NDArray

FIELDS = (
    *("step", "loss", "learning_rate", "global_batch", "loss_scale"),
    *("gradient_norm", "shared_seconds", "consumed_samples", "refused"),
)
"""The columns of what `parsed_lines` returns."""
_NAMES = {
    "lm loss": ("loss", 1.0),
    "learning rate": ("learning_rate", 1.0),
    "lr": ("learning_rate", 1.0),
    "global batch size": ("global_batch", 1.0),
    "loss scale": ("loss_scale", 1.0),
    "grad norm": ("gradient_norm", 1.0),
    "gradient norm": ("gradient_norm", 1.0),
    "elapsed time per iteration (ms)": ("shared_seconds", 1e-3),
    "elapsed time per iteration ms": ("shared_seconds", 1e-3),
    "time per iteration ms": ("shared_seconds", 1e-3),
    "elapsed time per iteration (s)": ("shared_seconds", 1.0),
    "consumed samples": ("consumed_samples", 1.0),
    "consumed train samples": ("consumed_samples", 1.0),
    "number of skipped iterations": ("refused", 1.0),
}
"""(column, unit) of each field, by its name in lower case, with spaces for underscores and hyphens."""
_OTHER_LOSSES = ("loss", "train loss", "training loss", "total loss")
"""Names of the loss in lines that have no `lm loss`, the first of which counts."""
_SUFFIXES = {b"K": 1e3, b"M": 1e6, b"B": 1e9, b"G": 1e9, b"T": 1e12}
_PREPOSITIONS = frozenset(b"at from to of after before for until per each every in since".split())
"""`validation loss at iteration 100 | …` is no line of the training."""

_COLOURS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_SMALL_EXPONENT = re.compile(rb"(?<=[0-9.])e(?=[+-][0-9])")
# Not `iteration 1202026-11-05 10:00`, of a line into which another process wrote a line with a date.
_STEP = re.compile(rb"[Ii]teration[ \t:=]*(?=[0-9]+\.?[0-9]*(?![0-9.+E-]))")
_NUMBER = b"0123456789.+-E"
_VALUE = re.compile(rb"[ \t]*([+-]?[0-9.]+(?:E[+-]?[0-9]+)?)[ \t]*([KMBGT]?)(?![A-Za-z0-9.])")
_SEPARATORS = re.compile(rb"[,;\t]")
_TO_SPACES = bytes(byte if byte in _NUMBER or byte == 10 else 32 for byte in range(256))
_NOT_OF_A_SHAPE = _NUMBER + b" \t"
_FEW = 8

Numbers = NDArray[np.float64]


def parsed_lines(text: bytes) -> Numbers:
    """Return one row of `FIELDS` for each line of a training in `text`, NaN where a field is absent.

    text: whole lines. A line that reports a step and no loss is one whose loss is not a number. Left out are
        lines about an evaluation, and lines that another process tore into two.
    """
    alike = _all_alike(text)
    return _by_shape(_plain(text)) if alike is None else alike


def other_names_of_losses(text: bytes) -> list[str]:
    """Return the names in which `loss` occurs, of lines of a training that have no loss that is known.

    They stand as in the line, with the sign between name and value at the end.
    """
    names: set[bytes] = set()
    for line in _lines_of_training(_plain(text)):
        if not any(field.column == "loss" for field in _fields(line)):
            named = (part.partition(mark) for part, mark in _parts(line)[1:])
            names |= {
                name.lstrip() + mark
                for name, mark, _ in named
                if mark and "loss" in _name(name) and _name(name) not in _NAMES
            }
    return sorted(name.decode("utf-8", "replace") for name in names)


def loss_in_no_field(text: bytes) -> str:
    """Return the first line of a training whose loss is no field of its own; "" where there is none.

    In `iteration 5 loss 3.2` nothing divides the fields; in `iteration 5 | loss 3.2` nothing ends the name.
    """
    for line in _lines_of_training(_plain(text)):
        is_loose = any(
            b"loss" in part.lower() and (place == 0 or mark not in part)
            for place, (part, mark) in enumerate(_parts(line))
        )
        if is_loose and not any(field.column == "loss" for field in _fields(line)):
            return line.decode("utf-8", "replace").strip()
    return ""


@dataclass(frozen=True, kw_only=True)
class _Field:
    """A field of a line.

    name: in lower case, with spaces between words.
    column: of FIELDS; "" where the name is not known.
    token: the index of its value among the numbers of the line; None where the value is no number.
    value: the value in the column's unit.
    factor: what the number in the line is multiplied by.
    """

    name: str
    column: str
    token: int | None
    value: float
    factor: float


def _plain(text: bytes) -> bytes:
    """Return text without colours, with one kind of line end, and with E in exponents."""
    if b"\x1b" in text:
        text = _COLOURS.sub(b"", text)
    if b"\r" in text:  # of Windows, or of a progress bar that is drawn again and again
        text = text.replace(b"\r", b"\n")
    if b"e-" in text or b"e+" in text:
        text = _SMALL_EXPONENT.sub(b"E", text)
    return text


def _all_alike(text: bytes) -> Numbers | None:
    """Parse lines that are all of one shape, as those of many logs are; None for others."""
    first, _, _ = text.partition(b"\n")
    found = _STEP.search(first)
    # Colours and small exponents are of the shape: where the first line has none, no line has.
    if found is None or _is_about(first[: found.start()]) or _plain(first) != first:
        return None
    shape, count = _shape(first) + b"\n", text.count(b"\n")
    if not text.endswith(b"\n") or _shape(text) != shape * count:
        return None
    before = len(first[: found.start()].translate(_TO_SPACES).split())
    return _table(text, _fields(first[found.start() :]), count=count, before=before)


def _by_shape(text: bytes) -> Numbers:
    """Parse a log whose training lines have several forms, as where its format changed, among other lines."""
    lines = _lines_of_training(text)
    shapes: dict[bytes, list[int]] = {}
    for index, line in enumerate(lines):
        shapes.setdefault(_shape(line), []).append(index)
    ends = Counter[bytes]()
    for shape, places in shapes.items():
        ends[_end(shape)] += len(places)
    usual, count = ends.most_common(1)[0] if ends else (b"", 0)
    table, is_whole = np.full((len(lines), len(FIELDS)), nan), np.ones(len(lines), dtype=bool)
    for shape, places in shapes.items():
        table[places] = _of_one_shape([lines[place] for place in places])
        if 2 * count > len(lines) and _end(shape) != usual:
            # A line of another make has a loss; one that was torn has none, or one that may be cut off.
            has_bar = shape.endswith(b"|") or not usual.endswith(b"|")
            is_whole[places] = ~np.isnan(table[places, FIELDS.index("loss")]) & has_bar
    return table[is_whole]


def _end(shape: bytes) -> bytes:
    """Return the last field of a shape, with the bar after it."""
    return shape[shape.rstrip(b"|").rfind(b"|") + 1 :]


def _of_one_shape(lines: Sequence[bytes]) -> Numbers:
    if len(lines) >= _FEW:
        table = _table(b"\n".join(lines) + b"\n", _fields(lines[0]), count=len(lines))
        if table is not None:
            return table
    rows = [
        {field.column: field.value for field in reversed(_fields(line))}  # the first of a name counts
        for line in lines
    ]
    return np.array([[row.get(column, nan) for column in FIELDS] for row in rows])


def _lines_of_training(text: bytes) -> list[bytes]:
    """Return the lines that report a step, each from the word `iteration` on."""
    lines = []
    for line in text.split(b"\n"):
        if b"teration" in line and (b"|" in line or b"loss" in line):
            found = _STEP.search(line)
            if found is not None and not _is_about(line[: found.start()]):
                lines.append(line[found.start() :])
    return lines


def _is_about(before: bytes) -> bool:
    """Return whether a line is about an iteration and not of one, by the word before `iteration`."""
    words = before.split()
    return bool(words) and words[-1].lower() in _PREPOSITIONS


def _shape(text: bytes) -> bytes:
    return text.translate(None, _NOT_OF_A_SHAPE)


def _table(text: bytes, fields: Sequence[_Field], *, count: int, before: int = 0) -> Numbers | None:
    """Parse `count` lines of one shape at once; None where a line has other numbers than the first.

    fields: those of the first line.
    before: the numbers in front of the first field.
    """
    spaced = text.translate(_TO_SPACES)
    try:
        numbers = np.fromstring(spaced.decode("ascii"), sep=" ", dtype=np.float64)
    except ValueError:
        return None  # a sign or a point without a number
    marks = np.frombuffer(spaced, dtype=np.uint8)
    is_number = marks > 32
    places, ends = np.flatnonzero(is_number[1:] > is_number[:-1]) + 1, np.flatnonzero(marks == 10)
    if len(numbers) != len(places) or len(numbers) % count or len(ends) != count:
        return None
    numbers, by_line = numbers.reshape(count, -1), places.reshape(count, -1)
    if np.any(by_line[:, -1] > ends) or np.any(by_line[1:, 0] < ends[:-1]):
        return None
    table = np.full((count, len(FIELDS)), nan)
    for field in reversed(fields):  # the first of a name counts
        if field.column:
            of_line = field.value if field.token is None else numbers[:, before + field.token] * field.factor
            table[:, FIELDS.index(field.column)] = of_line
    return table


def _parts(line: bytes) -> list[tuple[bytes, bytes]]:
    """Return the parts of a line, each with the sign that separates its name from its value."""
    parts = line.split(b"|") if b"|" in line else _SEPARATORS.split(line)
    return [(part, b":" if b":" in part else b"=") for part in parts]


def _fields(line: bytes) -> list[_Field]:
    """Return the fields of a line that begins with the word `iteration`, the step first."""
    parts = _parts(_STEP.sub(b"iteration ", line, count=1))  # a tab before the step would divide them
    tokens = parts[0][0].translate(_TO_SPACES).split()
    fields, before = (
        [_Field(name="", column="step", token=0, value=float(tokens[0]), factor=1.0)],
        len(tokens),
    )
    for part, sign in parts[1:]:
        name, mark, value = part.partition(sign)
        if mark:
            own = len(name.translate(_TO_SPACES).split())
            fields.append(_field(_name(name), value, token=before + own))
        before += len(part.translate(_TO_SPACES).split())
    if not any(field.column == "loss" for field in fields):
        for known in _OTHER_LOSSES:
            for at, field in enumerate(fields):
                if field.name == known:
                    fields[at] = replace(field, column="loss")
                    return fields
    return fields


def _field(name: str, text: bytes, *, token: int) -> _Field:
    column, unit = _NAMES.get(name, ("", 1.0))
    value = _VALUE.match(text)
    if value is None:  # nan, inf, or a word
        return _Field(name=name, column=column, token=None, value=_float(text), factor=1.0)
    factor = unit * _SUFFIXES.get(value[2], 1.0)
    return _Field(name=name, column=column, token=token, value=_float(value[1]) * factor, factor=factor)


def _name(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").lower().replace("_", " ").replace("-", " ").split())


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return nan
