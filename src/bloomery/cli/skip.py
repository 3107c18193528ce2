"""`bloomery skip`: asks a run never to use some samples, and says what that costs."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import MOST
from bloomery.cli.arguments import parser

if TYPE_CHECKING:
    from bloomery.events.journal import History
    from bloomery.events.run_directory import RunDirectory

EXAMPLES = """\
bloomery skip runs/demo --samples 4096:8192 --dry-run   say what that leaves out; change nothing
bloomery skip runs/demo --samples 4096:8192             never use the samples 4096 to 8191 of the stream
bloomery skip runs/demo --steps 300:500                 nor those of the steps 300 to 499"""


def run(arguments: list[str]) -> int:
    """Run `bloomery skip`; returns the exit status."""
    options = parser(
        "skip",
        "Let a run leave samples out of its stream. The run takes the request after its next step, all\n"
        "ranks and peers alike, and every checkpoint from then on remembers it.",
        examples=EXAMPLES,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    add_samples(options, required=True)
    options.add_argument("--dry-run", action="store_true", help="say what would be left out; ask for nothing")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    from bloomery.cli.run_inputs import run_directory
    from bloomery.events.journal import read_history
    from bloomery.events.switches import write_request

    rundir = run_directory(args.run)
    history = read_history(rundir)
    samples = samples_of(args, history)
    facts = skipped_facts(samples, history)
    if not args.dry_run:
        write_request(rundir, "skip", f"{samples.start}:{samples.stop}", keep=True)
    if args.json:
        print(json.dumps({"asked": not args.dry_run, **facts}))
        return 0
    print(skipped_words(facts))
    print(when_words(rundir, dry_run=args.dry_run))
    return 0


def add_samples(options: ArgumentParser, *, required: bool) -> None:
    """Add `--samples FIRST:END` and `--steps FIRST:END`, of which at most one is given."""
    either = options.add_mutually_exclusive_group(required=required)
    either.add_argument(
        "--samples",
        type=_span,
        metavar="FIRST:END",
        help="indices of the sample stream to leave out, the end not included",
    )
    either.add_argument(
        "--steps",
        type=_span,
        metavar="FIRST:END",
        help="leave out the samples of these steps, the end not included; of later ones by today's batch",
    )


def samples_of(args: Namespace, history: History) -> range:
    """Return the indices of the stream that were asked for; an empty range where none were."""
    if args.samples is not None:
        wanted: range = args.samples
        return wanted
    if args.steps is None:
        return range(0)
    return range(cursor_after(args.steps.start - 1, history), cursor_after(args.steps.stop - 1, history))


def cursor_after(step: int, history: History) -> int:
    """Return the index of the stream after a step; for a future step, the index at today's batch size."""
    if step <= 0 or not history.steps:
        return 0
    last = history.steps[-1].report
    if step >= last.step:
        return last.cursor + (step - last.step) * last.global_batch * last.peers
    return next(made.report.cursor for made in history.steps if made.report.step >= step)


def skipped_facts(samples: range, history: History) -> dict[str, Any]:
    """Return what leaving these samples out means for the run, as the fields that `--json` prints."""
    last = history.steps[-1].report if history.steps else None
    cursor = last.cursor if last else 0
    ahead = range(max(samples.start, cursor), max(samples.stop, cursor))
    batch = last.global_batch * last.peers if last else 0
    return {
        "samples": [samples.start, samples.stop],
        "left_out": len(ahead),
        "used_already": len(samples) - len(ahead),
        "steps_worth": len(ahead) / batch if batch else None,
    }


def skipped_words(facts: dict[str, Any]) -> str:
    """Return the facts as a sentence."""
    start, stop = facts["samples"]
    steps = "" if facts["steps_worth"] is None else f", {facts['steps_worth']:,.1f} steps' worth"
    text = f"Samples {start:,} to {stop - 1:,} of the stream: {facts['left_out']:,} are left out{steps}."
    if facts["used_already"]:
        text += f" {facts['used_already']:,} lie behind the run and stay used: `bloomery rewind` goes back."
    return text


def when_words(rundir: RunDirectory, *, dry_run: bool) -> str:
    """Return a sentence that says when the run takes the request."""
    from bloomery import durable

    if dry_run:
        return "Nothing was asked for: this was a dry run."
    try:
        with rundir.lock.open("rb") as lock:
            is_training = not durable.try_lock(lock.fileno(), shared=True)
    except FileNotFoundError:
        is_training = False
    except OSError:  # a file system without locks
        return "The run takes it after its next step, or after the first step of its next start."
    if is_training:
        return "The run takes it after its next step."
    return "The run is not training: it takes this after the first step of its next start."


def _span(text: str) -> range:
    first, colon, end = text.replace("_", "").partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ArgumentTypeError(f"{text!r} is not FIRST:END with FIRST below END")
    if int(end) > MOST:
        raise ArgumentTypeError(f"{end} is too much: at most {MOST:,}")
    return range(int(first), int(end))
