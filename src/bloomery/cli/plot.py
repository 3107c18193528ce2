"""`bloomery plot`: draws the curves of one run or several as a PNG, SVG or PDF."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import amount, picture_file
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import existing_run
from bloomery.errors import BloomeryError, ConfigError, Mistake, storage_error

if TYPE_CHECKING:
    from bloomery.operate.dashboard.run_reader import RunReader

EXAMPLES = """\
bloomery plot runs/mine                                          curves.png: loss, gradient norm, rate, speed
bloomery plot runs/a runs/b --against tokens --output both.svg   two runs in the same charts
bloomery plot runs/mine --columns loss mfu --from 1000 --to 2000
"""
COLUMNS = ("loss", "gradient_norm", "learning_rate", "tokens_per_s")
PLANNED = ("learning_rate", "global_batch")
"""Columns that the recipe decides: smoothing would only blur them."""
_MARKERS = ("o", "s", "^", "v", "D")
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_POINTS = 3000


def run(arguments: list[str]) -> int:
    """Write the picture and print its path; returns 0."""
    options = _parse(arguments)
    from bloomery.operate.dashboard.run_reader import RunReader

    readers = [RunReader(existing_run(path).path).read_all() for path in options.runs]
    for reader in readers:
        for problem in reader.problems():
            print(f"{reader.name}: {problem}", file=sys.stderr)
    columns = {name for reader in readers for name in reader.columns.names}
    if unknown := [name for name in options.columns if name not in columns]:
        raise _no_column(unknown[0], columns)
    try:
        draw(readers, options)
    except OSError as refused:
        raise storage_error(refused, path=options.output, doing="Drawing") from refused
    print(json_text({"picture": str(options.output)}) if options.json else options.output)
    return 0


def draw(readers: list[RunReader], options: Namespace) -> None:
    """Draw one chart for each column, the runs in the colours of the dashboard. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import dates, pyplot

    untyped: Any = dates

    count = len(options.columns)
    wide = 1 if count == 1 else 2
    high = -(-count // wide)
    figure, grid = pyplot.subplots(high, wide, figsize=(6.2 * wide, 3.6 * high), dpi=120, squeeze=False)
    for axes, column in zip(grid.flat, options.columns, strict=False):
        for place, reader in enumerate(readers):
            _draw_run(
                axes, reader, column, _COLOURS[place % len(_COLOURS)], options, is_one=len(readers) == 1
            )
        axes.set(title=column.replace("_", " "), xlabel=options.against)
        if options.against == "time":
            locator = untyped.AutoDateLocator()
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(untyped.ConciseDateFormatter(locator))
        if options.log:
            axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    for axes in list(grid.flat)[count:]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(options.output)
    pyplot.close(figure)


def _draw_run(
    axes: Any, reader: RunReader, column: str, colour: str, options: Namespace, *, is_one: bool
) -> None:  # Any: matplotlib has no types
    from bloomery.operate.dashboard.curves import curves
    from bloomery.operate.dashboard.panels import events_with_places
    from bloomery.operate.dashboard.step_columns import HELD_OUT

    prefix = "" if is_one else f"{reader.name}: "
    held_out = [name for name in reader.columns.sparse if name.split("/")[0] == HELD_OUT]
    is_planned = column in PLANNED
    names = [f"{column}!", column, *([] if is_planned else [f"{column}~"])]
    names += sorted(held_out) if column == "loss" else []
    labelled = False
    drawn = curves(reader, names, axis=options.against, begin=options.begin, end=options.end, points=_POINTS)
    low, high = math.inf, -math.inf
    for curve in drawn:
        label = ""
        if curve.name == f"{column}!":
            style: dict[str, Any] = {"color": "#808080", "linewidth": 0.8, "linestyle": ":"}
            labelled, label = True, "" if labelled else "discarded"
        elif curve.name == column:
            style = {"color": colour} | ({} if is_planned else {"linewidth": 0.6, "alpha": 0.45})
            label = "each step" if is_planned else ""
        elif curve.name == f"{column}~":
            style, label = {"color": colour, "linewidth": 1.6}, "smoothed"
        else:
            place = held_out.index(curve.name)
            style = {"color": colour, "marker": _MARKERS[place % len(_MARKERS)], "markersize": 4}
            style["linestyle"], label = "--", curve.name.replace("_", " ").replace("/", " ")
        axes.plot(_places(curve.x, options), curve.y, **style, label=prefix + label if label else None)
        low, high = min([low, *curve.x[:1]]), max([high, *curve.x[-1:]])
    for event in events_with_places(reader):
        at = event["at"].get(options.against)
        if event["level"] == "bad" and at is not None and low <= at <= high:
            axes.axvline(_places([at], options)[0], color="#a3200d", linewidth=0.8, alpha=0.6)


def _places(numbers: Sequence[float], options: Namespace) -> Sequence[Any]:  # Any: dates on the axis of time
    if options.against != "time":
        return numbers
    return [datetime.fromtimestamp(seconds) for seconds in numbers]


def _no_column(name: str, known: set[str]) -> BloomeryError:
    return ConfigError(
        [
            Mistake(
                key="--columns",
                value=name,
                source="command line",
                problem="is no column of these runs",
                remedy=f"There are {', '.join(sorted(known))}." if known else "No step was recorded yet.",
            )
        ],
        of="the command line",
    )


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "plot",
        "Draw the curves of runs: each step thin, smoothed thick, held-out losses as points, what a rewind\n"
        "or a crash discarded grey and dotted, failures and rewinds as red lines.",
        examples=EXAMPLES,
    )
    options.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    options.add_argument(
        "--output",
        type=picture_file,
        default=Path("curves.png"),
        metavar="FILE",
        help=".png, .svg or .pdf (curves.png)",
    )
    options.add_argument("--columns", nargs="+", default=list(COLUMNS), metavar="NAME", help="what to draw")
    options.add_argument(
        "--against", choices=("step", "tokens", "time"), default="step", help="the axis (step)"
    )
    options.add_argument(
        "--from", dest="begin", type=amount("a number"), metavar="X", help="where the axis begins"
    )
    options.add_argument("--to", dest="end", type=amount("a number"), metavar="X", help="where the axis ends")
    options.add_argument("--log", action="store_true", help="logarithmic y axis")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_intermixed_args(arguments)
    if chosen.begin is not None and chosen.end is not None and chosen.begin >= chosen.end:
        options.error(f"--from {chosen.begin:g} is not below --to {chosen.end:g}")
    return chosen
