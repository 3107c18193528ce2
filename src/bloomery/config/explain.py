"""Lists the settings of a recipe with value, source and meaning, and writes the reference of all settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from bloomery.config.convert import describe, toml_value
from bloomery.config.environment import PROFILES
from bloomery.config.load import LoadedRecipe, sections
from bloomery.config.setting import Setting, about, key_of


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting of a loaded recipe.

    key: `section.name`.
    value: as TOML text.
    source: where the value came from: a file and line, the command line, or the default.
    kind, help: from the setting's declaration.
    """

    key: str
    value: str
    source: str
    kind: str
    help: str


def explain(loaded: LoadedRecipe) -> tuple[SettingRow, ...]:
    """Return a row for every setting of a loaded recipe, in the order of the reference page."""
    return tuple(
        SettingRow(
            key=f"{name}.{key_of(field)}",
            value=toml_value(getattr(getattr(loaded.recipe, name), field.name)),
            source=loaded.sources[f"{name}.{key_of(field)}"],
            kind=kind_of(about(field)),
            help=about(field).help
            + _between_peers(loaded, f"{name}.{key_of(field)}")
            + _held_by_profiles(loaded, f"{name}.{key_of(field)}"),
        )
        for name, section in sections().items()
        for field in fields(section)
    )


def _between_peers(loaded: LoadedRecipe, key: str) -> str:
    """Return a sentence on what the global batch means in a run between peers; empty for other settings."""
    elastic, batch = loaded.recipe.elastic, loaded.recipe.train.global_batch
    if key != "train.global_batch" or not elastic.inner_steps:
        return ""
    return (
        f" Each peer uses a batch of this size: the planned {elastic.peers} peers use "
        f"{elastic.peers * batch:,} samples a step, and schedules count the samples of all peers."
    )


def _held_by_profiles(loaded: LoadedRecipe, key: str) -> str:
    """Return a sentence with the variables of the chosen profiles; empty for other settings."""
    profiles = loaded.recipe.environment.profiles
    if key != "environment.profiles" or not profiles:
        return ""
    by_profile = "; ".join(
        f"{profile}: {' '.join(f'{name}={value}' for name, value in PROFILES[profile].items())}"
        for profile in profiles
    )
    return f" Chosen: {by_profile}."


def kind_of(known: Setting) -> str:
    """Return the kind as text; `free, at start` for a free setting that is read only at the start."""
    return "free, at start" if known.at_start else known.kind


def reference() -> str:
    """Return the reference page of all settings, in Markdown."""
    return "\n".join(_page()) + "\n"


_INTRODUCTION = """\
# Settings of a recipe

This page is generated: `bloomery config reference --write`. Change a setting's text where it is declared, in
`src/bloomery/config/`.

A recipe is a TOML file; each heading below is one of its tables. On the command line a setting is
`section.key=value`, for instance `bloomery train demo train.global_batch=16`; a bare word is text, everything
else is TOML. `bloomery config show RECIPE --why` prints every value and where it came from.
`bloomery config check RECIPE` reports every mistake at once.

The kind of a setting says when it may change:

| kind | at a resume | while running (`control/set`) |
|---|---|---|
| free | may change | may change |
| free, at start | may change | refused: it is read when training starts |
| journalled | may change; the journal records it | refused |
| fixed | refused, with both values | refused |
"""


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    for name, section in sections().items():
        yield from _section(f"[{name}]", section)
        hints = get_type_hints(section)
        for field in fields(section):
            inner = next(
                (argument for argument in get_args(hints[field.name]) if is_dataclass(argument)), None
            )
            if isinstance(inner, type) and field.name == "datasets":
                yield from _section(f"[[{name}.{field.name}]]", inner)


def _section(heading: str, section: type) -> Iterator[str]:
    hints = get_type_hints(section)
    yield f"## `{heading}`\n"
    yield f"{section.__doc__}\n"
    yield "| setting | takes | default | kind | meaning |"
    yield "|---|---|---|---|---|"
    for field in fields(section):
        setting = about(field)
        cells = (
            f"`{key_of(field)}`",
            describe(hints[field.name], setting),
            _default(field),
            kind_of(setting),
            setting.help,
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _default(field: Field[Any]) -> str:
    return "required" if field.default is MISSING else f"`{toml_value(field.default)}`"
