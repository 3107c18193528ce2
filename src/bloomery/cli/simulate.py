"""`bloomery simulate`: months of a run in seconds: what failures, saves, links and people's absence cost."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bloomery.cli.arguments import parser
from bloomery.errors import ConfigError, Mistake
from bloomery.plan.simulation.closed_forms import best_interval_s
from bloomery.plan.simulation.life import TRAINING
from bloomery.plan.simulation.lives import Forecast, forecast
from bloomery.plan.simulation.load import load_scenario, shipped_scenarios
from bloomery.plan.simulation.scenario import Scenario

EXAMPLES = """\
bloomery simulate llama3-405b                                       a shipped scenario
bloomery simulate bloom-176b checkpoint.every_minutes=60            one setting changed
bloomery simulate bloom-176b --sweep checkpoint.every_minutes=15,30,60,120,240 --png sweep.png
bloomery simulate internet-elastic --sweep elastic.bits=4,8,16,32
bloomery simulate mine.toml --lives 200 --json
"""

MOST_LIVES = 100_000
S_PER_HOUR = 3600.0


def run(arguments: list[str]) -> int:
    """Simulate as the command line says, and tell."""
    options = _parse(arguments)
    if options.scenario is None:
        return _list(as_json=options.json)
    scenario = load_scenario(options.scenario, options.overrides)
    if options.sweep is None:
        found = [("", _forecast(scenario, options, title=scenario.run.name))]
    else:
        key, values = options.sweep
        scenarios = [
            (value, load_scenario(options.scenario, (*options.overrides, f"{key}={value}")))
            for value in values
        ]
        found = [
            (value, _forecast(one, options, title=f"{scenario.run.name} {key}={value}"))
            for value, one in scenarios
        ]
    if options.json:
        for value, one in found:
            print(json.dumps(_as_json(one, options.sweep[0] if options.sweep else "", value)))
    elif options.sweep is None:
        print(_told(found[0][1]))
    else:
        print(_swept(options.sweep[0], found))
    if options.png:
        _draw(options, found)
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "simulate",
        "Simulate a run for months: failures, saves, restarts, queues; or peers between sites. Tells the "
        "goodput (share of time whose work was kept) and what the rest went to.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="a shipped scenario, or a .toml file; without: a list"
    )
    options.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=(),
        help="settings that replace the scenario's; failures.NAME.count=… for a kind of failure",
    )
    options.add_argument("--lives", type=_lives, default=32, metavar="N", help="simulated lives (32)")
    options.add_argument("--seed", type=int, default=0, metavar="N", help="of the first life (0)")
    options.add_argument(
        "--sweep", type=_sweep, metavar="KEY=A,B,…", help="simulate once for each value of one setting"
    )
    options.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the first life's days, or the sweep, to a file"
    )
    options.add_argument("--json", action="store_true", help="one JSON object a scenario")
    return options.parse_intermixed_args(arguments)


def _lives(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_LIVES:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST_LIVES:,}")
    return int(text)


def _sweep(text: str) -> tuple[str, tuple[str, ...]]:
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(",") if value.strip())
    if not (equals and "." in key and found):
        raise ArgumentTypeError(f"{text!r} is not section.key=value,value,…")
    return key.strip(), found


def _list(*, as_json: bool) -> int:
    for name in shipped_scenarios():
        notes = load_scenario(name).run.notes
        print(json.dumps({"name": name, "notes": notes}) if as_json else f"{name:<20}{notes:.80}")
    return 0


def _forecast(scenario: Scenario, options: Namespace, *, title: str) -> Forecast:
    with _bar(title, options.lives) as done:
        return forecast(scenario, lives=options.lives, seed=options.seed, done=done)


@contextmanager
def _bar(title: str, lives: int) -> Iterator[Callable[[], None]]:
    """Something to call after each life: a bar on a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=lives)
        yield lambda: bars.advance(task)


def _told(found: Forecast) -> str:
    scenario = found.scenario
    lines = [
        f"{scenario.run.name}: {scenario.run.days:g} days, {found.lives} lives",
        "",
        f"goodput {_goodput(found)}",
        "",
        f"{'where the time went':<28}{'hours':>12}{'share':>9}",
    ]
    for cause, hours in sorted(found.hours.items(), key=lambda item: -item[1]):
        if hours > 0.0:
            lines.append(f"{cause:<28}{hours:>12,.1f}{hours / scenario.hours:>9.2%}")
    lines += ["", f"{'what happened (mean of a life)':<34}{'times':>10}"]
    lines += [f"{event:<34}{times:>10,.1f}" for event, times in found.events.items()]
    return "\n".join([*lines, *_advice(found)])


def _goodput(found: Forecast) -> str:
    if found.lives == 1:
        return f"{found.goodput:.2%} (one life: no interval)"
    return f"{found.goodput:.2%}, 95% sure between {found.low:.2%} and {found.high:.2%}"


def _advice(found: Forecast) -> list[str]:
    """How often to save, by Young's formula, beside what the scenario says."""
    scenario, failures = found.scenario, found.events.get("failures", 0.0)
    if scenario.checkpoint is None or not failures or not scenario.checkpoint.blocking_s:
        return []
    best = best_interval_s(
        save_s=scenario.checkpoint.blocking_s,
        mean_time_between_failures_s=scenario.hours * S_PER_HOUR / failures,
    )
    return [
        "",
        f"A failure each {scenario.hours / failures:.1f} h and {scenario.checkpoint.blocking_s:g} s a save: "
        f"save each {best / 60:.0f} minutes (Young), here {scenario.checkpoint.every_minutes:g}.",
    ]


def _swept(key: str, found: Sequence[tuple[str, Forecast]]) -> str:
    causes = [cause for cause in found[0][1].hours if cause != TRAINING]
    mean = {cause: sum(one.hours[cause] for _, one in found) for cause in causes}
    worst = sorted((cause for cause in causes if mean[cause] > 0.0), key=lambda cause: -mean[cause])[:3]
    width = max(len(key), *(len(value) for value, _ in found)) + 2
    head = f"{key:<{width}}{'goodput':>8}{'± (95%)':>9}" + "".join(f"{one[:15]:>16}" for one in worst)
    lines = [head]
    for value, one in found:
        shares = "".join(f"{one.hours[cause] / one.scenario.hours:>16.2%}" for cause in worst)
        error = f"{(one.high - one.low) / 2.0:.2%}" if one.lives > 1 else "–"
        lines.append(f"{value:<{width}}{one.goodput:>8.2%}{error:>9}{shares}")
    best = max(found, key=lambda item: item[1].goodput)
    return "\n".join([*lines, "", f"best: {key}={best[0]}"])


def _as_json(found: Forecast, key: str, value: str) -> dict[str, Any]:  # Any: JSON
    told: dict[str, Any] = {
        "scenario": found.scenario.run.name,
        "days": found.scenario.run.days,
        "lives": found.lives,
        "goodput": found.goodput,
        "goodput_low": found.low if found.lives > 1 else None,
        "goodput_high": found.high if found.lives > 1 else None,
        "hours": dict(found.hours),
        "events": dict(found.events),
    }
    return told | {"sweep": {key: value}} if key else told


def _draw(options: Namespace, found: Sequence[tuple[str, Forecast]]) -> None:
    from bloomery.cli.simulate_picture import draw_life, draw_sweep

    try:
        if options.sweep:
            draw_sweep(options.sweep[0], found, options.png)
        else:
            draw_life(found[0][1], options.png)
    except OSError as refused:
        raise ConfigError(
            [
                Mistake(
                    key="--png",
                    value=str(options.png),
                    source="command line",
                    problem=f"cannot be written: {refused.strerror}",
                    remedy="Name a file in a directory that you may write to.",
                )
            ]
        ) from refused
