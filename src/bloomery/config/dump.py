"""A recipe as TOML text that loads back equal: what a run directory keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from bloomery.config.recipe import Recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe, every setting written out."""
    sections = (_section(field.name, getattr(recipe, field.name)) for field in fields(recipe))
    return "\n".join("\n".join(lines) + "\n" for lines in sections)


def settings_of(recipe: Recipe) -> dict[str, str]:
    """Every setting as TOML text, by its key `section.name`: what two ranks compare."""
    return {
        f"{section.name}.{field.name}": toml_value(getattr(getattr(recipe, section.name), field.name))
        for section in fields(recipe)
        for field in fields(getattr(recipe, section.name))
    }


def toml_value(value: Any) -> str:
    """One value as TOML writes it, on one line; an entry of an array of tables is an inline table."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(element) for element in value) + "]"
    entries = (f"{field.name} = {toml_value(getattr(value, field.name))}" for field in fields(value))
    return "{ " + ", ".join(entries) + " }"


def _section(name: str, section: Any) -> Iterator[str]:
    yield f"[{name}]"
    tables: list[tuple[str, Any]] = []
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            tables += [(f"[[{name}.{field.name}]]", entry) for entry in value]
        else:
            yield f"{field.name} = {toml_value(value)}"
    # After the section's own keys: a key below a table's header would belong to that table.
    for header, entry in tables:
        yield ""
        yield header
        yield from (f"{field.name} = {toml_value(getattr(entry, field.name))}" for field in fields(entry))
