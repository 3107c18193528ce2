"""Every setting with its value, where the value came from, and what it means; and the reference page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from bloomery.config.convert import describe
from bloomery.config.dump import toml_value
from bloomery.config.load import LoadedRecipe, sections
from bloomery.config.setting import Setting, about


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of a loaded recipe; `value` is written as TOML writes it."""

    key: str
    value: str
    source: str
    kind: str
    help: str


def explain(loaded: LoadedRecipe) -> tuple[Row, ...]:
    """A row for every setting, in the order of the reference page."""
    return tuple(
        Row(
            key=f"{name}.{field.name}",
            value=toml_value(getattr(getattr(loaded.recipe, name), field.name)),
            source=loaded.sources[f"{name}.{field.name}"],
            kind=kind_of(about(field)),
            help=about(field).help + _between_peers(loaded, f"{name}.{field.name}"),
        )
        for name, section in sections().items()
        for field in fields(section)
    )


def _between_peers(loaded: LoadedRecipe, key: str) -> str:
    """What a batch is to the whole run, where several peers take one each."""
    elastic, batch = loaded.recipe.elastic, loaded.recipe.train.global_batch
    if key != "train.global_batch" or not elastic.inner_steps:
        return ""
    return (
        f" Between peers it is each one's own: with the planned {elastic.peers} the run takes "
        f"{elastic.peers * batch:,} samples a step, and schedules count what all of them use."
    )


def kind_of(known: Setting) -> str:
    """The kind as people read it: a free setting that is read at the start says so."""
    return "free, at start" if known.at_start else known.kind


def reference() -> str:
    """The reference page of all settings, in Markdown."""
    return "\n".join(_page()) + "\n"


_INTRODUCTION = """\
# Settings of a recipe

This page is generated: `bloomery config reference --write`. Change a setting's text where it is declared, in
`src/bloomery/config/`.

A recipe is a TOML file; each heading below is one of its tables. On the command line a setting is
`section.key=value`, for instance `bloomery train demo train.global_batch=16`; a bare word is text, everything
else is TOML. `bloomery config show RECIPE --why` prints every value and where it came from, and
`bloomery config check RECIPE` says what is wrong, all at once.

What a resume, and a running run, may do to a setting:

| kind | at a resume | while running (`control/set`) |
|---|---|---|
| free | changes | changes |
| free, at start | changes | refused: it is read when training starts |
| journalled | changes, and the journal says so | refused |
| fixed | refused, with both values: it is part of what the run is | refused |
"""


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    for name, section in sections().items():
        yield from _section(f"[{name}]", section)
        hints = get_type_hints(section)
        for field in fields(section):
            inner = next((one for one in get_args(hints[field.name]) if is_dataclass(one)), None)
            if isinstance(inner, type) and field.name == "datasets":
                yield from _section(f"[[{name}.{field.name}]]", inner)


def _section(heading: str, section: type) -> Iterator[str]:
    hints = get_type_hints(section)
    yield f"## `{heading}`\n"
    yield f"{section.__doc__}\n"
    yield "| setting | takes | default | kind | meaning |"
    yield "|---|---|---|---|---|"
    for field in fields(section):
        known = about(field)
        cells = (
            f"`{field.name}`",
            describe(hints[field.name], known),
            _default(field),
            kind_of(known),
            known.help,
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _default(field: Field[Any]) -> str:
    return "required" if field.default is MISSING else f"`{toml_value(field.default)}`"
