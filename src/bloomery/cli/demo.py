"""`bloomery demo`: trains, kills, resumes, evaluates, exports and samples a small model, in minutes."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli import INTERRUPTED
from bloomery.cli.argument_values import amount
from bloomery.cli.arguments import parser
from bloomery.cli.json_output import json_text
from bloomery.errors import TrainingFailed

if TYPE_CHECKING:
    from bloomery.cli.demo_steps import Fitted
    from bloomery.data.prepare import Prepared
    from bloomery.events.run_directory import RunDirectory

EXAMPLES = """\
bloomery demo                       run all parts: about nine minutes on two cores, less with more
bloomery demo --minutes 2           train for a shorter time, for a weaker model
bloomery demo --run runs/mine       use this run directory; the same command resumes an interrupted demo
bloomery demo --json                print one JSON object at the end
"""

TRAINING_MINUTES = 5.0
KILL_AFTER_SHARE = 0.15
"""The trainer is killed once it is past this share of its steps and has a checkpoint to lose work from."""
SLACK, LAST_SHARE = 1.25, 0.25
"""The multiple of its planned duration after which the training is stopped, and the demo goes on with what it
has; and the least share of that duration that a resumed training gets."""
PICTURE = "loss.png"
"""The demo draws this file last, so a run directory that has it holds a finished demo."""
PROMPT = "def read_lines(path):\n"


def run(arguments: list[str]) -> int:
    """Run all parts of the demo; returns 0 when every part worked."""
    options = _parse(arguments)
    printer = _StepPrinter(quiet=options.json)
    printer.say(
        "bloomery demo: a language model from nothing, on the source code of the Python that runs this"
    )
    from bloomery.cli.demo_steps import (
        compare_with_xz,
        draw_png,
        draw_terminal,
        export_verified,
        fitted_recipe,
        prepare_text,
        sample,
    )
    from bloomery.events.run_directory import RunDirectory

    rundir = RunDirectory(Path(options.run) if options.run else _next_directory())
    with printer.part("recipe", "Fitting the recipe to this machine"):
        fitted = fitted_recipe(rundir, minutes=options.minutes)
    printer.say(fitted.summary)
    with printer.part("data", "Training a tokenizer, writing the dataset"):
        prepared = prepare_text(fitted.loaded.recipe, rundir, shown=printer.shows_bars)
    printer.say(_about_data(prepared))
    with printer.part("training", "Training, with one kill -9 on the way"):
        fitted = _train_and_kill(
            rundir, fitted, printer, kill=not options.no_kill, duration_s=60 * options.minutes
        )
    with printer.part("evaluation", "Compressing the held-out files, ours and xz"):
        compression = compare_with_xz(fitted.loaded.recipe, prepared, rundir)
    printer.say(compression.summary)
    with printer.part("export", "Exporting to Hugging Face format, logits verified with transformers"):
        exported = export_verified(rundir)
    printer.say(exported.summary)
    with printer.part("sample", "Drawing the loss curve, and letting the model write"):
        picture = rundir.path / PICTURE
        draw_png(rundir, picture)
        text = sample(rundir, prompt=PROMPT)
    printer.say(draw_terminal(rundir))
    printer.say(f"The curve is also in {picture}. The model continues {PROMPT!r}:\n")
    printer.say("\n".join(f"  | {line}" for line in text.splitlines()))
    printer.say(_next_commands(rundir, fitted))
    if options.json:
        facts = {
            "bits_per_byte": compression.bits_per_byte,
            "xz_bits_per_byte": compression.xz_bits_per_byte,
            "seconds": printer.seconds,
            "tokens": fitted.tokens,
            "parameters": exported.parameters,
            "run": str(rundir.path),
        }
        print(json_text(facts))
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "demo",
        "Train a small language model on the source code of this Python's standard library. The training is\n"
        "killed once on the way and resumes; then the model is evaluated, exported and sampled.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "--run", metavar="DIR", help="the run directory (default: runs/demo, then runs/demo-2 and so on)"
    )
    options.add_argument(
        "--minutes",
        type=amount("a number of minutes above 0", above=0),
        metavar="M",
        default=TRAINING_MINUTES,
        help=f"duration of the training itself, in minutes (default: {TRAINING_MINUTES:g})",
    )
    options.add_argument("--no-kill", action="store_true", help="do not kill the trainer on the way")
    options.add_argument("--json", action="store_true", help="print only one JSON object, at the end")
    return options.parse_args(arguments)


def _next_directory() -> Path:
    """Return the first of runs/demo, runs/demo-2, … that holds no finished demo."""
    number, path = 1, Path("runs/demo")
    while (path / PICTURE).exists():
        number += 1
        path = Path(f"runs/demo-{number}")
    return path


class _StepPrinter:
    """Prints what happens, and measures how long each part takes.

    seconds: by part, its duration.
    quiet: whether nothing is printed.
    shows_bars: whether progress bars may be drawn.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.quiet = quiet
        self.shows_bars = not quiet and sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Print for people."""
        if not self.quiet:
            print(text, flush=True)

    @contextmanager
    def part(self, name: str, title: str) -> Iterator[None]:
        """Print the title of one part before it and its duration after it."""
        self.say(f"\n== {title}")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)
        self.say(f"   ({self.seconds[name]:.0f} s)")


def _train_and_kill(
    rundir: RunDirectory, fitted: Fitted, printer: _StepPrinter, *, kill: bool, duration_s: float
) -> Fitted:
    """Run `bloomery train` as a user would, kill it once with SIGKILL, and give the same command again.

    Returns the recipe that was trained: a shorter one where the machine became slower than it was measured.
    """
    from bloomery.cli.demo_steps import refitted

    started = time.monotonic()
    ends = started + SLACK * duration_s
    command = _command(rundir, fitted)
    printer.say(f"   $ bloomery {shlex.join(command)}")
    if kill and not _was_killed_before(rundir):
        step = _train_until_killed(rundir, command, printer, ends=ends)
        if step is None:
            return fitted
        left_s = max(started + duration_s - time.monotonic(), LAST_SHARE * duration_s)
        shorter = refitted(fitted, rundir, left_s=left_s)
        same = "The same command" if shorter is fitted else "This machine became slower: a shorter run"
        fitted, command = shorter, _command(rundir, shorter)
        printer.say(f"\n   kill -9 at step {step}: the trainer is gone. {same} goes on:")
        printer.say(f"   $ bloomery {shlex.join(command)}")
    with _training(command, printer) as process:
        _wait(process, printer, ends=max(ends, time.monotonic() + LAST_SHARE * duration_s))
    return fitted


def _command(rundir: RunDirectory, fitted: Fitted) -> list[str]:
    return ["train", fitted.name, *fitted.overrides, "--run", str(rundir.path)]


def _wait(process: subprocess.Popen[bytes], printer: _StepPrinter, *, ends: float) -> None:
    """Wait for the training to end, and let it save and stop at the time `ends`. Raises TrainingFailed."""
    try:
        process.wait(timeout=max(ends - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        printer.say(
            "   This takes too long here: the training is stopped, and the demo goes on with what it has."
        )
        process.send_signal(signal.SIGINT)  # it saves, then ends
        if process.wait() in (0, -signal.SIGINT, INTERRUPTED):
            return
    _raise_if_failed(process)


def _train_until_killed(
    rundir: RunDirectory, command: list[str], printer: _StepPrinter, *, ends: float
) -> int | None:
    """Start the training and kill it; returns the step it had reached, or None when it ended earlier."""
    from bloomery.checkpoint.format.catalogue import checkpoints
    from bloomery.config.load import load_recipe
    from bloomery.events.heartbeat import read_heartbeat
    from bloomery.plan.schedule import steps_of_run

    with _training(command, printer) as process:
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.2)
            beat = read_heartbeat(rundir.heartbeat()) or {}
            saved = checkpoints(rundir)
            if not saved or beat.get("pid") != process.pid:
                continue
            recipe = load_recipe(str(rundir.recipe)).recipe
            due = KILL_AFTER_SHARE * steps_of_run(recipe.train, sequence_length=recipe.data.sequence_length)
            if beat["step"] > max(due, saved[-1].step):
                process.kill()
                process.wait()
                return int(beat["step"])
        _wait(process, printer, ends=ends)
    return None


@contextmanager
def _training(command: list[str], printer: _StepPrinter) -> Iterator[subprocess.Popen[bytes]]:
    """Start the training as a process in this terminal; an exception inside the block stops it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", *command, "--no-hints"],
        stdout=subprocess.DEVNULL if printer.quiet else None,
    )
    try:
        yield process
    except BaseException:
        process.send_signal(signal.SIGINT)  # it saves, then ends
        process.wait()
        raise


def _raise_if_failed(process: subprocess.Popen[bytes]) -> None:
    if process.returncode:
        raise TrainingFailed(
            "The training of the demo failed; its own message is above.",
            remedy="`bloomery demo` resumes where it stopped.",
        )


def _was_killed_before(rundir: RunDirectory) -> bool:
    from bloomery.events.incarnation import current

    return current(rundir) > 1


def _about_data(prepared: Prepared) -> str:
    (train,), held_out = prepared.train, prepared.held_out
    lines = [
        f"   {train.documents:,} training files: {train.text_bytes / 1e6:.1f} MB, {train.tokens:,} tokens "
        f"({train.text_bytes / train.tokens:.2f} bytes per token, vocabulary {prepared.vocabulary_size:,})"
    ]
    lines += [
        f"   {dataset.documents:,} held-out files: {dataset.text_bytes / 1e6:.1f} MB, "
        f"{dataset.tokens:,} tokens"
        for dataset in held_out
    ]
    return "\n".join([*lines, *(f"   {note}" for note in prepared.notes)])


def _next_commands(rundir: RunDirectory, fitted: Fitted) -> str:
    # The command is shown as this process was called, because the environment may not be on the PATH.
    bloomery = Path(sys.argv[0]) if Path(sys.argv[0]).name == "bloomery" else "bloomery"
    return f"""
Three commands to try next:
  {bloomery} train {fitted.name} data.sources=YOUR.txt run.name=mine
      your own text: .txt, .jsonl, directories and globs of them
  {bloomery} train {fitted.name} --run {rundir.as_word()} train.tokens={2 * fitted.tokens}
      go on with this run, twice as long
  {bloomery} generate {rundir.as_word()} --prompt 'class Queue:'
      let it write
"""
