"""On which line of a recipe each key was written: the TOML parser does not tell."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def line_numbers(text: str) -> dict[str, int]:
    """The first line (from 1) of each table and key of a valid TOML text, by dotted key.

    Entries of arrays of tables are numbered: `data.datasets[0].path`.
    """
    found: dict[str, int] = {}
    lines = text.splitlines()
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
            _note(found, prefix, start + 1)
            start += 1
            continue
        statement, end = _statement(lines, start)
        for path in _leaves(statement):
            _note(found, prefix + path, start + 1)
        start = end
    return found


def _open_table(header: str, counts: dict[str, int]) -> tuple[str, ...]:
    """The path of a `[table]` or `[[table]]` header, numbered where it is an array's next entry."""
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


def _statement(lines: Sequence[str], start: int) -> tuple[Mapping[str, Any], int]:
    """The `key = value` that begins on a line, and the line after it: it ends where it first parses."""
    for end in range(start + 1, len(lines) + 1):
        try:
            return tomllib.loads("\n".join(lines[start:end])), end
        except tomllib.TOMLDecodeError:
            continue
    return {}, start + 1


def _leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))


def _note(found: dict[str, int], path: Sequence[str], line: int) -> None:
    dotted = ".".join(path)
    found.setdefault(dotted, line)
    if dotted.endswith("]"):
        found.setdefault(dotted[: dotted.rindex("[")], line)
