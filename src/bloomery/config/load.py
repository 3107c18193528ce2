"""A recipe's text and the command line's overrides → one frozen `Recipe`, or every mistake at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from bloomery.config.convert import Unusable, Wrong, alternatives, convert_table, unknown_key
from bloomery.config.dump import dump_recipe
from bloomery.config.find import find_recipe
from bloomery.config.lines import line_numbers
from bloomery.config.nearest import nearest
from bloomery.config.recipe import Recipe
from bloomery.errors import ConfigError, Mistake

__all__ = ["LoadedRecipe", "dump_recipe", "load_recipe", "override", "parse_recipe", "sections"]

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe and, for every setting (`section.key`), where its value came from."""

    recipe: Recipe
    sources: Mapping[str, str]


def load_recipe(path_or_name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe file, or a shipped recipe by name, and apply `section.key=value` overrides.

    Raises ConfigError with all mistakes. What needs several settings to judge is left to `check_recipe`.
    """
    path = find_recipe(path_or_name)
    label = f"{path_or_name}.toml" if path.name == f"{path_or_name}.toml" else path_or_name
    return parse_recipe(_read(path, label), overrides, label=label)


def parse_recipe(text: str, overrides: Sequence[str] = (), *, label: str) -> LoadedRecipe:
    """The recipe that a TOML text describes; `label` names the text in messages, as `label:line`."""
    raw = _parse(text, label)
    places = {key: f"{label}:{line}" for key, line in line_numbers(text).items()}
    wrongs = _apply_overrides(raw, places, overrides)
    built: dict[str, Any] = {}
    known = sections()
    wrongs += [_unknown_section(name, raw[name]) for name in raw if name not in known]
    for name, section in known.items():
        table = raw.get(name, {})
        if not isinstance(table, dict):
            wrongs.append(
                Wrong(
                    key=name,
                    value=table,
                    problem="must be a table",
                    remedy=f"Write [{name}] on its own line.",
                )
            )
            continue
        try:
            built[name] = section(**convert_table(section, table, name))
        except Unusable as unusable:
            wrongs.extend(_in_another_section(wrong) for wrong in unusable.wrongs)
    if wrongs:
        raise ConfigError([_mistake(wrong, places, label) for wrong in wrongs])
    return LoadedRecipe(recipe=Recipe(**built), sources=_sources(places))


def override(recipe: Recipe, overrides: Sequence[str], *, source: str = COMMAND_LINE) -> Recipe:
    """The recipe with `section.key=value` settings replaced, as strictly as when it is loaded."""
    try:
        return parse_recipe(dump_recipe(recipe), overrides, label="recipe").recipe
    except ConfigError as refused:
        mistakes = [
            Mistake(key=one.key, value=one.value, source=source, problem=one.problem, remedy=one.remedy)
            for one in refused.mistakes
        ]
        raise ConfigError(mistakes) from None


def sections() -> dict[str, type]:
    """The sections of a recipe: name → dataclass, in the order of the reference page."""
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


def _parse(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as broken:
        message = str(broken)
    at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    source, problem = label, message
    if at:
        source, problem = f"{label}:{at[1]}", f"{message[: at.start()]} (column {at[2]})"
    remedy = (
        "This is not TOML: text needs quotes, a table's name brackets, and a key stands once in its table."
    )
    raise ConfigError([Mistake(key="syntax", value=None, source=source, problem=problem, remedy=remedy)])


def _apply_overrides(raw: dict[str, Any], places: dict[str, str], overrides: Sequence[str]) -> list[Wrong]:
    """Write each override into the raw tables and note its place; returns those that say nothing."""
    wrongs: list[Wrong] = []
    known = sections()
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and name and section):
            places[text] = COMMAND_LINE
            remedy = "Write section.key=value, for instance train.global_batch=16."
            wrongs.append(Wrong(key=text, value=None, problem="is not a setting", remedy=remedy))
            continue
        table = raw.setdefault(section, {})
        if isinstance(table, dict):
            for stale in [place for place in places if place.startswith(f"{section}.{name}[")]:
                del places[stale]
            table[name] = _override_value(known.get(section), name, value.strip())
        places[f"{section}.{name}"] = COMMAND_LINE
        places.setdefault(section, COMMAND_LINE)
    return wrongs


def _override_value(section: type | None, name: str, text: str) -> Any:
    """The value of an override: TOML where it is TOML, else the bare text.

    A setting that is text takes it as it stands (`run.name=7`), and a list of texts takes a single one
    (`data.sources=notes.txt`), because quotes inside a shell's quotes are where people go wrong.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if list(parsed) == ["value"] else text
    annotation = get_type_hints(section).get(name) if section is not None else None
    if annotation is not None and alternatives(annotation) == (str,) and not isinstance(value, str):
        return text
    if annotation == tuple[str, ...] and isinstance(value, str):
        return [value]
    return value


def _unknown_section(name: str, value: object) -> Wrong:
    known = sections()
    if not isinstance(value, dict):
        owners = [
            section for section, kind in known.items() if name in {field.name for field in fields(kind)}
        ]
        remedy = f"Put it under [{owners[0]}]." if owners else f"Put settings under one of {_tables(known)}."
        return Wrong(key=name, value=value, problem="stands in no section", remedy=remedy)
    near = nearest(name, known, cutoff=0.6)
    remedy = f"Did you mean [{near[0]}]?" if near else f"There are {_tables(known)}."
    return Wrong(key=name, value=None, problem="there is no such section", remedy=remedy)


def _in_another_section(wrong: Wrong) -> Wrong:
    """An unknown key that another section does have: say which."""
    section, _, name = wrong.key.partition(".")
    if wrong != unknown_key(wrong.key, wrong.value, _names(sections()[section])):
        return wrong
    owners = [other for other, kind in sections().items() if name in _names(kind)]
    if not owners:
        return wrong
    remedy = f"It belongs to {_tables(owners)}: write {owners[0]}.{name}."
    return Wrong(key=wrong.key, value=wrong.value, problem=wrong.problem, remedy=remedy)


def _names(section: type) -> list[str]:
    return [field.name for field in fields(section)]


def _tables(names: Sequence[str] | Mapping[str, type]) -> str:
    return ", ".join(f"[{name}]" for name in names)


def _mistake(wrong: Wrong, places: Mapping[str, str], label: str) -> Mistake:
    return Mistake(
        key=wrong.key,
        value=wrong.value,
        source=_place(wrong.key, places) or label,
        problem=wrong.problem,
        remedy=wrong.remedy,
    )


def _place(key: str, places: Mapping[str, str]) -> str:
    """Where a key was written; for a part of a value, where the value was."""
    while key and key not in places:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return places.get(key, "")


def _sources(places: Mapping[str, str]) -> dict[str, str]:
    keys = [f"{name}.{key}" for name, section in sections().items() for key in _names(section)]
    return {key: places.get(key, DEFAULT) for key in keys}
