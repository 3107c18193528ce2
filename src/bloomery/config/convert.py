"""Converts TOML values and values as a shell passes them to settings, strictly and with all mistakes at once.

Recipes are written back to TOML.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bloomery.config.find import nearest
from bloomery.config.recipe import Recipe
from bloomery.config.setting import LARGEST_COUNT, Setting, declaration_of, key_of
from bloomery.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class BadValue:
    """One value that cannot be used. key: its dotted place in the recipe."""

    key: str
    value: object
    problem: str
    remedy: str


class BadValues(Exception):
    """Raised when values of a table or an array cannot be used; `wrongs` holds each of them."""

    def __init__(self, wrongs: Iterable[BadValue]) -> None:
        super().__init__()
        self.wrongs = tuple(wrongs)


def convert_table(section: type, table: Any, key: str) -> dict[str, Any]:  # Any: parsed TOML
    """Return the constructor arguments of `section` from a TOML table.

    Raises BadValues with every mistake in the table, and for what is none.

    key: the table's dotted name, for messages.
    """
    if not isinstance(table, dict):
        remedy = f"Write [{key}] on its own line."
        raise BadValues([BadValue(key=key, value=table, problem="must be a table", remedy=remedy)])
    annotations = get_type_hints(section) if table else {}  # they take long to evaluate
    declared = {key_of(field): field for field in fields(section)}
    wrongs = [unknown_key(f"{key}.{name}", table[name], declared) for name in table if name not in declared]
    values: dict[str, Any] = {}
    for name, field in declared.items():
        if name not in table:
            if field.default is MISSING and field.default_factory is MISSING:
                wrongs.append(_missing(f"{key}.{name}", field))
            continue
        try:
            annotation = annotations[field.name]
            values[field.name] = convert(annotation, declaration_of(field), table[name], key=f"{key}.{name}")
        except BadValues as unusable:
            wrongs.extend(unusable.wrongs)
    if wrongs:
        raise BadValues(wrongs)
    return values


def convert(annotation: Any, known: Setting, value: Any, *, key: str) -> Any:
    """Return `value` as the type of `annotation`, within the bounds and choices of the setting `known`.

    An integer is accepted for a float; a bool is never accepted for a number. Raises BadValues.
    """
    if get_origin(annotation) is tuple:
        return _array(annotation, known, value, key)
    if is_dataclass(annotation) and isinstance(annotation, type):
        if not isinstance(value, dict):
            raise BadValues([_of_wrong_type(annotation, known, value, key)])
        return annotation(**convert_table(annotation, value, key))
    for alternative in alternatives(annotation):
        if alternative is float and type(value) in (int, float):
            return float(_bounded(_as_float(value), known, value, key))
        if alternative is int and type(value) is int:
            return _bounded(value, known, value, key)
        if alternative is str and type(value) is str:
            return _chosen(value, known, key)
        if alternative is bool and type(value) is bool:
            return value
        if get_origin(alternative) is Literal and type(value) is str and value in get_args(alternative):
            return value
    raise BadValues([_of_wrong_type(annotation, known, value, key)])


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def describe(annotation: Any, known: Setting) -> str:
    """Return what a setting takes, in words, such as `an integer ≥ 1 or 'auto'`."""
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            return f"a list of {_plural(inner[0], known)}"
        return "[" + ", ".join(_single(element, known) for element in inner) + "]"
    if is_dataclass(annotation):
        return "a table"
    return " or ".join(_single(alternative, known) for alternative in alternatives(annotation))


def unknown_key(key: str, value: object, declared: Iterable[str]) -> BadValue:
    """Return the mistake of an unknown key, with the most similar one of the `declared` names."""
    section, _, name = key.rpartition(".")
    near = nearest(name, declared, cutoff=0.6)
    remedy = f"Did you mean {section}.{near[0]}?" if near else f"[{section}] has: {', '.join(declared)}."
    return BadValue(key=key, value=value, problem="there is no such setting", remedy=remedy)


def _missing(key: str, field: Field[Any]) -> BadValue:
    section, _, name = key.rpartition(".")
    remedy = f"Add `{name} = …` to [{section}]: {declaration_of(field).help}"
    return BadValue(key=key, value=None, problem="is required and missing", remedy=remedy)


def _array(annotation: Any, known: Setting, value: Any, key: str) -> tuple[Any, ...]:
    inner = get_args(annotation)
    repeated = inner[-1] is Ellipsis
    if not isinstance(value, list) or (not repeated and len(value) != len(inner)):
        raise BadValues([_of_wrong_type(annotation, known, value, key)])
    converted: list[Any] = []
    wrongs: list[BadValue] = []
    for index, element in enumerate(value):
        inner_type = inner[0] if repeated else inner[index]
        try:
            converted.append(convert(inner_type, known, element, key=f"{key}[{index}]"))
        except BadValues as unusable:
            wrongs.extend(unusable.wrongs)
    if wrongs:
        raise BadValues(wrongs)
    return tuple(converted)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _bounded(number: float, known: Setting, value: object, key: str) -> float:
    least, most = known.minimum, known.maximum
    if isinstance(number, int):
        least = -LARGEST_COUNT if least is None else least
        most = LARGEST_COUNT if most is None else most
    if isinstance(number, float) and not math.isfinite(number):
        problem = "must be a finite number"
    elif known.above is not None and number <= known.above:
        problem = f"must be above {_digits(known.above)}"
    elif least is not None and number < least:
        problem = f"must be at least {_digits(least)}"
    elif most is not None and number > most:
        problem = f"must be at most {_digits(most)}"
    else:
        return number
    raise BadValues([BadValue(key=key, value=value, problem=problem, remedy=known.help)])


def _chosen(text: str, known: Setting, key: str) -> str:
    if not known.choices or text in known.choices:
        return text
    near = nearest(text, known.choices, cutoff=0.6)
    remedy = f"Did you mean '{near[0]}'? " if near else ""
    remedy += f"It takes {_quoted(known.choices)}."
    raise BadValues([BadValue(key=key, value=text, problem="is not one of the choices", remedy=remedy)])


def _of_wrong_type(annotation: Any, known: Setting, value: object, key: str) -> BadValue:
    remedy = known.help
    if type(value) is float and value.is_integer() and int in alternatives(annotation):
        remedy = f"Write {int(value):_}, without a point or an exponent."
    elif isinstance(value, str) and {int, float} & set(alternatives(annotation)) and _is_number(value):
        remedy = f"Write {value}, without quotes."
    problem = f"must be {describe(annotation, known)}, and is {_kind_of(value)}"
    return BadValue(key=key, value=value, problem=problem, remedy=remedy)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind_of(value: object) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a table" if isinstance(value, dict) else "a date or a time")


def _single(annotation: Any, known: Setting) -> str:
    if annotation is str:
        return f"one of {_quoted(known.choices)}" if known.choices else "text"
    if annotation is bool:
        return "true or false"
    if get_origin(annotation) is Literal:
        return _quoted(get_args(annotation))
    return ("an integer" if annotation is int else "a number") + _bounds(known)


def _plural(annotation: Any, known: Setting) -> str:
    names: dict[Any, str] = {str: "texts", int: "integers", float: "numbers"}
    if get_origin(annotation) is tuple:
        return describe(annotation, known)
    return names.get(annotation, "tables")


def _bounds(known: Setting) -> str:
    lower = f" ≥ {_digits(known.minimum)}" if known.minimum is not None else ""
    lower = f" > {_digits(known.above)}" if known.above is not None else lower
    upper = f" ≤ {_digits(known.maximum)}" if known.maximum is not None else ""
    return f"{lower} and{upper}" if lower and upper else lower + upper


def _digits(bound: float) -> str:
    """Return a bound as text: an integer with all its digits."""
    return f"{bound:_}" if isinstance(bound, int) else f"{bound:g}"


def _quoted(choices: Sequence[str]) -> str:
    return ", ".join(f"'{choice}'" for choice in choices)


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as TOML text with every setting; it loads back as an equal recipe."""
    sections = (_section(field.name, getattr(recipe, field.name)) for field in fields(recipe))
    return "\n".join("\n".join(lines) + "\n" for lines in sections)


def settings_of(recipe: Recipe) -> dict[str, str]:
    """Return every setting as TOML text, by its key `section.name`."""
    return {
        f"{section.name}.{key_of(field)}": toml_value(getattr(getattr(recipe, section.name), field.name))
        for section in fields(recipe)
        for field in fields(getattr(recipe, section.name))
    }


def toml_value(value: Any) -> str:
    """Return a setting's value as TOML text on one line; a section becomes an inline table."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(element) for element in value) + "]"
    entries = (f"{key_of(field)} = {toml_value(getattr(value, field.name))}" for field in fields(value))
    return "{ " + ", ".join(entries) + " }"


def _section(name: str, section: Any) -> Iterator[str]:
    yield f"[{name}]"
    tables: list[tuple[str, Any]] = []
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            tables += [(f"[[{name}.{field.name}]]", entry) for entry in value]
        else:
            yield f"{key_of(field)} = {toml_value(value)}"
    # After the section's own keys: a key below a table's header would belong to that table.
    for header, entry in tables:
        yield ""
        yield header
        yield from (f"{key_of(field)} = {toml_value(getattr(entry, field.name))}" for field in fields(entry))


_SEPARATOR = "separator"
_LINE_ENDS = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}


def override_value(section: type | None, name: str, text: str) -> Any:
    """Return the value of an override, parsed as TOML where it is TOML, else the bare text.

    A text setting takes the bare text (`run.name=7`), and a list of texts takes a single text
    (`data.sources=notes.txt`), because quotes within a shell's quotes are hard to write.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        parsed = {}
    bare = typed_separator(text) if name == _SEPARATOR else text.strip()
    value = parsed["value"] if list(parsed) == ["value"] else bare
    hints = get_type_hints(section) if section is not None else {}
    annotation = hints.get(name, hints.get(f"{name}_"))
    if annotation is not None and alternatives(annotation) == (str,) and not isinstance(value, str):
        return bare
    if annotation == tuple[str, ...] and isinstance(value, str):
        return [value]
    return value


def typed_separator(text: str) -> str:
    r"""Return a separator of documents with the line ends and tabs that `\n`, `\r` and `\t` in it stand for.

    No shell turns them into such within its quotes. Before a letter a backslash stays one: `\newpage`.
    """
    return re.sub(r"\\[nrt](?![A-Za-z])", lambda escape: _LINE_ENDS[escape.group()], text)
