"""`bloomery train`: start a run, or go on with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import add_recipe, add_start, parser
from bloomery.cli.ranks import Share, end_with_launcher, run_ranks

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe

EXAMPLES = """\
bloomery train demo                                      a shipped recipe
bloomery train demo data.sources=notes.txt run.name=notes    your own text
bloomery train demo data.sources='["a.jsonl", "b/*.txt"]' train.tokens=2_000_000 run.name=mine
bloomery train demo --nproc 2                            data-parallel over two processes
bloomery config show demo --why                          every setting, and where its value comes from

The same command goes on where the run stands: after Ctrl-C, a kill or a crash. While it runs:
touch RUN/control/save                                   save now
touch RUN/control/stop                                   save and stop, as Ctrl-C and SIGTERM do
echo 'checkpoint.every_steps = 50' > RUN/control/set     change a free setting
echo '1000:2000' > RUN/control/skip                      never use these samples
"""

PARENT = "BLOOMERY_PARENT"
"""Set in the ranks of a peer: where its parent listens."""

PREPARED = "BLOOMERY_ENVIRONMENT"
"""Set in a process whose environment is ready to train in."""

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc then keeps freed memory instead of returning it each step: CPU steps are about 1.3 times faster."""


def run(arguments: list[str]) -> int:
    """Train as the command line says. 0: the run ended, or stopped where it was asked to."""
    started = time.perf_counter()
    options = _parse(arguments)
    from bloomery.config.check import check_recipe
    from bloomery.config.load import load_recipe
    from bloomery.config.offline import go_offline
    from bloomery.config.peers import refuse_alone
    from bloomery.plan.ranks import degrees_of, other_ranks_wanted

    loaded = load_recipe(options.recipe, options.overrides)
    if loaded.recipe.run.offline:
        go_offline()
    ranks = int(os.environ.get("WORLD_SIZE", options.nproc))
    degrees = degrees_of(loaded.recipe.parallel, world=ranks)
    check_recipe(loaded.recipe, loaded.sources, data_degree=degrees.data if degrees else None)
    if PARENT not in os.environ:
        refuse_alone(loaded.recipe, loaded.sources)
    if degrees is None:
        raise other_ranks_wanted(loaded.recipe.parallel, world=ranks)
    path = Path(options.run or Path("runs") / loaded.recipe.run.name)
    if PREPARED not in os.environ:
        environment = prepared_environment()
        command = [sys.executable, "-m", "bloomery", "train", *arguments]
        if options.nproc > 1:
            return run_ranks(command, Share(count=ranks, world=ranks), environment=environment)
        # malloc reads its settings when a process starts, so this one starts again: 0.1 s.
        os.execve(sys.executable, command, environment)
    return _train(loaded, path, options, started)


def prepared_environment() -> dict[str, str]:
    """The environment of this process, ready to train in."""
    return (
        dict(os.environ)
        | {name: os.environ.get(name, value) for name, value in MALLOC.items()}
        | {PREPARED: "1"}
    )


def _parse(arguments: list[str]) -> Namespace:
    options = parser("train", "Start a run, or go on with it where it stands.", examples=EXAMPLES)
    add_recipe(options)
    add_start(options, run="runs/NAME of the recipe", nproc="data-parallel processes on this machine")
    return options.parse_intermixed_args(arguments)


def _train(loaded: LoadedRecipe, path: Path, options: Namespace, started: float) -> int:
    """The training itself, in a prepared process: everything slow is imported here."""
    from bloomery.cli.bars import data_bar
    from bloomery.events.rundir import RunDir

    end_with_launcher()
    is_first = os.environ.get("RANK", "0") == "0"
    bar = is_first and sys.stdout.isatty() and not options.plain
    say = _say if is_first else _say_nothing
    from bloomery.train.loop import train
    from bloomery.train.options import StartOptions

    rundir = RunDir(path)
    outcome = train(
        loaded,
        rundir,
        StartOptions(
            say=say,
            bar=bar,
            take_fallback=options.fallback,
            data_progress=lambda: data_bar(shown=bar),
            started=started,
        ),
    )
    if outcome.finished:
        say(f"finished at step {outcome.step}: {outcome.reason}; the run is in {path}")
        return 0
    remedy = f"The same command goes on from there. Checkpoints: bloomery ckpt list {path}"
    if outcome.failed:
        from bloomery.errors import TrainingFailed

        raise TrainingFailed(f"stopped at step {outcome.step}: {outcome.reason}.", remedy=remedy)
    say(f"saved and stopped at step {outcome.step}: {outcome.reason}. {remedy}")
    name = outcome.reason.removeprefix("signal ")
    return 128 + signal.Signals[name] if name in signal.Signals.__members__ else 0


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _say_nothing(line: str) -> None:
    """Only the first rank speaks; the others' words are in the journal."""
