"""`bloomery train`: trains in this process, as the only rank or as one rank that a launcher started."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.arguments import add_recipe, add_training_options, parser
from bloomery.cli.json_output import json_text
from bloomery.cli.ranks import LAUNCHER, RankRange, end_with_launcher, run_ranks
from bloomery.cli.standard_output import LastingOutput, let_output_end_nothing, tell
from bloomery.config.find import run_path
from bloomery.errors import TrainingFailed

if TYPE_CHECKING:
    from bloomery.config.environment import EnvironmentSection
    from bloomery.config.load import LoadedRecipe
    from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)

EXAMPLES = """\
bloomery train demo                                      train a shipped recipe
bloomery train demo data.sources=notes.txt run.name=notes    train on your own text
bloomery train demo data.sources='["a.jsonl", "b/*.txt"]' train.tokens=2_000_000 run.name=mine
bloomery train runs/mine                                 go on with a run, wherever it was moved to
bloomery train demo --nproc 2 train.micro_batch=2        train data-parallel in two processes
bloomery config show demo --why                          show every setting and where its value came from

One task for each rank, started by another launcher:
srun --ntasks-per-node=8 bloomery train my.toml --run D
mpirun -np 8 bloomery train my.toml --run D
torchrun --nproc-per-node 8 -m bloomery train my.toml --rundir D  (torchrun refuses --run and --log)

After Ctrl-C, a kill or a crash, the same command resumes the run. While it runs:
bloomery save RUN                                        save a checkpoint now
bloomery stop RUN                                        save and stop; RUN starts again after stop --disarm
echo 'checkpoint.every_steps = 50' > RUN/control/set     change a setting of the kind `free`
bloomery skip RUN --samples 1000:2000                    never use these samples
bloomery rewind RUN --to-step 400 --dry-run              say what going back would lose
"""

PARENT = "BLOOMERY_PARENT"
"""Environment variable of a peer's ranks: the path of their agent's socket."""

PREPARED = "BLOOMERY_ENVIRONMENT"
"""Environment variable that is set once the environment of the process is ready for training."""

OWN_PROCESS = "own"
"""Value of BLOOMERY_ENVIRONMENT in a process that was started for one training and ends with it."""

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
"""With these, glibc keeps freed memory for the next step; CPU steps are about 1.3 times faster."""
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""With this, the memory of a GPU has few holes after tensors of other sizes were freed."""

_COLUMNS = 100
_CLOCK = len("23:59:59 ")


def run(arguments: list[str]) -> int:
    """Start or resume the training; returns 0 when the run ended or stopped as it was asked to."""
    started = time.perf_counter()
    options = _parse(arguments)
    from bloomery.cli.arguments import load_given
    from bloomery.cli.early_refusals import check_start, refuse_early
    from bloomery.config.peer_settings import refuse_alone
    from bloomery.plan.ranks import degrees_of, wrong_ranks_error

    loaded = load_given(options.recipe, options.overrides)
    ranks = _world(options)
    degrees = degrees_of(loaded.recipe.parallel, world=ranks)
    path = run_path(options.recipe, run=options.run, name=loaded.recipe.run.name)
    check_start(loaded, path, data_degree=degrees.data if degrees else None)
    if PARENT not in os.environ:
        refuse_alone(loaded.recipe, loaded.sources)
    if degrees is None:
        raise wrong_ranks_error(loaded.recipe.parallel, world=ranks)
    if PREPARED not in os.environ:
        refuse_early(loaded, path)
    if PREPARED not in os.environ and os.environ.get("RANK", "0") == "0":
        for note in loaded.notes:
            print(f"note: {note}", file=sys.stderr)
    if PREPARED not in os.environ:
        environment = prepared_environment(loaded.recipe.environment)
        command = [sys.executable, "-m", "bloomery", "train", *arguments]
        if options.nproc > 1:
            return run_ranks(command, RankRange(count=ranks, world=ranks), environment=environment)
        # malloc reads its settings when a process starts, so this one starts again: 0.1 s.
        os.execve(sys.executable, command, environment)
    return _train(loaded, path, options, started)


def _world(options: Namespace) -> int:
    """Return the number of ranks, after setting torch's variables from those of the launcher, if any."""
    from bloomery.operate.launcher import node_name, rank_variables

    if node_name(os.environ):
        os.environ.setdefault("BLOOMERY_HOST", node_name(os.environ))
    if options.nproc == 1 or "RANK" in os.environ:
        os.environ.update(rank_variables(os.environ))
    if "WORLD_SIZE" not in os.environ:
        return int(options.nproc)
    if options.nproc > 1 and LAUNCHER not in os.environ:  # a rank of ours has --nproc in its command too
        raise TrainingFailed(
            f"--nproc {options.nproc} would start ranks, and this process is rank {os.environ['RANK']} "
            f"of {os.environ['WORLD_SIZE']}, which a launcher has started.",
            remedy="Leave --nproc out.",
        )
    return int(os.environ["WORLD_SIZE"])


def prepared_environment(section: EnvironmentSection | None = None) -> dict[str, str]:
    """Return this process's environment with the variables that training needs, and those of a recipe.

    section: the recipe's `[environment]`; a variable that is set already is kept.
    """
    from bloomery.config.environment import variables_of

    return (
        (variables_of(section) if section is not None else {})
        | dict(os.environ)
        | {name: os.environ.get(name, value) for name, value in (MALLOC | ALLOCATOR).items()}
        | {PREPARED: OWN_PROCESS}
    )


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "train", "Start a training run, or resume it from its newest checkpoint.", examples=EXAMPLES
    )
    add_recipe(options)
    add_training_options(
        options,
        run="runs/NAME, with the recipe's name",
        nproc="data-parallel processes on this machine (default: 1)",
    )
    options.add_argument(
        "--log",
        choices=("short", "full", "json"),
        help="lines in place of a progress bar: of at most 100 columns, with every figure, or an object a "
        "line for programs (default: a bar on a terminal, and log.form elsewhere)",
    )
    options.add_argument("--no-hints", action="store_true", help="name no commands to try next at the end")
    return options.parse_intermixed_args(arguments)


def _train(loaded: LoadedRecipe, path: Path, options: Namespace, started: float) -> int:
    """Train in a process whose environment is ready. Slow modules are imported here, not before."""
    from bloomery.cli.arguments import data_bar
    from bloomery.events.run_directory import RunDirectory

    end_with_launcher()
    is_first = os.environ.get("RANK", "0") == "0"
    form = _form(loaded, options) if is_first else "short"
    if form == "bar":  # lines go on without their output by themselves
        let_output_end_nothing()
    screen = Screen(form)
    say = screen.say if is_first else _say_nothing
    from bloomery.train.loop import train
    from bloomery.train.settings import StartOptions

    rundir = RunDirectory(path)
    outcome = train(
        loaded,
        rundir,
        StartOptions(
            say=say,
            emit=screen.emit,
            form=form,
            columns=screen.columns,
            take_fallback=options.fallback,
            data_progress=lambda: data_bar(shown=is_first, lines=form != "bar"),
            started=started,
            ends_process=os.environ.get(PREPARED) == OWN_PROCESS,
        ),
    )
    if outcome.finished:
        say(f"finished at step {outcome.step}: {outcome.reason}; the run is in {path}")
        if is_first:
            screen.conclude(rundir, hints=not options.no_hints)
        return 0
    remedy = f"The same command goes on from there. Checkpoints: bloomery ckpt list {rundir.as_word()}"
    if outcome.failed:
        remedy = (
            "The same command goes on from the newest checkpoint, and from an earlier one after "
            f"`bloomery rewind {rundir.as_word()} --to-step STEP`. Checkpoints: bloomery ckpt list "
            f"{rundir.as_word()}"
        )
        raise TrainingFailed(f"stopped at step {outcome.step}: {outcome.reason}.", remedy=remedy)
    if outcome.reason.endswith("/stop"):
        remedy = f"Starts end at once until `bloomery stop {rundir.as_word()} --disarm`."
    if is_first:
        say(f"{_stopped_at(outcome.step, rundir)}: {outcome.reason}. {remedy}")
    name = outcome.reason.removeprefix("signal ")
    return 128 + signal.Signals[name] if name in signal.Signals.__members__ else 0


def _stopped_at(step: int, rundir: RunDirectory) -> str:
    """Return where a run stopped, and what is saved of it if `checkpoint.at_end` is off."""
    from bloomery.checkpoint.format.catalogue import checkpoints

    saved = [checkpoint.step for checkpoint in checkpoints(rundir)]
    if step in saved:
        return f"saved and stopped at step {step}"
    return (
        f"stopped at step {step}, saved up to step {saved[-1]}"
        if saved
        else f"stopped at step {step} unsaved"
    )


def _form(loaded: LoadedRecipe, options: Namespace) -> str:
    """Return what the console shows of steps: --log, else a bar on a terminal, else `log.form`."""
    form = str(options.log or loaded.recipe.log.form)
    shows_bar = form == "short" and not options.log and sys.stdout.isatty() and not options.plain
    return "bar" if shows_bar else form


def _say_nothing(line: str) -> None:
    """Print nothing: only the first rank prints, and every rank writes a journal."""


class Screen:
    """Prints what a training says, as long as standard output takes it: the training goes on without.

    form: 'bar', 'short', 'full' or 'json'. Lines with every figure are never broken.
    columns: the length of a short line, without the time of day before it.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._output = LastingOutput(_tell_of_lost_output)
        terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self.columns = min(terminal or _COLUMNS, _COLUMNS) - _CLOCK
        self._terminal_columns = terminal

    def say(self, line: str) -> None:
        """Print a line for people, broken between words on a terminal; in a file commands stay whole."""
        if self._form == "json":
            self.emit({"event": "message", "text": line})
            return
        stamped = f"{time.strftime('%H:%M:%S')} {line}"
        if self._form != "full" and self._terminal_columns is not None:
            stamped = _broken(stamped, columns=self._terminal_columns)
        self._output.write(f"{stamped}\n")

    def emit(self, event: Mapping[str, Any]) -> None:  # Any: JSON
        """Print an event for programs, with the time in seconds since 1970."""
        line = json_text({**event, "time": round(time.time(), 3)}, ensure_ascii=False)
        self._output.write(f"{line}\n")

    def conclude(self, rundir: RunDirectory, *, hints: bool) -> None:
        """Say the last losses of a run that is finished, and what to do with it next."""
        from bloomery.operate.overview import last_losses

        losses = last_losses(rundir)
        if self._form == "json":
            self.emit({"event": "finished", **losses})
            return
        named = {"loss": "loss", "held_out_loss": "held-out"}
        shown = [f"{named[key]} {_shown(value)}" for key, value in losses.items() if value is not None]
        if shown:
            self.say(f"at the end: {', '.join(shown)}")
        if hints:
            self._output.write(
                f"Next:\n  bloomery generate {rundir.as_word()} --prompt 'Once'\n"
                f"  bloomery evaluate {rundir.as_word()} YOUR.txt\n"
                f"  bloomery ckpt export {rundir.as_word()} exported\n"
            )


def _tell_of_lost_output(reason: str) -> None:
    tell(f"bloomery train: what it says is no longer shown ({reason}); it goes on: see `bloomery status`")


def _shown(loss: float | str) -> str:
    return loss if isinstance(loss, str) else f"{loss:.4f}"


def _broken(line: str, *, columns: int) -> str:
    if len(line) <= columns:
        return line
    return textwrap.fill(
        line, columns, subsequent_indent=" " * _CLOCK, break_long_words=False, break_on_hyphens=False
    )
