"""`bloomery guard replay`: applies the guards to an old log, and shows what they would have done."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import picture_file
from bloomery.cli.arguments import parser, run_subcommand
from bloomery.cli.json_output import json_text
from bloomery.errors import StorageError, TrainingFailed, storage_error

if TYPE_CHECKING:
    from bloomery.config.checkpoint import GuardSection
    from bloomery.guard.logs import Columns
    from bloomery.guard.replay import ReplayFinding
    from bloomery.guard.verdict import Rewind

EXAMPLES = """\
bloomery guard replay runs/demo                       a run's own journal
bloomery guard replay training.log --png spikes.png   the log of a Megatron-style run, drawn
bloomery guard replay training.log --follow           a log that is still growing, until Ctrl-C
bloomery guard replay training.log --json guard.spike_patience=20"""

MOST_SHOWN = 200  # findings in the terminal
FOLLOW_S = 2.0
"""The least seconds between two readings of a growing log; or three times what the last one took."""


def run(arguments: list[str]) -> int:
    """Run one of the commands of `bloomery guard`, and return the exit status."""
    subcommands = {
        "replay": (replay, "report what the guards would have found in an old or a growing log"),
    }
    return run_subcommand("guard", arguments, subcommands, about="Apply the guards to the log of a training.")


def replay(arguments: list[str]) -> int:
    """Apply the guards to a log and print what they find, and return the exit status."""
    options = parser(
        "guard replay",
        "Apply the guards to a log as to a run: a run directory, its journal, or lines of a Megatron-style\n"
        "log (iteration …| lm loss: … | grad norm: …). Fields may be missing: a line without `lm loss` is a\n"
        "NaN. Nothing is changed; a line that is still being written is left out.",
        examples=EXAMPLES,
    )
    options.add_argument("log", type=Path, metavar="LOG", help="a run directory, a journal, or a text log")
    options.add_argument(
        "overrides", metavar="guard.key=value", nargs="*", help="settings of [guard] to judge by"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument(
        "--png", type=picture_file, metavar="PATH", help="draw losses and findings into this file"
    )
    options.add_argument(
        "--follow", action="store_true", help="go on with what is added to the log, until Ctrl-C"
    )
    return _replay(options.parse_intermixed_args(arguments))


def _replay(options: Namespace) -> int:
    from bloomery.guard.logs import read_columns
    from bloomery.guard.replay import replay_columns

    section = _section(options.log, options.overrides)
    if options.follow:
        return _follow(options, section)
    columns = read_columns(_log(options.log))
    findings = replay_columns(columns, section)
    if options.png:
        _draw(columns, findings, options)
    if options.json:
        print(json_text(_facts(columns, findings), ensure_ascii=False))
        return 0
    steps = f"steps {int(columns.step[0]):,} to {int(columns.step[-1]):,}"
    print(f"{len(columns):,} lines, {steps}: {_counted(findings)}")
    for finding in findings[:MOST_SHOWN]:
        print(_line(finding))
    if len(findings) > MOST_SHOWN:
        print(f"  … and {len(findings) - MOST_SHOWN:,} more: --json has all of them")
    if options.png:
        print(f"Drawn into {options.png}.")
    return 0


def _follow(options: Namespace, section: GuardSection) -> int:
    """Print each finding once, as the log grows; with --json one object per line. Returns 0 at Ctrl-C."""
    from bloomery.guard.judge import described
    from bloomery.guard.logs import LogReader
    from bloomery.guard.replay import replay_columns

    path, size, printed = _log(options.log), -1, set[tuple[str, int]]()
    reader = LogReader(path)
    try:
        while True:
            begun = time.monotonic()
            if (now := path.stat().st_size) != size:
                if now < size:  # another log has begun under its name
                    printed.clear()
                size = now
                columns = reader.columns(may_be_empty=True)
                findings = replay_columns(columns, section) if len(columns) else []
                for finding in findings:
                    if (finding.guard, finding.line) in printed:
                        continue
                    printed.add((finding.guard, finding.line))
                    facts = {"step": finding.step, "guard": finding.guard, **described(finding.verdict)}
                    print(
                        json_text(facts, ensure_ascii=False) if options.json else _line(finding), flush=True
                    )
                if options.png and len(columns):
                    _draw(columns, findings, options)
            time.sleep(max(FOLLOW_S, 3.0 * (time.monotonic() - begun)))
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", remedy="Check the path.") from error


def _draw(columns: Columns, findings: Sequence[ReplayFinding], options: Namespace) -> None:
    try:
        draw_replay(columns, findings, options.png, title=options.log.name)
    except OSError as refused:
        raise storage_error(refused, path=options.png, doing="Drawing") from refused


def _line(finding: ReplayFinding) -> str:
    return f"  step {finding.step:,} | {finding.guard} | {_action(finding)}: {finding.verdict.reason}"


def _section(log: Path, overrides: Sequence[str]) -> GuardSection:
    """The settings to judge by: of a run directory its own, else the defaults, with what was given."""
    from bloomery.config.load import load_recipe
    from bloomery.errors import ConfigError, Mistake

    others = [text for text in overrides if not text.startswith("guard.")]
    if others:
        problem, remedy = "is not a setting of [guard]", "Write guard.key=value: an old log has no other."
        raise ConfigError(
            [
                Mistake(key=text, value=None, source="command line", problem=problem, remedy=remedy)
                for text in others
            ]
        )
    recorded = log / "recipe.toml"
    return load_recipe(str(recorded) if recorded.exists() else "demo", overrides).recipe.guard


def _log(path: Path) -> Path:
    """The file to read: of a run directory, its first rank's journal, whatever the name of its peer."""
    from bloomery.events.run_directory import RunDirectory

    if not path.is_dir():
        return path
    rundir = RunDirectory(path)
    written = [journal for journal in (rundir.journal(), *rundir.journals()) if journal.exists()]
    if not written:
        raise TrainingFailed(
            f"{path} has no journal: nothing was ever started in it.",
            remedy="Give a run that has trained, its journal, or the log of a Megatron-style run.",
        )
    return written[0]


def _action(finding: ReplayFinding) -> str:
    from bloomery.guard.verdict import Rewind, Watch

    verdict = finding.verdict
    if isinstance(verdict, Watch):
        return f"would tell ({verdict.kind})"
    if isinstance(verdict, Rewind):
        return f"would rewind to step {verdict.to_step:,}{_after_rewind(verdict, finding)}"
    return "would stop"


def _after_rewind(verdict: Rewind, finding: ReplayFinding) -> str:
    """What the run would do from the step on that it went back to."""
    unit = "steps' samples" if finding.in_steps else "samples"
    if verdict.skip:
        return f" and skip {len(verdict.skip):,} {unit}"
    again = getattr(finding.again, "skip", range(0))
    skipped = f"skip {len(again):,} {unit}" if again else "stop"
    return f", make the same steps again and, if it came again, {skipped}"


def _counted(findings: Sequence[ReplayFinding]) -> str:
    if not findings:
        return "nothing would have been said"
    kinds = [type(finding.verdict).__name__.lower() for finding in findings]
    named = {"watch": "told", "rewind": "rewinds", "stop": "stops"}
    return ", ".join(f"{kinds.count(kind)} {name}" for kind, name in named.items() if kind in kinds)


def _facts(columns: Columns, findings: Sequence[ReplayFinding]) -> dict[str, Any]:
    from bloomery.guard.judge import described

    return {
        "lines": len(columns),
        "first_step": int(columns.step[0]),
        "last_step": int(columns.step[-1]),
        "findings": [
            {
                "step": finding.step,
                "line": finding.line,
                "guard": finding.guard,
                **described(finding.verdict),
                **({"if_it_came_again": described(finding.again)} if finding.again else {}),
                **({"skip_in": "steps"} if finding.in_steps else {}),
            }
            for finding in findings
        ],
    }


COLOURS = {"rewind": "#c1292e", "stop": "#000000", "watch": "#e87f3a"}
BINS = 4000  # of the drawn curve, each with its lowest and highest loss
MOST_MARKS = 300  # findings in the picture


def draw_replay(columns: Columns, findings: Sequence[ReplayFinding], path: Path, *, title: str) -> None:
    """Draw the loss by step, its lowest and highest of each bin where there are many, and the findings."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5), dpi=120)
    finite = np.flatnonzero(np.isfinite(columns.loss))
    width = max(1, -(-len(finite) // BINS))
    starts = np.arange(0, len(finite), width)
    steps, losses = columns.step[finite], columns.loss[finite]
    if width > 1:
        lowest, highest = np.minimum.reduceat(losses, starts), np.maximum.reduceat(losses, starts)
        axes.fill_between(steps[starts], lowest, highest, color="tab:blue", alpha=0.35, linewidth=0)
    axes.plot(steps[starts], losses[starts], color="tab:blue", linewidth=0.8, label="loss")
    named: set[str] = set()
    for finding in findings[:MOST_MARKS]:
        action = type(finding.verdict).__name__.lower()
        label = None if action in named else {"watch": "told"}.get(action, action)
        named.add(action)
        axes.axvline(finding.step, color=COLOURS[action], linewidth=1, linestyle=":", label=label)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
