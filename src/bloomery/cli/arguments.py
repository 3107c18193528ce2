"""Parsers of one command's arguments, and commands with parts (`bloomery config show`)."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping

from bloomery.config.nearest import nearest

USAGE = 2


def parser(command: str, about: str, *, examples: str = "") -> ArgumentParser:
    """An empty parser for `bloomery COMMAND`, with a description and examples that keep their lines."""
    epilog = f"examples:\n{_indented(examples)}" if examples else None
    return ArgumentParser(
        prog=f"bloomery {command}",
        description=about,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_recipe(parser: ArgumentParser) -> None:
    """Add `RECIPE [section.key=value …]`; parse with `parse_intermixed_args`, so options may follow."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or path of a .toml file")
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=(),
        help="settings that replace the recipe's, for instance train.global_batch=16",
    )


def add_start(parser: ArgumentParser, *, run: str, nproc: str) -> None:
    """Add what every start of a training takes. run, nproc: the defaults and meanings that differ."""
    parser.add_argument("--run", metavar="DIR", help=f"the run directory; by default {run}")
    parser.add_argument("--nproc", type=positive, default=1, metavar="N", help=nproc)
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="resume from the newest intact checkpoint when the newest of all is damaged",
    )
    parser.add_argument("--plain", action="store_true", help="log lines instead of a bar, on a terminal too")


def positive(text: str) -> int:
    """A whole number of at least 1: for `type=`."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run_part(
    command: str,
    arguments: list[str],
    parts: Mapping[str, tuple[Callable[[list[str]], int], str]],
    *,
    about: str,
    examples: str = "",
) -> int:
    """Run one part of a command: name → (function of the remaining arguments, one line of help)."""
    name = arguments[0] if arguments else "--help"
    if name in parts:
        return parts[name][0](arguments[1:])
    if name in ("-h", "--help"):
        width = max(len(part) for part in parts)
        lines = "\n".join(f"{part:<{width}}  {line}" for part, (_, line) in parts.items())
        shown = f"\n\nexamples:\n{_indented(examples)}" if examples else ""
        print(f"usage: bloomery {command} PART …\n\n{about}\n\nparts:\n{_indented(lines)}{shown}")
        return 0 if arguments else USAGE
    near = nearest(name, parts, cutoff=0.5)
    hint = f"Did you mean `bloomery {command} {near[0]}`?" if near else f"Parts: {', '.join(parts)}."
    print(f"bloomery {command}: there is no part '{name}'\n  {hint}", file=sys.stderr)
    return USAGE


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip("\n").splitlines())
