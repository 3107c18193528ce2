"""`bloomery report`: where a run's time went, as a table, JSON or picture; `bloomery note`: its chronicle."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import page_file, picture_file
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import existing_run
from bloomery.cli.tables import table_text
from bloomery.errors import TrainingFailed, UsageError, storage_error

if TYPE_CHECKING:
    from bloomery.operate.ledger.figures import PlannedRun
    from bloomery.operate.ledger.run_ledger import RunLedger


EXAMPLES = """\
bloomery report runs/mine                                   every second since the first start, by class
bloomery report runs/mine --png goodput.png                 the same over time, as a picture
bloomery plan my.toml --hardware h100 --json > plan.json
bloomery report runs/mine --plan plan.json                  forecast beside what came
bloomery report runs/mine --html mine.html                  the dashboard's page as one file, to be sent
bloomery report runs/mine --json
"""
_BARS = 120


def run(arguments: list[str]) -> int:
    """Print the goodput ledger of a run; returns 0."""
    options = _parse(arguments)
    from bloomery.operate.ledger.figures import ledger_figures, read_plan
    from bloomery.operate.ledger.run_ledger import read_ledger

    plan = read_plan(options.plan) if options.plan is not None else None
    rundir = existing_run(options.run)
    ledger = read_ledger(rundir, until=options.until, bins=_BARS if options.png else 0)
    if ledger is None:
        raise TrainingFailed(
            f"{rundir.path} has no journal: nothing was ever started in it.",
            remedy="Start it with `bloomery launch` or `bloomery train`.",
        )
    if options.json:
        print(json_text(ledger_figures(ledger, plan)))
    else:
        print(report_text(ledger, plan))
    if options.html is not None:
        _write_page(options.html, rundir.path, plan)
    if options.png is not None:
        try:
            draw_ledger(ledger, options.png, title=str(rundir.path))
        except OSError as refused:
            raise storage_error(refused, path=options.png, doing="Drawing") from refused
    written = [file for file in (options.html, options.png) if file is not None]
    if written and not options.json:
        print(f"wrote {' and '.join(map(str, written))}")
    return 0


def _write_page(file: Path, run: Path, plan: PlannedRun | None) -> None:
    from bloomery import durable
    from bloomery.operate.dashboard.saved_page import saved_page

    try:
        durable.write_whole(file, saved_page([run], plan=plan))
    except OSError as refused:
        raise storage_error(refused, path=file, doing="Writing the page") from refused


def report_text(ledger: RunLedger, plan: PlannedRun | None = None) -> str:
    """Return the ledger as text for a terminal, at most 100 columns wide."""
    from bloomery.operate.ledger.figures import duration, percentages
    from bloomery.operate.ledger.time_class import MEANINGS

    history, seconds = ledger.history, ledger.seconds
    each = len(ledger.ranks) or 1
    shares = percentages(list(seconds.values()))
    rows = [["class", "time", "share", "what it is"]]
    for (kind, spent), share in zip(seconds.items(), shares, strict=True):
        rows.append([str(kind), duration(spent / each), f"{share:.1f}%", MEANINGS[kind]])
    rows.append(["all", duration(ledger.total_s / each), f"{sum(shares):.1f}%", _window(ledger)])
    parts = [table_text(rows, left={0, 3}), "", _figures_text(ledger, plan)]
    causes = ledger.by_cause()
    if causes:
        rows = [["cause", "incidents", "time", "steps lost"]]
        for cause, (number, spent, steps) in causes.items():
            rows.append([cause[:50], f"{number}", duration(spent), f"{steps:,}"])
        parts += ["", table_text(rows, left={0})]
    parts += [
        "",
        f"step {history.step:,}; {history.kept_steps:,} steps and {history.kept_tokens:,} tokens kept",
    ]
    return "\n".join(parts)


def _window(ledger: RunLedger) -> str:
    begin, end = (datetime.fromtimestamp(time).strftime("%d %b %H:%M") for time in (ledger.begin, ledger.end))
    ranks = len(ledger.ranks)
    return f"{begin} to {end}, mean of {ranks} rank{'s' if ranks != 1 else ''}"


def _figures_text(ledger: RunLedger, plan: PlannedRun | None) -> str:
    from bloomery.operate.ledger.figures import plan_figures

    best = f"{ledger.best_tokens_per_s:,.0f} tokens/s"
    rows = [
        ["figure", "", "definition"],
        ["effective time", f"{ledger.effective_time:.1%}", "kept steps / all time"],
        [
            "ETTR",
            f"{ledger.ettr:.1%}",
            "kept steps / (all time - deliberate stops); time in the queue counts as lost",
        ],
        ["goodput of tokens", f"{ledger.token_goodput():.1%}", f"kept tokens / (all time x {best})"],
    ]
    if plan is not None:
        beside = plan_figures(ledger, plan)
        days = "-" if beside["days"] is None else f"{beside['days']:,.1f}"
        rows += [
            [
                "goodput vs. plan",
                f"{beside['token_goodput_of_plan']:.1%}",
                "kept tokens / (all time x the plan's tokens/s)",
            ],
            ["planned goodput", f"{plan.goodput:.1%}", "planned training days / planned calendar days"],
            ["planned speed", f"{plan.tokens_per_s:,.0f}", f"tokens/s; measured {best}"],
            ["planned days", f"{plan.days:,.1f}", f"at the pace so far: {days}"],
        ]
    return table_text(rows, left={0, 2})


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "report",
        "Print where the time of a run went: every second of every rank since its start has one class.\n"
        "A run that is over is counted up to its last event, any other one up to now.",
        examples=EXAMPLES,
    )
    options.add_argument("run", metavar="RUN", help="the run directory")
    options.add_argument("--json", action="store_true", help="print all figures as JSON")
    options.add_argument("--png", type=picture_file, metavar="FILE", help="draw the classes over time")
    options.add_argument(
        "--html", type=page_file, metavar="FILE", help="write the dashboard's page as one file"
    )
    options.add_argument("--plan", type=Path, metavar="FILE", help="what `bloomery plan … --json` printed")
    options.add_argument(
        "--until", type=_time, metavar="TIME", help="count up to this time, as in 2026-01-31T12:00"
    )
    return options.parse_args(arguments)


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a time such as 2026-01-31T12:00") from None


def draw_ledger(ledger: RunLedger, path: Path, *, title: str) -> None:
    """Draw the share of each class in each part of the run's time. Raises OSError.

    ledger: one that was read with bins.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    hours = (ledger.end - ledger.begin) / 3600
    width = hours / max(1, len(ledger.bins))
    kinds = list(ledger.seconds)
    colours = [pyplot.get_cmap("tab20")(place) for place in range(20)]
    figure, axes = pyplot.subplots(figsize=(11, 5), dpi=120)
    places = [index * width for index in range(len(ledger.bins))]
    below = [0.0] * len(places)
    sums = [sum(part.values()) or 1.0 for part in ledger.bins]
    for index, kind in enumerate(kinds):
        shares = [100.0 * part.get(kind, 0.0) / whole for part, whole in zip(ledger.bins, sums, strict=True)]
        colour = colours[index % len(colours)]
        axes.bar(places, shares, bottom=below, width=width, align="edge", color=colour, label=str(kind))
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set(
        xlabel="hours since the first start",
        ylabel="% of all ranks' time",
        ylim=(0, 100),
        title=f"{title}: effective time {ledger.effective_time:.1%}, ETTR {ledger.ettr:.1%}",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


_NOTE_EXAMPLES = """\
bloomery note runs/mine "node7 went back to the vendor"
bloomery note runs/mine                                   write chronicle.md anew, without a note
"""


def note(arguments: list[str]) -> int:
    """Add a note and write the chronicle; returns 0."""
    options = parser(
        "note",
        "Add a note to RUN/chronicle.md, which is generated from the run's records: each problem, its\n"
        "diagnosis, what was done and what it cost. Notes, and text below its last line, are kept.",
        examples=_NOTE_EXAMPLES,
    )
    options.add_argument("run", metavar="RUN", help="the run directory")
    options.add_argument("text", metavar="TEXT", nargs="?", help="the note")
    options.add_argument("--by", default="", metavar="NAME", help="who writes it (default: your account)")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_args(arguments)
    from bloomery.operate.ledger.chronicle import add_note, write_chronicle

    rundir = existing_run(chosen.run)
    if chosen.text is not None:
        if not chosen.text.strip():
            raise UsageError("The note is empty.", remedy='Write it: bloomery note RUN "what happened"')
        add_note(rundir, chosen.text, by=chosen.by)
    path = write_chronicle(rundir)
    if chosen.json:
        print(json_text({"noted": chosen.text, "chronicle": None if path is None else str(path)}))
    elif path is None:
        print("noted; the chronicle begins with the first start of the run")
    else:
        print(path)
    return 0
