"""`bloomery config`: shows and checks recipes, and writes the reference of all settings, without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from bloomery.cli.arguments import add_recipe, load_given, parser, run_subcommand
from bloomery.cli.json_output import json_text
from bloomery.config.convert import describe, toml_value
from bloomery.config.environment import PROFILES
from bloomery.config.load import LoadedRecipe, dump_recipe, sections
from bloomery.config.recipe import Recipe
from bloomery.config.setting import Setting, declaration_of, key_of
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError, StorageError
from bloomery.plan.early_warnings import warnings_of
from bloomery.plan.parameters import count_parameters, token_cost
from bloomery.plan.request import vocabulary_of, why_unknown, with_local_vocabulary
from bloomery.plan.schedule import phases, steps_of_peer, total_samples

COLUMNS = 100
REFERENCE_PAGE = "docs/reference/settings.md"
EXAMPLES = """\
bloomery config show tr11-176b              print the whole recipe, as TOML that loads back
bloomery config show demo --why             print where each value came from and what it means
bloomery config check my.toml               report every mistake at once, and what the recipe describes
bloomery config reference                   print the reference of all settings
"""


def run(arguments: list[str]) -> int:
    """Run `bloomery config COMMAND …`, and return the exit status."""
    subcommands = {
        "show": (_show, "print a recipe with all its settings filled in"),
        "check": (_check, "report every mistake in a recipe at once"),
        "reference": (_reference, "print or write the reference of all settings"),
    }
    return run_subcommand(
        "config", arguments, subcommands, about="Show and check recipes.", examples=EXAMPLES
    )


def _show(arguments: list[str]) -> int:
    options = parser(
        "config show",
        "Print a recipe with all its settings, as TOML that loads as the same recipe.",
        examples="bloomery config show demo train.global_batch=16 --why",
    )
    add_recipe(options)
    options.add_argument(
        "--why", action="store_true", help="print where each value came from and what it means"
    )
    options.add_argument(
        "--json", action="store_true", help="print one JSON object: by key, its value, source and kind"
    )
    chosen = options.parse_intermixed_args(arguments)
    loaded = load_given(chosen.recipe, chosen.overrides)
    if chosen.json:
        print(_as_json(loaded))
    elif chosen.why:
        _print_rows(explain(loaded))
    else:
        print(dump_recipe(loaded.recipe), end="")
    return 0


def _check(arguments: list[str]) -> int:
    options = parser(
        "config check",
        "Report every mistake in a recipe at once; without mistakes, print the size of the run it describes.",
        examples="bloomery config check my.toml train.global_batch=48",
    )
    add_recipe(options)
    options.add_argument("--json", action="store_true", help="print one JSON object, of mistakes too")
    chosen = options.parse_intermixed_args(arguments)
    try:
        loaded = load_given(chosen.recipe, chosen.overrides)
        check_recipe(loaded.recipe, loaded.sources)
    except ConfigError as refused:
        if not chosen.json:
            raise
        mistakes = [asdict(mistake) for mistake in refused.mistakes]
        print(json_text({"recipe": chosen.recipe, "mistakes": mistakes}, default=str, ensure_ascii=False))
        return refused.exit_status
    known = with_local_vocabulary(loaded)
    facts, warnings = _facts(known.recipe), list(warnings_of(known))
    if chosen.json:
        shown = {"recipe": chosen.recipe, "mistakes": [], "warnings": warnings, **dict(facts)}
        print(json_text(shown, ensure_ascii=False))
        return 0
    print(f"{chosen.recipe}: no mistakes")
    print("\n".join(f"  {name:<12} {value}" for name, value in facts))
    for warning in warnings:
        print(textwrap.fill(f"warning: {warning}", COLUMNS, initial_indent="  ", subsequent_indent="    "))
    return 0


def _reference(arguments: list[str]) -> int:
    options = parser("config reference", "Print the reference of all settings, or write it to a file.")
    options.add_argument(
        "--write",
        nargs="?",
        const=REFERENCE_PAGE,
        metavar="PATH",
        help=f"write it to PATH (default: {REFERENCE_PAGE})",
    )
    chosen = options.parse_args(arguments)
    if chosen.write is None:
        print(reference(), end="")
        return 0
    try:
        Path(chosen.write).write_text(reference(), encoding="utf-8")
    except OSError as refused:
        remedy = "Run it at the top of a clone of bloomery, or give a path that can be written."
        raise StorageError(
            f"{chosen.write} cannot be written: {refused.strerror}", remedy=remedy
        ) from refused
    print(f"wrote {chosen.write}")
    return 0


def _as_json(loaded: LoadedRecipe) -> str:
    kinds = {row.key: row.kind for row in explain(loaded)}
    settings = {
        f"{section}.{name.removesuffix('_')}": value
        for section, values in asdict(loaded.recipe).items()
        for name, value in values.items()
    }
    shown = {
        key: {"value": value, "source": loaded.sources[key], "kind": kinds[key]}
        for key, value in settings.items()
    }
    return json_text(shown, indent=2, ensure_ascii=False)


def _facts(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the figures of the run that a recipe describes, as (name, value) lines."""
    length = recipe.data.sequence_length
    samples = total_samples(recipe.train, sequence_length=length)
    steps = steps_of_peer(recipe.train, recipe.elastic, sequence_length=length)
    batches = [phase.global_batch for _, phase in phases(recipe.train)]
    batch = f"{batches[-1]:,} samples" + (f", from {batches[0]:,}" if batches[0] != batches[-1] else "")
    facts = [
        ("length", f"{samples:,} samples = {samples * length:,} tokens, {steps:,} steps"),
        ("batch", f"{batch}, of {length:,} tokens each"),
    ]
    if recipe.elastic.inner_steps:
        peers = recipe.elastic.peers
        facts.append(
            (
                "peers",
                f"{peers} planned: each with the batch and the steps above, "
                f"{peers * batches[-1]:,} samples per step in all",
            )
        )
    vocabulary = vocabulary_of(recipe)
    if not vocabulary:
        return [("parameters", f"depend on the vocabulary: it {why_unknown(recipe.data)}"), *facts]
    count = count_parameters(recipe.model, vocabulary=vocabulary, sequence_length=length)
    cost = token_cost(recipe.model, vocabulary=vocabulary, sequence_length=length)
    return [
        ("parameters", f"{count.total:,}, of them {count.block.total:,} in each of {count.layers} blocks"),
        *facts,
        ("compute", f"{cost.model * samples * length:.3g} FLOPs, {cost.model:.3g} a token"),
    ]


def _print_rows(rows: Sequence[SettingRow]) -> None:
    """Print each setting with its source and kind at the right, and its meaning beneath."""
    section = ""
    for row in rows:
        name, _, key = row.key.partition(".")
        if name != section:
            print(f"\n[{name}]" if section else f"[{name}]")
            section = name
        origin = f"{row.source} · {row.kind}"
        lines = textwrap.wrap(f"{key} = {row.value}", COLUMNS - 2, subsequent_indent="    ")
        if len(lines[-1]) + len(origin) + 4 > COLUMNS:
            lines.append("")
        lines[-1] = lines[-1].ljust(COLUMNS - 2 - len(origin)) + origin
        lines += textwrap.wrap(row.help, COLUMNS - 6, initial_indent="    ", subsequent_indent="    ")
        print("\n".join(f"  {line}" for line in lines))


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
            kind=kind_of(declaration_of(field)),
            help=declaration_of(field).help
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
        f"{elastic.peers * batch:,} samples per step, and schedules count the samples of all peers."
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

What `control/set` changes holds until the process ends. The next start, also one after a crash, takes its
recipe and its command line.
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
        setting = declaration_of(field)
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
