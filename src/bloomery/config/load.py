"""Loads a recipe: its TOML text and the overrides of the command line become one `Recipe`, or one error.

The error lists every mistake with the line it is on. The TOML parser does not report the lines of keys, so
`line_numbers` finds them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from bloomery.config.begin_from import DescribeWeights, take_described
from bloomery.config.checkpoint import RETIRED
from bloomery.config.convert import (
    BadValue,
    BadValues,
    convert_table,
    dump_recipe,
    override_value,
    unknown_key,
)
from bloomery.config.find import find_recipe, nearest, whole_path
from bloomery.config.findings import shown_value
from bloomery.config.recipe import Recipe
from bloomery.config.setting import key_of
from bloomery.errors import ConfigError, Mistake
from bloomery.frozen import dataclass


def line_numbers(text: str) -> dict[str, int]:
    """Return the first line, counted from 1, of each table and key of a valid TOML text, by dotted key.

    Entries of arrays of tables are numbered, as in `data.datasets[0].path`.
    """
    lines_by_key: dict[str, int] = {}
    lines = text.replace("\r\n", "\n").split("\n")  # TOML's: `splitlines` ends a line within a text, too
    prefix: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    start = 0
    while start < len(lines):
        bare = lines[start].strip()
        if not bare or bare.startswith("#"):
            start += 1
            continue
        if bare.startswith("["):
            prefix = _open_table(bare, counts)
            _note(lines_by_key, prefix, start + 1)
            start += 1
            continue
        statement, end = _statement(lines, start)
        for path in _leaves(statement):
            _note(lines_by_key, prefix + path, start + 1)
        start = end
    return lines_by_key


def _open_table(header: str, counts: dict[str, int]) -> tuple[str, ...]:
    """Return the key path of a `[table]` or `[[table]]` header; an entry of an array is numbered."""
    parts: list[str] = []
    value: Any = tomllib.loads(header)
    while isinstance(value, dict) and value:
        (key, value), *_ = value.items()
        parts.append(key)
        dotted = ".".join(parts)
        if isinstance(value, list):
            counts[dotted] = counts.get(dotted, -1) + 1
            value = value[0]
        if dotted in counts:
            parts[-1] = f"{key}[{counts[dotted]}]"
    return tuple(parts)


_ENDS = ("]", '"""', "'''")
"""What ends a value of several lines, a list or a text."""


def _statement(lines: Sequence[str], start: int) -> tuple[Mapping[str, Any], int]:
    """Return the `key = value` that begins on a line, and the index of the line after it.

    The statement ends at the first line with which the text parses. After its first line only those are
    tried that can end one: parsing a list of thousands of lines at each of them would take minutes.
    """
    for end in range(start + 1, len(lines) + 1):
        if end > start + 1 and not any(mark in lines[end - 1] for mark in _ENDS):
            continue
        try:
            return tomllib.loads("\n".join(lines[start:end])), end
        except ValueError:
            continue
    return {}, start + 1


def _leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))


def _note(lines_by_key: dict[str, int], path: Sequence[str], line: int) -> None:
    dotted = ".".join(path)
    lines_by_key.setdefault(dotted, line)
    if dotted.endswith("]"):
        lines_by_key.setdefault(dotted[: dotted.rindex("[")], line)


__all__ = ["LoadedRecipe", "dump_recipe", "load_recipe", "override", "parse_recipe", "sections"]

_LENGTHS = ("steps", "samples", "tokens")
_DESCRIBED = ("model", "data")
"""The sections that the directory of `init.from` may complete."""
_SHARED_PLACES = (("control", "directory"), ("submit", "exclusions"))
"""Paths that other commands read from the run's record, wherever they run: the start makes them absolute."""
COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe.

    sources: where the value of each setting came from, by `section.name`.
    notes: sentences about settings that gave way to the command line.
    """

    recipe: Recipe
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()


def load_recipe(
    path_or_name: str, overrides: Sequence[str] = (), *, describe: DescribeWeights | None = None
) -> LoadedRecipe:
    """Read a recipe file, or a shipped recipe by name, and apply `section.key=value` overrides.

    describe: says what the directory of `init.from` holds, which completes the recipe; None does not ask.
    Raises ConfigError with all mistakes in single settings. `check_recipe` checks settings together.
    """
    path = find_recipe(path_or_name)
    label = f"{path_or_name}.toml" if path.name == f"{path_or_name}.toml" else path_or_name
    is_record = path.name == "recipe.toml" and path.with_name("sources.toml").exists()
    text = _read(path, label)
    return parse_recipe(text, overrides, label=label, is_record=is_record, describe=describe)


def parse_recipe(
    text: str,
    overrides: Sequence[str] = (),
    *,
    label: str,
    is_record: bool = False,
    describe: DescribeWeights | None = None,
) -> LoadedRecipe:
    """The recipe that a TOML text describes; `label` names the text in messages, as `label:line`.

    is_record: a run wrote it, perhaps of an earlier version: settings that are retired are left out, and
    nothing is taken from the directory of `init.from`, since the record is complete.
    describe: as in `load_recipe`.
    """
    raw = _parse(text, label, is_record=is_record)
    if is_record:
        _leave_out_retired(raw)
    places = {key: f"{label}:{line}" for key, line in line_numbers(text).items()}
    wrongs = _apply_overrides(raw, places, overrides)
    _make_places_absolute(raw)
    notes = (*_given_twice(overrides), *_take_typed_length(raw, places))
    sections_by_name = sections()
    wrongs += [_unknown_section(name, raw[name]) for name in raw if name not in sections_by_name]
    taken = describe is not None and not is_record and bool(_begins_from(raw))
    later = _DESCRIBED if taken else ()
    built, more = _built(raw, [name for name in sections_by_name if name not in later])
    wrongs += more
    if describe is not None and taken and not wrongs:  # mistakes of the recipe itself are reported first
        wrongs, of_weights = take_described(raw, places, describe(_begins_from(raw)))
        notes += of_weights
    if later and not wrongs:
        described, wrongs = _built(raw, later)
        built |= described
    if wrongs:
        raise ConfigError([_mistake(wrong, places, label) for wrong in wrongs])
    return LoadedRecipe(recipe=Recipe(**built), sources=_sources(places), notes=notes)


def _make_places_absolute(raw: Mapping[str, Any]) -> None:
    for section, name in _SHARED_PLACES:
        table = raw.get(section)
        if isinstance(table, dict) and isinstance(path := table.get(name), str) and path:
            table[name] = whole_path(path)


def _begins_from(raw: Mapping[str, Any]) -> str:
    """Return the directory that `init.from` names; '' for none, and for what is no text."""
    table = raw.get("init")
    place = table.get("from") if isinstance(table, dict) else None
    return place if isinstance(place, str) else ""


def _built(raw: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], list[BadValue]]:
    """Return the sections of these names, and what is wrong in the others."""
    built: dict[str, Any] = {}
    wrongs: list[BadValue] = []
    sections_by_name = sections()
    for name in names:
        try:
            values = convert_table(sections_by_name[name], raw.get(name, {}), name)
            built[name] = sections_by_name[name](**values)
        except BadValues as unusable:
            wrongs.extend(_retired(_in_another_section(wrong)) for wrong in unusable.wrongs)
    return built, wrongs


def override(recipe: Recipe, overrides: Sequence[str], *, source: str = COMMAND_LINE) -> Recipe:
    """Return the recipe with some settings replaced, checked as strictly as when it is loaded.

    overrides: `section.key=value` texts.
    source: where they came from, for the ConfigError that this raises.
    """
    try:
        return parse_recipe(dump_recipe(recipe), overrides, label="recipe").recipe
    except ConfigError as error:
        mistakes = [
            Mistake(
                key=mistake.key,
                value=mistake.value,
                source=source,
                problem=mistake.problem,
                remedy=mistake.remedy,
            )
            for mistake in error.mistakes
        ]
        raise ConfigError(mistakes) from None


@cache
def sections() -> Mapping[str, type]:
    """Return the dataclass of each section of a recipe by name, in the order of the reference page."""
    annotations = get_type_hints(Recipe)
    return {field.name: annotations[field.name] for field in fields(Recipe)}


def _read(path: Path, label: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as broken:
        problem, remedy = f"is not UTF-8 text (byte {broken.start})", "Save the file as UTF-8."
    except OSError as broken:
        problem, remedy = f"cannot be read: {broken.strerror}", "Check the file and its permissions."
    raise ConfigError([Mistake(key="recipe", value=label, source=str(path), problem=problem, remedy=remedy)])


def _parse(text: str, label: str, *, is_record: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as broken:
        message = str(broken)
    at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    source, problem = label, message
    if at:
        source, problem = f"{label}:{at[1]}", f"{message[: at.start()]} (column {at[2]})"
    remedy = "This is not TOML: text needs quotes, a table's name brackets; a key stands once in its table."
    if is_record:
        remedy = (
            "The run's journal has it whole: begin with a recipe of your own and this run's directory, "
            "`bloomery train RECIPE --run RUN`, and the start mends it, or refuses what differs."
        )
    raise ConfigError([Mistake(key="syntax", value=None, source=source, problem=problem, remedy=remedy)])


def _apply_overrides(raw: dict[str, Any], places: dict[str, str], overrides: Sequence[str]) -> list[BadValue]:
    """Write each override into the raw tables and note its source; returns those that are no settings."""
    wrongs: list[BadValue] = []
    sections_by_name = sections()
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and name and section):
            places[text] = COMMAND_LINE
            blanks = ", without blanks" if "=" in overrides else ""
            remedy = f"Write section.key=value{blanks}, for instance train.global_batch=16."
            wrongs.append(BadValue(key=text, value=None, problem="is not a setting", remedy=remedy))
            continue
        table = raw.setdefault(section, {})
        if isinstance(table, dict):
            for stale in [place for place in places if place.startswith(f"{section}.{name}[")]:
                del places[stale]
            table[name] = override_value(sections_by_name.get(section), name, value.strip(" "))
        places[f"{section}.{name}"] = COMMAND_LINE
        places.setdefault(section, COMMAND_LINE)
    return wrongs


def _given_twice(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each setting that the command line gives several values."""
    values: dict[str, list[str]] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        values.setdefault(key.strip(), []).append(value.strip())
    for key, given in values.items():
        if len(set(given)) > 1:
            last = shown_value(given[-1])
            yield f"{key} is given {len(given)} times on the command line; the last counts: {last}"


def _take_typed_length(raw: dict[str, Any], places: dict[str, str]) -> tuple[str, ...]:
    """Leave the recipe's length out if the command line gives another one, in other units; say so."""
    train = raw.get("train")
    if not isinstance(train, dict):
        return ()
    given = [name for name in _LENGTHS if train.get(name)]
    typed = [name for name in given if places.get(f"train.{name}") == COMMAND_LINE]
    if len(typed) != 1:
        return ()
    notes = []
    for name in given:
        if name != typed[0]:
            notes.append(
                f"train.{typed[0]} = {train[typed[0]]} of the command line takes the place of "
                f"train.{name} = {train[name]} ({places.get(f'train.{name}', DEFAULT)})"
            )
            train[name] = 0
            places[f"train.{name}"] = f"{COMMAND_LINE}: train.{typed[0]} takes its place"
    return tuple(notes)


def _unknown_section(name: str, value: object) -> BadValue:
    sections_by_name = sections()
    if not isinstance(value, dict):
        owners = [section for section, kind in sections_by_name.items() if name in _names(kind)]
        remedy = (
            f"Put it under [{owners[0]}]."
            if owners
            else f"Put settings under one of {_tables(sections_by_name)}."
        )
        return BadValue(key=name, value=value, problem="stands in no section", remedy=remedy)
    near = nearest(name, sections_by_name, cutoff=0.6)
    remedy = f"Did you mean [{near[0]}]?" if near else f"There are {_tables(sections_by_name)}."
    return BadValue(key=name, value=None, problem="there is no such section", remedy=remedy)


def _in_another_section(wrong: BadValue) -> BadValue:
    """Return the mistake with another remedy where the unknown key exists in another section."""
    section, _, name = wrong.key.partition(".")
    if wrong != unknown_key(wrong.key, wrong.value, _names(sections()[section])):
        return wrong
    owners = [other for other, kind in sections().items() if name in _names(kind)]
    if not owners:
        return wrong
    remedy = f"It belongs to {_tables(owners)}: write {owners[0]}.{name}."
    return BadValue(key=wrong.key, value=wrong.value, problem=wrong.problem, remedy=remedy)


def _leave_out_retired(raw: dict[str, Any]) -> None:
    for key in RETIRED:
        section, _, name = key.partition(".")
        if isinstance(raw.get(section), dict):
            raw[section].pop(name, None)


def _retired(wrong: BadValue) -> BadValue:
    """A setting that an earlier version had: say what to write instead."""
    if wrong.key not in RETIRED:
        return wrong
    return BadValue(
        key=wrong.key, value=wrong.value, problem="is no longer a setting", remedy=RETIRED[wrong.key]
    )


def _names(section: type) -> list[str]:
    return [key_of(field) for field in fields(section)]


def _tables(names: Sequence[str] | Mapping[str, type]) -> str:
    return ", ".join(f"[{name}]" for name in names)


def _mistake(wrong: BadValue, places: Mapping[str, str], label: str) -> Mistake:
    return Mistake(
        key=wrong.key,
        value=shown_value(wrong.value),
        source=_place(wrong.key, places) or label,
        problem=wrong.problem,
        remedy=wrong.remedy,
    )


def _place(key: str, places: Mapping[str, str]) -> str:
    """Return where a key was written; for a part of a value, where the value was written."""
    while key and key not in places:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return places.get(key, "")


def _sources(places: Mapping[str, str]) -> dict[str, str]:
    keys = [f"{name}.{key}" for name, section in sections().items() for key in _names(section)]
    return {key: places.get(key, DEFAULT) for key in keys}
