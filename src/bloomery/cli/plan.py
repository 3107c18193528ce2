"""`bloomery plan`: predicts memory, speed, duration and cost of a run, without torch."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import page_file
from bloomery.cli.arguments import load_given, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.plan_figures import as_figures
from bloomery.cli.plan_tables import days_text, rows_text, section
from bloomery.errors import ConfigError, Mistake
from bloomery.plan.hardware import Hardware, load_hardware, load_link, this_machine
from bloomery.plan.request import Request, with_local_vocabulary

if TYPE_CHECKING:
    from bloomery.plan.progress import RunProgress


EXAMPLES = """\
bloomery plan tr11-176b                                  plan for the machine that the recipe names
bloomery plan tr11-176b --gpus 192 train.micro_batch=1   plan for half of it, with another micro-batch
bloomery plan tr11-176b --gpus 48,96,192,384             compare sizes of the machine in one table
bloomery plan my.toml --hardware h200 --gpus 1024 --search    rank every layout that fits
bloomery plan tr11-176b --data-tokens 341e9 --html plan.html  show when epochs end, and write a page
bloomery plan --at runs/demo --hours-per-day 20          show what is left of a run, and measured speed
bloomery calibrate                                       measure this machine for plans

Shipped hardware: v100-32g, a100-80g, dgx-a100-80g, h100-80g, dgx-h100, h200. Shipped links between peers:
internet-0.5g, -1g, -2g, -4g. Times are ranges; docs/plan.md explains how each figure is computed.
"""
OWN_MACHINE = "this-machine.toml"
DEFAULT_HARDWARE = "a100-80g"


def run(arguments: list[str]) -> int:
    """Run `bloomery plan …`; returns 0 when the plan fits into memory and 1 when it does not.

    Of several numbers of accelerators, and of a search, it is 0 when one fits.
    """
    known = _parser()
    options = known.parse_intermixed_args(arguments)
    for given, ignored in _without_effect(options):  # better refused than left out without a word
        known.error(f"{ignored} does not go with {given}")
    if options.at is not None:
        return _at(options)
    if options.recipe is None:
        remedy = "Name a recipe, for instance `bloomery plan tr11-176b`, or a run with --at."
        raise ConfigError([_mistake("RECIPE", "is missing", remedy)], of="the command")
    requests = _requests(options, options.recipe)
    loaded = with_local_vocabulary(requests[0].loaded)
    request, *more = (replace(request, loaded=loaded) for request in requests)
    if more:
        return _several([request, *more], options)
    return _search(request, options) if options.search else _plan(request, options)


def _without_effect(options: Namespace) -> Iterator[tuple[str, str]]:
    """Yield (option, other option that would have no effect beside it) for each such pair that was given."""
    several = "," in (options.gpus or "")
    pairs = (
        ("--at", options.at is not None, ("search", "html", "start")),
        ("--search", options.search, ("html",)),
        ("several --gpus", several, ("at", "search", "html", "start", "data_tokens")),
    )
    for given, is_given, without_effect in pairs:
        for name in without_effect:
            if is_given and getattr(options, name):
                yield given, "--" + name.replace("_", "-")


def _parser() -> ArgumentParser:
    options = parser(
        "plan",
        "Predict the memory, speed, duration and cost of a run, before it starts.",
        examples=EXAMPLES,
    )
    # A usage of our own saves the time that argparse takes to compose one at each start.
    options.usage = "%(prog)s [RECIPE] [section.key=value …] [options]"
    options.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a shipped recipe's name, or a .toml file"
    )
    options.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=(),
        help="settings that replace the recipe's",
    )
    options.add_argument(
        "--hardware",
        metavar="NAME|PATH",
        help="the machine: a shipped name or a file (default: the recipe's run.hardware, else this machine)",
    )
    options.add_argument(
        "--gpus",
        metavar="N[,N…]",
        help="number of accelerators; in an elastic run, of one peer; several numbers give a table",
    )
    options.add_argument(
        "--search", action="store_true", help="rank all layouts that fit, with the reason why each is slower"
    )
    options.add_argument(
        "--at", metavar="RUN", type=Path, help="a run directory: show what is left of that run"
    )
    options.add_argument(
        "--failures-per-week",
        metavar="X",
        help="failures of the whole run in a week (default: from the machine's file)",
    )
    options.add_argument(
        "--hours-per-day",
        metavar="H",
        default="24",
        help="hours a day in which the machine may be used (default: 24)",
    )
    options.add_argument("--data-tokens", metavar="N", help="tokens of one epoch, for the calendar")
    options.add_argument(
        "--price", metavar="P", help="price of one accelerator for an hour (default: from the machine's file)"
    )
    options.add_argument(
        "--link",
        metavar="NAME|PATH",
        help="link between peers: a shipped name such as internet-1g, or a file",
    )
    options.add_argument(
        "--start", metavar="DATE", help="date of the first step, for the calendar, such as 2026-03-11"
    )
    options.add_argument(
        "--json", action="store_true", help="print JSON with units in its names; of several --gpus, a list"
    )
    options.add_argument(
        "--html", metavar="PATH", type=page_file, help="write the plan as one HTML page, too"
    )
    return options


def _requests(options: Namespace, recipe: str) -> list[Request]:
    """Return the request of the command line, one for each number of accelerators.

    Raises ConfigError that names every option without a number.
    """
    loaded = load_given(recipe, options.overrides)
    mistakes: list[Mistake] = []

    def read(name: str, text: str, *, whole: bool = False) -> float | None:
        try:
            value = float(text.replace("_", ""))
            if not math.isfinite(value) or (whole and value != int(value)):
                raise ValueError
        except (ValueError, OverflowError):
            kind = "a whole number" if whole else "a number"
            mistakes.append(_mistake(name, f"is not {kind}", f"Give {kind}.", value=text))
            return None
        return value

    def number(option: str) -> float | None:
        text = getattr(options, option)
        return None if text is None else read("--" + option.replace("_", "-"), text)

    texts = [] if options.gpus is None else options.gpus.split(",")
    counts = [read("--gpus", text, whole=True) for text in texts] or [None]
    for count in dict.fromkeys(count for count in counts if count is not None and counts.count(count) > 1):
        mistakes.append(_mistake("--gpus", "is given twice", "Give each number once.", value=int(count)))
    hours = number("hours_per_day")
    request = Request(
        loaded=loaded,
        hardware=load_machine(options.hardware or loaded.recipe.run.hardware, accelerators=options.gpus),
        link=load_link(options.link) if options.link else None,
        failures_per_week=number("failures_per_week"),
        hours_per_day=24.0 if hours is None else hours,
        data_tokens=number("data_tokens"),
        price_per_accelerator_hour=number("price"),
    )
    if mistakes:
        raise ConfigError(mistakes, of="the plan")
    return [replace(request, accelerators=None if count is None else int(count)) for count in counts]


def load_machine(name: str, *, accelerators: str | None = None) -> Hardware:
    """Return the named machine. For an empty name: the measured one of this directory, else this machine.

    accelerators: their number as it was given; with one and without a name, a common GPU is meant.
    Which machine was taken is told on standard error.
    """
    if name:
        return load_hardware(name)
    if Path(OWN_MACHINE).is_file():
        return load_hardware(OWN_MACHINE)
    here = this_machine() if accelerators is None else None
    if here is None:
        _note(f"no machine is named: this plan is for {DEFAULT_HARDWARE}; --hardware names another")
        return load_hardware(DEFAULT_HARDWARE)
    _note(f"no machine is named: this plan is for {here.name}. {here.notes}")
    return here


def _note(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)


def _plan(request: Request, options: Namespace) -> int:
    from bloomery.plan.overview import make_plan

    plan = make_plan(request)
    if options.html:
        from bloomery.cli.plan_page import page

        _write(options.html, page(plan, start=options.start))
    if options.json:
        print(json_text(as_figures(plan), indent=2, ensure_ascii=False))
    else:
        from bloomery.cli.plan_tables import plan_text

        print(plan_text(plan, start=options.start))
        if options.html:
            print(f"\nwrote {options.html}")
    return 0 if plan.fits else 1


def _several(requests: Sequence[Request], options: Namespace) -> int:
    from bloomery.cli.plan_counts import counts_as_figures, counts_text
    from bloomery.plan.counts import plan_counts

    counts = plan_counts(requests)
    if options.json:
        print(json_text(counts_as_figures(counts), indent=2, ensure_ascii=False, default=str))
    else:
        print(counts_text(counts))
    return 0 if any(count.plan and count.plan.fits for count in counts) else 1


def _search(request: Request, options: Namespace) -> int:
    from bloomery.plan.search import as_rows, search_layouts

    result = search_layouts(request)
    if options.json:
        print(json_text(as_rows(result), indent=2, ensure_ascii=False))
    else:
        from bloomery.cli.plan_tables import search_text

        print(search_text(result))
    return 0 if result.ranked else 1


def _at(options: Namespace) -> int:
    from bloomery.plan.progress import as_progress_figures, progress_of

    recipe = options.at / "recipe.toml"
    if not recipe.is_file():
        remedy = "Give the run directory, for instance runs/demo; it holds recipe.toml and journal/."
        raise ConfigError([_mistake("--at", "is no run", remedy, value=str(options.at))], of="the plan")
    options.overrides = [*([options.recipe] if options.recipe else []), *options.overrides]
    (request,) = _requests(options, str(recipe))
    progress = progress_of(request, options.at)
    if options.json:
        print(json_text(as_progress_figures(progress), indent=2, ensure_ascii=False))
    else:
        print(progress_text(progress))
    return 0


def _write(path: Path, text: str) -> None:
    from bloomery.errors import StorageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as refused:
        raise StorageError(
            f"{path} cannot be written: {refused.strerror}", remedy="Give a path that can be written."
        ) from refused


def _mistake(key: str, problem: str, remedy: str, *, value: object = None) -> Mistake:
    return Mistake(key=key, value=value, source="command line", problem=problem, remedy=remedy)


def progress_text(progress: RunProgress) -> str:
    """Return what a run has done, what is left, and the plan beside what was measured."""
    from bloomery.plan.progress import progress_rows

    of_peer = f" of this peer, one of {progress.peers}" if progress.peers > 1 else ""
    rows = [
        ["samples", f"{progress.consumed_samples:,} of {progress.total_samples:,}"],
        ["tokens", f"{progress.consumed_tokens:,} of {progress.total_tokens:,}"],
        ["steps", f"{progress.step:,} of {progress.total_steps:,}{of_peer}"],
        [
            "speed",
            f"{progress.samples_per_s:,.2f} samples/s, {progress.step_s:.3g} s/step (median of the last "
            f"{progress.steps_measured})",
        ],
        ["left", f"{days_text(progress.days_left)} with {progress.hours_per_day:g} hours a day"],
    ]
    parts = [
        f"{progress.run}: {progress.consumed_samples / progress.total_samples:.1%} done",
        rows_text(rows, left=(0, 1), head=False),
    ]
    if progress.elsewhere:
        table = [["accelerators", "left", ""]]
        table += [
            [
                f"{estimate.accelerators:,}",
                "-" if estimate.days_left is None else days_text(estimate.days_left),
                estimate.note,
            ]
            for estimate in progress.elsewhere
        ]
        parts.append(section("on other numbers of accelerators", rows_text(table, left=(2,))))
    table = [["figure", "planned", "measured", "measured/planned"]]
    table += [[name, planned, measured, ratio] for name, planned, measured, ratio in progress_rows(progress)]
    parts.append(section(f"planned (on {progress.hardware}) against measured", rows_text(table, left=(0,))))
    return "\n\n".join(parts)
