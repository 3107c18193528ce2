"""`bloomery top`: shows runs live in the terminal: state, progress, sparklines and newest events."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from bloomery.cli.arguments import parser
from bloomery.cli.end_signal import EndSignal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bloomery.operate.dashboard.run_reader import RunReader
    from bloomery.operate.dashboard.run_summary import RunSummarizer, RunSummary

EXAMPLES = """\
bloomery top runs/mine                 until Ctrl-C
bloomery top runs/a runs/b             one block for each run
bloomery top runs/mine --once          print it once, for a log or a pipe
"""
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*#@"
_LINES = (
    ("loss", "loss~", "loss"),
    ("gradient norm", "gradient_norm~", "gradient_norm"),
    ("tokens/s", "tokens_per_s~", "tokens_per_s"),
    ("step, s", "seconds~", "seconds"),
)
_EVENTS, _WIDEST, _NARROWEST = 4, 120, 40
_COLOURS = {"good": "green", "attention": "yellow", "bad": "red"}


def run(arguments: list[str]) -> int:
    """Show the runs until a signal comes, or once; returns 1 where one is in a bad state, else 0."""
    options = _parse(arguments)
    from rich.console import Console

    from bloomery.operate.dashboard.run_reader import RunReader
    from bloomery.operate.dashboard.run_summary import RunSummarizer

    console = Console(highlight=False, width=None if sys.stdout.isatty() else options.columns)
    runs = [
        (reader, RunSummarizer(reader))
        for reader in (RunReader(Path(path)).read_all() for path in options.runs)
    ]
    if options.once or not sys.stdout.isatty():
        summaries = [summarizer.summary() for _, summarizer in runs]
        for (reader, _), summary in zip(runs, summaries, strict=True):
            console.print(run_block(reader, summary, width=min(console.width, _WIDEST)))
        return int(any(summary.health == "bad" for summary in summaries))
    _watch(console, runs, options)
    return 0


def _watch(console: object, runs: Sequence[tuple[RunReader, RunSummarizer]], options: Namespace) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    assert isinstance(console, Console)
    ended = EndSignal()

    def screen() -> RenderableType:
        width = min(console.width, _WIDEST)
        return Group(*(run_block(reader, summarizer.summary(), width=width) for reader, summarizer in runs))

    with Live(screen(), console=console, screen=True, auto_refresh=False) as live:
        while not ended.wait(options.interval):
            for reader, _ in runs:
                reader.poll()
            live.update(screen(), refresh=True)


def run_block(reader: RunReader, summary: RunSummary, *, width: int) -> RenderableType:
    """Return what is shown of one run, in lines of at most `width` columns. Texts of a journal stay text."""
    from rich.text import Text

    from bloomery.operate.dashboard.run_events import plain

    width = max(_NARROWEST, width)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(
        plain(f"{summary.name}: {summary.state}"), style=f"bold {_COLOURS.get(summary.health, '')}".strip()
    )
    text.append(f" ({plain(summary.why)})\n" if summary.why else "\n")
    for problem in summary.problems:
        for line in wrap(plain(problem), width - 2):
            text.append(f"  {line}\n", style="red")
    if summary.step is not None:
        text.append(f"  {_progress(summary, width - 4)}\n")
        text.append(f"  {plain(_saved(summary))}\n")
        for title, smooth, column in _LINES:
            if line := _sparkline(reader, title, smooth, column, width):
                text.append(f"  {line}\n")
    text.append(f"  {summary.night}\n")
    for event in sorted(reader.news.events, key=lambda event: event.time)[-_EVENTS:]:
        step = "" if event.step is None else f"step {event.step:,} "
        colour = {"bad": "red", "warning": "yellow"}.get(event.level, "")
        text.append(f"  {_clock(event.time)} {step}{event.kind}: {event.text}\n", style=colour)
    for line in wrap(f"to do: {plain(' '.join(summary.advice))}", width - 2):
        text.append(f"  {line}\n", style="bold")
    for row in (lines := text.split(allow_blank=False)):
        row.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def sparkline(values: Sequence[float], *, signs: str = _BLOCKS) -> str:
    """Return one sign for each value, from the lowest to the highest; a blank where a value is NaN."""
    finite = [value for value in values if value == value]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    scale = (len(signs) - 1) / (high - low) if high > low else 0.0
    return "".join(signs[round((value - low) * scale)] if value == value else " " for value in values)


def _sparkline(reader: RunReader, title: str, smooth: str, column: str, width: int) -> str:
    from bloomery.operate.dashboard.curves import curves

    now = reader.columns.last(column)
    room = max(10, width - 30)
    drawn = curves(reader, [smooth], points=room)
    if now is None or not drawn:
        return ""
    encoding = sys.stdout.encoding or ""
    signs = _BLOCKS if "utf" in encoding.lower() else _ASCII
    return f"{title:<13} {now:>10.4g} {sparkline(drawn[0].y, signs=signs)}"


def _progress(summary: RunSummary, width: int) -> str:
    from bloomery.operate.dashboard.run_summary import left_words

    of = f"/{summary.steps:,}" if summary.steps else ""
    parts = [f"step {summary.step:,}{of}"]
    if summary.done is not None:
        filled = round(20 * summary.done)
        parts.insert(0, f"[{'#' * filled}{'.' * (20 - filled)}] {summary.done:.1%}")
    parts += [f"{summary.step_s:.3g} s/step"] if summary.step_s is not None else []
    parts += [left_words(summary)] if summary.left_s else []
    return ", ".join(parts)


def _saved(summary: RunSummary) -> str:
    parts = [f"loss {summary.loss:.4f}" if summary.loss is not None else "loss not finite"]
    parts += [f"held out {summary.held_out:.4f}"] if summary.held_out is not None else []
    parts += [f"saved at step {summary.saved_step:,}"] if summary.saved_step is not None else ["never saved"]
    parts += [f"{summary.ranks} × {summary.device}"] if summary.ranks else []
    parts += [f"last sign {_clock(summary.written)}"] if summary.written else []
    return ", ".join(parts)


def _clock(moment: float) -> str:
    from bloomery.operate.ledger.operations import LATEST_TIME

    if not 0.0 <= moment < LATEST_TIME:
        return "--:--:--"
    return datetime.fromtimestamp(moment).strftime("%m-%d %H:%M:%S")


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "top",
        "Show runs in the terminal: state, progress, time left, sparklines of curves, newest events, what\n"
        "to do. It only reads run directories. Without a terminal it prints once. Exit status 1: a run\n"
        "needs attention.",
        examples=EXAMPLES,
    )
    options.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    options.add_argument("--once", action="store_true", help="print once and end")
    options.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="S", help="seconds between looks (2)"
    )
    columns = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdecimal() else 80
    options.add_argument(
        "--columns", type=int, default=columns, metavar="N", help="width without a terminal ($COLUMNS, or 80)"
    )
    return options.parse_intermixed_args(arguments)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600.0:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds
