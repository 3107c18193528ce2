"""`bloomery plan`: what fits, how fast, how long, what it costs. Needs no torch."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from bloomery.cli.arguments import parser
from bloomery.config.load import load_recipe
from bloomery.errors import ConfigError, Mistake
from bloomery.plan.hardware import Hardware, load_hardware
from bloomery.plan.link import load_link
from bloomery.plan.request import Request

EXAMPLES = """\
bloomery plan tr11-176b                                  on the machine that the recipe names
bloomery plan tr11-176b --gpus 192 train.micro_batch=1   half the machine, another micro-batch
bloomery plan my.toml --hardware h200 --gpus 1024 --search    every layout that fits, ranked
bloomery plan tr11-176b --data-tokens 341e9 --html plan.html  with the epochs' ends, as a page
bloomery plan --at runs/demo --hours-per-day 20          what is left of a run, and planned against measured
bloomery calibrate                                       measure this machine: writes this-machine.toml

Shipped hardware: v100-32g, a100-80g, dgx-a100-80g, h100-80g, dgx-h100, h200; links between peers:
internet-0.5g, -1g, -2g, -4g. Times are a range; docs/plan.md says what is behind each figure.
"""
OWN_MACHINE = "this-machine.toml"
DEFAULT_HARDWARE = "a100-80g"


def run(arguments: list[str]) -> int:
    """Run `bloomery plan …`; returns the exit status: 0 when the plan fits, 1 when it does not."""
    options = _parser().parse_intermixed_args(arguments)
    if options.at is not None:
        return _at(options)
    if options.recipe is None:
        remedy = "Name a recipe, for instance `bloomery plan tr11-176b`, or a run with --at."
        raise ConfigError([_mistake("RECIPE", "is missing", remedy)], of="the command")
    request = _request(options, options.recipe)
    return _search(request, options) if options.search else _plan(request, options)


def _parser() -> ArgumentParser:
    options = parser("plan", "What fits, how fast, how long, and what it costs.", examples=EXAMPLES)
    options.usage = "%(prog)s [RECIPE] [section.key=value …] [options]"  # else argparse lays it out each time
    options.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a shipped recipe's name, or a .toml file"
    )
    options.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=(),
        help="settings in place of the recipe's",
    )
    options.add_argument("--hardware", metavar="NAME|PATH", help="the machine; by default the recipe's")
    options.add_argument("--gpus", metavar="N", help="accelerators (of one peer, where there are several)")
    options.add_argument(
        "--search", action="store_true", help="rank all layouts that fit, with why each loses"
    )
    options.add_argument("--at", metavar="RUN", type=Path, help="a run directory: what is left of it")
    options.add_argument("--failures-per-week", metavar="X", help="of the whole run; else the machine's rate")
    options.add_argument("--hours-per-day", metavar="H", default="24", help="hours of allocation a day")
    options.add_argument("--data-tokens", metavar="N", help="tokens of one epoch, for the calendar")
    options.add_argument("--price", metavar="P", help="of one accelerator for an hour")
    options.add_argument("--link", metavar="NAME|PATH", help="between peers: internet-1g, or a file")
    options.add_argument(
        "--start", metavar="DATE", help="date of the first step, for the calendar: 2026-03-11"
    )
    options.add_argument("--json", action="store_true", help="one JSON object, units in its names")
    options.add_argument("--html", metavar="PATH", type=Path, help="also write one self-contained page")
    return options


def _request(options: Namespace, recipe: str) -> Request:
    """What was asked for; every option that is no number is refused together."""
    loaded = load_recipe(recipe, options.overrides)
    mistakes: list[Mistake] = []

    def number(option: str, *, whole: bool = False) -> float | None:
        text = getattr(options, option)
        if text is None:
            return None
        try:
            value = float(text.replace("_", ""))
            if whole and value != int(value):
                raise ValueError
        except (ValueError, OverflowError):
            name = "--" + option.replace("_", "-")
            kind = "a whole number" if whole else "a number"
            mistakes.append(_mistake(name, f"is not {kind}", f"Give {kind}.", value=text))
            return None
        return value

    gpus, hours = number("gpus", whole=True), number("hours_per_day")
    request = Request(
        loaded=loaded,
        hardware=load_machine(options.hardware or loaded.recipe.run.hardware),
        accelerators=None if gpus is None else int(gpus),
        link=load_link(options.link) if options.link else None,
        failures_per_week=number("failures_per_week"),
        hours_per_day=24.0 if hours is None else hours,
        data_tokens=number("data_tokens"),
        price_per_accelerator_hour=number("price"),
    )
    if mistakes:
        raise ConfigError(mistakes, of="the plan")
    return request


def load_machine(name: str) -> Hardware:
    """The machine that is named; else this one where it was measured here; else a common one."""
    if name:
        return load_hardware(name)
    return load_hardware(OWN_MACHINE if Path(OWN_MACHINE).is_file() else DEFAULT_HARDWARE)


def _plan(request: Request, options: Namespace) -> int:
    from bloomery.plan.overview import make_plan

    plan = make_plan(request)
    if options.html:
        from bloomery.cli.plan_page import page

        _write(options.html, page(plan, start=options.start))
    if options.json:
        from bloomery.plan.figures import as_figures

        print(json.dumps(as_figures(plan), indent=2, ensure_ascii=False))
    else:
        from bloomery.cli.plan_tables import plan_text

        print(plan_text(plan, start=options.start))
        if options.html:
            print(f"\nwrote {options.html}")
    return 0 if plan.fits else 1


def _search(request: Request, options: Namespace) -> int:
    from bloomery.plan.search import as_rows, search_layouts

    found = search_layouts(request)
    if options.json:
        print(json.dumps(as_rows(found), indent=2, ensure_ascii=False))
    else:
        from bloomery.cli.plan_tables import search_text

        print(search_text(found))
    return 0 if found.ranked else 1


def _at(options: Namespace) -> int:
    from bloomery.plan.progress import as_progress_figures, progress_of

    recipe = options.at / "recipe.toml"
    if not recipe.is_file():
        remedy = "Give the run directory, for instance runs/demo; it holds recipe.toml and journal/."
        raise ConfigError([_mistake("--at", "is no run", remedy, value=str(options.at))], of="the plan")
    options.overrides = [*([options.recipe] if options.recipe else []), *options.overrides]
    progress = progress_of(_request(options, str(recipe)), options.at)
    if options.json:
        print(json.dumps(as_progress_figures(progress), indent=2, ensure_ascii=False))
    else:
        from bloomery.cli.plan_tables import progress_text

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
