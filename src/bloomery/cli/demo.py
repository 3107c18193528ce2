"""`bloomery demo`: the main job from nothing to a sample, on the text of the Python that runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import parser
from bloomery.errors import TrainingFailed

if TYPE_CHECKING:
    from bloomery.cli.demo_parts import Fitted
    from bloomery.data.prepare import Prepared
    from bloomery.events.rundir import RunDir

EXAMPLES = """\
bloomery demo                       about nine minutes on two cores, less where there are more
bloomery demo --minutes 2           a shorter training, a weaker model
bloomery demo --run runs/mine       elsewhere; an interrupted demo goes on with the same command
bloomery demo --json                ends with one JSON object
"""

TRAINING_MINUTES = 5.0
KILL_AFTER_SHARE = 0.15
"""The trainer is killed once it is past this share of its steps and has a checkpoint to lose work from."""
PICTURE = "loss.png"
"""Drawn last: a run directory that has it holds a demo that came to its end."""
PROMPT = "def read_lines(path):\n"


def run(arguments: list[str]) -> int:
    """Train, kill, resume, evaluate, export, draw and sample; 0 when all of it worked."""
    options = _parse(arguments)
    tell = _Teller(quiet=options.json)
    tell.say("bloomery demo: a language model from nothing, on the source code of the Python that runs this")
    from bloomery.cli.curve import draw_png, draw_terminal
    from bloomery.cli.demo_parts import (
        compare_with_xz,
        export_verified,
        fitted_recipe,
        prepare_text,
        sample,
    )
    from bloomery.events.rundir import RunDir

    rundir = RunDir(Path(options.run) if options.run else _next_directory())
    with tell.part("recipe", "Fitting the recipe to this machine"):
        fitted = fitted_recipe(rundir, minutes=options.minutes)
    tell.say(fitted.told)
    with tell.part("data", "Training a tokenizer, writing the dataset"):
        prepared = prepare_text(fitted.loaded.recipe, rundir, shown=tell.shows_bars)
    tell.say(_about_data(prepared))
    with tell.part("training", "Training, with one kill -9 on the way"):
        _train_and_kill(rundir, fitted, tell, kill=not options.no_kill)
    with tell.part("evaluation", "Compressing the held-out files, ours and xz"):
        compression = compare_with_xz(fitted.loaded.recipe, prepared, rundir)
    tell.say(compression.told)
    with tell.part("export", "Exporting to Hugging Face format, logits verified with transformers"):
        exported = export_verified(rundir)
    tell.say(exported.told)
    with tell.part("sample", "Drawing the loss curve, and letting the model write"):
        picture = rundir.path / PICTURE
        draw_png(rundir, picture)
        text = sample(rundir, prompt=PROMPT)
    tell.say(draw_terminal(rundir))
    tell.say(f"The curve is also in {picture}. The model continues {PROMPT!r}:\n")
    tell.say("\n".join(f"  | {line}" for line in text.splitlines()))
    tell.say(_next_commands(rundir, fitted))
    if options.json:
        facts = {
            "bits_per_byte": compression.bits_per_byte,
            "xz_bits_per_byte": compression.xz_bits_per_byte,
            "seconds": tell.seconds,
            "tokens": fitted.tokens,
            "parameters": exported.parameters,
            "run": str(rundir.path),
        }
        print(json.dumps(facts))
    return 0


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "demo", "Train a small language model on real text, and see it survive a kill.", examples=EXAMPLES
    )
    options.add_argument(
        "--run", metavar="DIR", help="the run directory; by default runs/demo, then runs/demo-2 and so on"
    )
    options.add_argument(
        "--minutes",
        type=float,
        default=TRAINING_MINUTES,
        help=f"length of the training itself; by default {TRAINING_MINUTES:g}",
    )
    options.add_argument("--no-kill", action="store_true", help="do not kill the trainer on the way")
    options.add_argument("--json", action="store_true", help="end with one JSON object, and nothing else")
    return options.parse_args(arguments)


def _next_directory() -> Path:
    """The first of runs/demo, runs/demo-2, … whose demo did not come to its end."""
    number, path = 1, Path("runs/demo")
    while (path / PICTURE).exists():
        number += 1
        path = Path(f"runs/demo-{number}")
    return path


class _Teller:
    """Says what happens, and keeps how long each part took."""

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
        """One part of the job, with its title before and its time after."""
        self.say(f"\n== {title}")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)
        self.say(f"   ({self.seconds[name]:.0f} s)")


def _train_and_kill(rundir: RunDir, fitted: Fitted, tell: _Teller, *, kill: bool) -> None:
    """Run `bloomery train` as anyone would; kill it once with SIGKILL, and give the same command again."""
    command = ["train", fitted.name, *fitted.overrides, "--run", str(rundir.path)]
    tell.say(f"   $ bloomery {' '.join(command)}")
    if kill and not _was_killed_before(rundir):
        step = _killed_at(rundir, command, tell)
        if step is None:
            return
        tell.say(f"\n   kill -9 at step {step}: the trainer is gone. The same command goes on:")
        tell.say(f"   $ bloomery {' '.join(command)}")
    with _training(command, tell) as process:
        process.wait()
    _refuse_failed(process)


def _killed_at(rundir: RunDir, command: list[str], tell: _Teller) -> int | None:
    """The step after which the trainer was killed; None when it ended before there was an occasion."""
    from bloomery.checkpoint.catalogue import checkpoints
    from bloomery.config.load import load_recipe
    from bloomery.events.heartbeat import read_heartbeat
    from bloomery.plan.schedule import steps_of_run

    with _training(command, tell) as process:
        while process.poll() is None:
            time.sleep(0.2)
            beat = read_heartbeat(rundir.heartbeat()) or {}
            found = checkpoints(rundir)
            if not found or beat.get("pid") != process.pid:
                continue
            recipe = load_recipe(str(rundir.recipe)).recipe
            due = KILL_AFTER_SHARE * steps_of_run(recipe.train, sequence_length=recipe.data.sequence_length)
            if beat["step"] > max(due, found[-1].step):
                process.kill()
                process.wait()
                return int(beat["step"])
    _refuse_failed(process)
    return None


@contextmanager
def _training(command: list[str], tell: _Teller) -> Iterator[subprocess.Popen[bytes]]:
    """The training as a process of its own, in this terminal; never left behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", *command], stdout=subprocess.DEVNULL if tell.quiet else None
    )
    try:
        yield process
    except BaseException:
        process.send_signal(signal.SIGINT)  # it saves, as for anyone
        process.wait()
        raise


def _refuse_failed(process: subprocess.Popen[bytes]) -> None:
    if process.returncode:
        raise TrainingFailed(
            "The training of the demo did not end well; its own message is above.",
            remedy="`bloomery demo` goes on where it stopped.",
        )


def _was_killed_before(rundir: RunDir) -> bool:
    from bloomery.events.incarnation import current

    return current(rundir) > 1


def _about_data(prepared: Prepared) -> str:
    (train,), held_out = prepared.train, prepared.held_out
    lines = [
        f"   {train.documents:,} files to train on: {train.text_bytes / 1e6:.1f} MB, {train.tokens:,} tokens "
        f"({train.text_bytes / train.tokens:.2f} bytes a token, vocabulary {prepared.vocabulary_size:,})"
    ]
    lines += [
        f"   {one.documents:,} files held out: {one.text_bytes / 1e6:.1f} MB, {one.tokens:,} tokens"
        for one in held_out
    ]
    return "\n".join([*lines, *(f"   {note}" for note in prepared.notes)])


def _next_commands(rundir: RunDir, fitted: Fitted) -> str:
    # As this process was called: a newcomer's PATH does not have the environment's programs.
    bloomery = Path(sys.argv[0]) if Path(sys.argv[0]).name == "bloomery" else "bloomery"
    return f"""
Three commands to try next:
  {bloomery} train {fitted.name} data.sources=YOUR.txt run.name=mine
      your own text: .txt, .jsonl, directories and globs of them
  {bloomery} train {fitted.name} --run {rundir.path} train.tokens={2 * fitted.tokens}
      go on with this run, twice as long
  {bloomery} generate {rundir.path} --prompt 'class Queue:'
      let it write
"""
