"""`bloomery submit`: queues the jobs of a run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import positive
from bloomery.cli.arguments import add_recipe, parser
from bloomery.config.find import run_path
from bloomery.errors import BloomeryError, storage_error
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches, disarming

if TYPE_CHECKING:
    from bloomery.config.load import LoadedRecipe
    from bloomery.operate.submission import Submission

EXAMPLES = """\
bloomery submit my.toml submit.nodes=4 submit.tasks=10      an array of ten jobs, one at a time
bloomery submit my.toml --keep-queued 2                     each job submits its successor
bloomery submit my.toml --dry-run                           print the batch script, submit nothing
bloomery submit my.toml --rehearse                          two nodes and a tiny model, with the same options
bloomery submit my.toml submit.scheduler=machine            a queue on this machine, without SLURM
bloomery status RUN                                         what its jobs do
bloomery cancel RUN                                         end them

Each job runs `bloomery launch --supervise` and ends with its exit status: 0 when the run was finished, was
stopped, or saved before the time limit; anything else is a failure, in SLURM's eyes too.
"""


def run(arguments: list[str]) -> int:
    """Submit the jobs and print their names, and return the exit status."""
    options = _parse(arguments)
    if options.top_up:
        return _top_up(RunDirectory(Path(options.top_up)))
    from bloomery.cli.arguments import settings_from_weights
    from bloomery.operate.submission import (
        check_submittable,
        kept_if_queued,
        request_of,
        scheduler_of,
        submission_of,
        submit,
        top_up,
    )

    if options.keep_queued:
        options.overrides = [*options.overrides, f"submit.keep_queued={options.keep_queued}"]
    # Jobs and those that watch them load the recipe without the directory of `init.from`.
    described = settings_from_weights(options.recipe, options.overrides)
    submission = submission_of(options.recipe, [*options.overrides, *described], nproc=options.nproc)
    loaded = submission.load()
    if options.rehearse:
        submission, loaded = _rehearsal(submission, loaded)
    _check(loaded)
    check_submittable(loaded, overrides=submission.overrides)
    name = loaded.recipe.run.name
    given = options.run or (
        Path("runs") / name if options.rehearse else None
    )  # it is no start of a given run
    rundir = RunDirectory(run_path(options.recipe, run=given, name=name))
    scheduler = scheduler_of(loaded.recipe.submit, rundir.path.absolute())
    keep = loaded.recipe.submit.keep_queued
    request = request_of(submission, loaded, rundir, tasks=1 if keep else loaded.recipe.submit.tasks)
    if options.dry_run:
        print(scheduler.script(request), end="")
        return 0
    _refuse_stopped(rundir, loaded)
    _prepare(rundir, loaded)
    with kept_if_queued(rundir, submission):
        jobs = top_up(scheduler, submission, loaded, rundir) if keep else submit(scheduler, request)
    _tell(jobs, scheduler.name, rundir, as_json=options.json)
    return 0


def _parse(arguments: list[str]) -> Namespace:
    if arguments[:1] == ["--top-up"] and len(arguments) == 2:  # what jobs call when they start
        return Namespace(top_up=arguments[1])
    options = parser("submit", "Queue the jobs of a run with SLURM, or on this machine.", examples=EXAMPLES)
    add_recipe(options)
    options.add_argument(
        "--run", metavar="DIR", help="the run directory (default: runs/NAME, with the recipe's name)"
    )
    options.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks on each node (default: as the launcher decides)",
    )
    options.add_argument(
        "--keep-queued",
        type=positive,
        metavar="N",
        help="keep N jobs in the queue, the running one included, until the run is over",
    )
    options.add_argument(
        "--rehearse", action="store_true", help="submit a tiny model with the same options on two nodes"
    )
    options.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    options.add_argument("--json", action="store_true", help="print the jobs as JSON")
    chosen = options.parse_intermixed_args(arguments)
    chosen.top_up = ""
    return chosen


def _check(loaded: LoadedRecipe) -> None:
    from bloomery.config.peer_settings import refuse_alone
    from bloomery.config.validate import check_recipe

    check_recipe(loaded.recipe, loaded.sources)
    refuse_alone(loaded.recipe, loaded.sources)


def _refuse_stopped(rundir: RunDirectory, loaded: LoadedRecipe) -> None:
    armed = Switches.of_run(rundir, loaded.recipe.control.directory).armed("stop")
    if armed is not None:
        raise BloomeryError(
            f"The switch {armed} is armed, so no job would train.",
            remedy=disarming(armed, rundir),
        )


def _prepare(rundir: RunDirectory, loaded: LoadedRecipe) -> None:
    """Make the run directory, writable for its group."""
    from bloomery.operate.group_access import share_with_group

    rundir.create()
    try:
        access = share_with_group(rundir.path, group=loaded.recipe.submit.group)
    except OSError as refused:
        raise storage_error(refused, path=rundir.path, doing="Sharing the run directory") from refused
    for owner, paths in access.refused.items():
        shown = f"{paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        print(f"bloomery submit: {owner} owns {shown}, which the group may not write", file=sys.stderr)


def _top_up(rundir: RunDirectory) -> int:
    from bloomery.operate.submission import kept_submission, scheduler_of, top_up

    submission = kept_submission(rundir)
    loaded = submission.load()
    scheduler = scheduler_of(loaded.recipe.submit, rundir.path.absolute())
    jobs = top_up(scheduler, submission, loaded, rundir)
    print(f"submitted {', '.join(jobs)}" if jobs else "nothing is missing in the queue")
    return 0


def _tell(jobs: list[str], scheduler: str, rundir: RunDirectory, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"jobs": jobs, "scheduler": scheduler, "run": str(rundir.path)}))
    elif not jobs:
        print(f"nothing is missing in the queue of {rundir.path}: bloomery status {rundir.path}")
    else:
        print(f"submitted {', '.join(jobs)} to {scheduler}: bloomery status {rundir.path}")


def _rehearsal(submission: Submission, loaded: LoadedRecipe) -> tuple[Submission, LoadedRecipe]:
    """Return the submission of the rehearsal, and its recipe."""
    from dataclasses import replace

    from bloomery.config.peer_settings import refuse_alone
    from bloomery.operate.rehearsal import rehearsal_of

    refuse_alone(loaded.recipe, loaded.sources)
    rehearsal = replace(submission, overrides=(*submission.overrides, *rehearsal_of(loaded.recipe)))
    return rehearsal, rehearsal.load()
