"""`bloomery simulate`: simulates months of a run, and prints or draws what failures, saves and links cost."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bloomery.cli.argument_values import picture_file
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.cli.tables import table_text
from bloomery.errors import ConfigError, Mistake
from bloomery.plan.checkpoint_plan import best_interval_s
from bloomery.plan.simulate import GoodputForecast, forecast
from bloomery.plan.simulate.scenario import TRAINING, Life, Scenario, load_scenario, shipped_scenarios

COLOURS = ("#4c9f70", "#f2c14e", "#c1292e", "#e87f3a", "#7b5ea7", "#8d99ae", "#3d5a80", "#235789", "#b56576")
MOST_BARS = 120


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
    """Simulate one scenario, or one for each value of a sweep, and print the result; returns 0."""
    options = _parse(arguments)
    if options.scenario is None:
        return _print_scenarios(as_json=options.json)
    scenario = load_scenario(options.scenario, options.overrides)
    if options.sweep is None:
        forecasts = [("", _forecast(scenario, options, title=scenario.run.name))]
    else:
        key, values = options.sweep
        scenarios = [
            (value, load_scenario(options.scenario, (*options.overrides, f"{key}={value}")))
            for value in values
        ]
        forecasts = [
            (value, _forecast(result, options, title=f"{scenario.run.name} {key}={value}"))
            for value, result in scenarios
        ]
    if options.json:
        for value, result in forecasts:
            print(json_text(_as_json(result, options.sweep[0] if options.sweep else "", value)))
    elif options.sweep is None:
        print(_forecast_text(forecasts[0][1]))
    else:
        print(_sweep_text(options.sweep[0], forecasts))
    if options.png:
        _draw(options, forecasts)
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "simulate",
        "Simulate months of a run on a cluster, with failures, saves, restarts and queues, or of a run\n"
        "between peers at several sites. Prints the goodput, the share of time whose work was kept, and\n"
        "the causes that took the rest.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "scenario",
        nargs="?",
        metavar="SCENARIO",
        help="a shipped scenario, or a .toml file (without one: list the shipped ones)",
    )
    options.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=(),
        help="settings that replace the scenario's; failures.NAME.count=… sets a kind of failure",
    )
    options.add_argument(
        "--lives", type=_lives, default=32, metavar="N", help="number of runs to simulate (default: 32)"
    )
    options.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the first simulated run (default: 0)"
    )
    options.add_argument(
        "--sweep", type=_sweep, metavar="KEY=A,B,…", help="simulate once for each value of one setting"
    )
    options.add_argument(
        "--png",
        type=picture_file,
        metavar="FILE",
        help="draw the days of the first simulated run, or the sweep",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object for each scenario")
    return options.parse_intermixed_args(arguments)


def _lives(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_LIVES:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST_LIVES:,}")
    return int(text)


def _sweep(text: str) -> tuple[str, tuple[str, ...]]:
    key, equals, values = text.partition("=")
    chosen = tuple(value.strip() for value in values.split(",") if value.strip())
    if not (equals and "." in key and chosen):
        raise ArgumentTypeError(f"{text!r} is not section.key=value,value,…")
    return key.strip(), chosen


def _print_scenarios(*, as_json: bool) -> int:
    for name in shipped_scenarios():
        notes = load_scenario(name).run.notes
        print(json_text({"name": name, "notes": notes}) if as_json else f"{name:<20}{notes:.80}")
    return 0


def _forecast(scenario: Scenario, options: Namespace, *, title: str) -> GoodputForecast:
    with _bar(title, options.lives) as done:
        return forecast(scenario, lives=options.lives, seed=options.seed, done=done)


@contextmanager
def _bar(title: str, lives: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each simulated run; on a terminal it advances a progress bar."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=lives)
        yield lambda: bars.advance(task)


def _forecast_text(result: GoodputForecast) -> str:
    scenario = result.scenario
    lines = [
        f"{scenario.run.name}: {scenario.run.days:g} days, {result.lives} lives",
        "",
        f"goodput {_goodput_text(result)}",
        "",
    ]
    causes = sorted(result.hours.items(), key=lambda item: -item[1])
    rows = [["where the time went", "hours", "share"]]
    rows += [[cause, f"{hours:,.1f}", f"{hours / scenario.hours:.2%}"] for cause, hours in causes if hours]
    lines += [table_text(rows, left=(0,)), ""]
    rows = [["what happened (mean of a life)", "times"]]
    rows += [[event, f"{times:,.1f}"] for event, times in result.events.items()]
    return "\n".join([*lines, table_text(rows, left=(0,)), *_advice(result)])


def _goodput_text(result: GoodputForecast) -> str:
    if result.lives == 1:
        return f"{result.goodput:.2%} (one life: no interval)"
    return f"{result.goodput:.2%}, 95% sure between {result.low:.2%} and {result.high:.2%}"


def _advice(result: GoodputForecast) -> list[str]:
    """Return lines that compare Young's best interval between saves with that of the scenario."""
    scenario, failures = result.scenario, result.events.get("failures", 0.0)
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


def _sweep_text(key: str, forecasts: Sequence[tuple[str, GoodputForecast]]) -> str:
    causes = [cause for cause in forecasts[0][1].hours if cause != TRAINING]
    mean = {cause: sum(result.hours[cause] for _, result in forecasts) for cause in causes}
    worst = sorted((cause for cause in causes if mean[cause] > 0.0), key=lambda cause: -mean[cause])[:3]
    rows = [[key, "goodput", "± (95%)", *worst]]
    for value, result in forecasts:
        shares = [f"{result.hours[cause] / result.scenario.hours:.2%}" for cause in worst]
        error = f"{(result.high - result.low) / 2.0:.2%}" if result.lives > 1 else "–"
        rows.append([value, f"{result.goodput:.2%}", error, *shares])
    best = max(forecasts, key=lambda item: item[1].goodput)
    return f"{table_text(rows, left=(0,))}\n\nbest: {key}={best[0]}"


def _as_json(result: GoodputForecast, key: str, value: str) -> dict[str, Any]:  # Any: JSON
    facts: dict[str, Any] = {
        "scenario": result.scenario.run.name,
        "days": result.scenario.run.days,
        "lives": result.lives,
        "goodput": result.goodput,
        "goodput_low": result.low if result.lives > 1 else None,
        "goodput_high": result.high if result.lives > 1 else None,
        "hours": dict(result.hours),
        "events": dict(result.events),
    }
    return facts | {"sweep": {key: value}} if key else facts


def _draw(options: Namespace, forecasts: Sequence[tuple[str, GoodputForecast]]) -> None:

    try:
        if options.sweep:
            draw_sweep(options.sweep[0], forecasts, options.png)
        else:
            draw_life(forecasts[0][1], options.png)
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


def draw_life(result: GoodputForecast, path: Path) -> None:
    """Draw the first simulated run: one bar per day, or for several days in a long run, divided by cause."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    days = max(1, round(result.scenario.run.days / MOST_BARS))
    bars = daily_hours(result.first, hours_a_bar=24.0 * days)
    figure, axes = pyplot.subplots(figsize=(11, 4.5), dpi=120)
    causes = [cause for cause in result.hours if any(bar.get(cause, 0.0) > 0.0 for bar in bars)]
    places, below = [index * days for index in range(len(bars))], [0.0] * len(bars)
    for cause in causes:
        shares = [100.0 * bar.get(cause, 0.0) / sum(bar.values()) for bar in bars]
        colour = COLOURS[list(result.hours).index(cause) % len(COLOURS)]
        axes.bar(
            places, shares, bottom=below, width=days * 0.92, align="edge", color=colour, label=f"{cause} "
        )
        below = [low + share for low, share in zip(below, shares, strict=True)]
    lost = result.first.hours.get("lost work", 0.0)
    title = f"{result.scenario.run.name}, first of {result.lives} lives: goodput {result.first.goodput:.1%}"
    if lost > 0.0:
        title += f" ({lost:.0f} h of the training shown were lost again)"
    lowest = min(bar.get(TRAINING, 0.0) / sum(bar.values()) for bar in bars)
    axes.set(xlabel="day", ylabel="% of the time", ylim=(max(0.0, 100.0 * lowest - 15.0), 100.0), title=title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(causes)))
    figure.tight_layout(rect=(0, 0.06 + 0.045 * ((len(causes) - 1) // 4), 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def draw_sweep(key: str, forecasts: Sequence[tuple[str, GoodputForecast]], path: Path) -> None:
    """Draw the goodput for each value of the swept setting, with its 95% interval.

    key: the setting.
    forecasts: each value of the setting, with its forecast.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    places = list(range(len(forecasts)))
    shares = [100.0 * result.goodput for _, result in forecasts]
    below = [100.0 * (result.goodput - result.low) if result.lives > 1 else 0.0 for _, result in forecasts]
    above = [100.0 * (result.high - result.goodput) if result.lives > 1 else 0.0 for _, result in forecasts]
    axes.errorbar(places, shares, yerr=[below, above], marker="o", capsize=4, color=COLOURS[0])
    axes.set_xticks(places, [value for value, _ in forecasts])
    axes.set(xlabel=key, ylabel="goodput (%)", title=f"{forecasts[0][1].scenario.run.name}: 95% intervals")
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def daily_hours(life: Life, *, hours_a_bar: float) -> list[dict[str, float]]:
    """Return the hours by cause in each period of `hours_a_bar` hours; the last period may be shorter."""
    bars: list[dict[str, float]] = []
    for begin, end, cause in life.spans:
        while begin < end:
            index = int(begin / hours_a_bar + 1e-9)
            while len(bars) <= index:
                bars.append({})
            stop = min(end, (index + 1) * hours_a_bar)
            bars[index][cause] = bars[index].get(cause, 0.0) + stop - begin
            begin = stop
    return bars
