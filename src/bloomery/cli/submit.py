"""`bloomery submit`: queues the jobs of a run."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import positive
from bloomery.cli.arguments import add_recipe, parser
from bloomery.cli.json_output import json_text
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
bloomery submit my.toml elastic.peer=oslo --nproc 8         jobs of one peer of a run between peers
bloomery status RUN                                         what its jobs do
bloomery cancel RUN                                         end them

Each job runs `bloomery launch --supervise` (`bloomery peer --supervise` for a run between peers) and ends
with its exit status: 0 when the run was finished, was stopped, or saved before the time limit; anything else
is a failure, in SLURM's eyes too.
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

    _take_kept(options)
    if options.keep_queued:
        options.overrides = [*options.overrides, f"submit.keep_queued={options.keep_queued}"]
    # Jobs and those that watch them load the recipe without the directory of `init.from`.
    described = settings_from_weights(options.recipe, options.overrides)
    described = [*described, *_peer_settings(options.recipe, [*options.overrides, *described])]
    submission = submission_of(options.recipe, [*options.overrides, *described], nproc=options.nproc)
    loaded = submission.load()
    if options.rehearse:
        submission, loaded = _rehearsal(submission, loaded)
    _check(loaded)
    check_submittable(loaded, overrides=submission.overrides)
    name, peer = loaded.recipe.run.name, loaded.recipe.elastic.peer
    given = options.run or (
        Path("runs") / name if options.rehearse else None
    )  # it is no start of a given run
    usual = f"{name}-{peer}" if loaded.recipe.elastic.inner_steps else name
    rundir = RunDirectory(run_path(options.recipe, run=given, name=usual))
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


def _take_kept(asked: Namespace) -> None:
    """Take what was submitted for a run whose jobs have ended before one of them wrote recipe.toml."""
    from bloomery.config.find import from_home, is_run, shipped_recipes
    from bloomery.operate.submission import kept_submission, was_submitted

    rundir = RunDirectory(from_home(asked.recipe))
    if asked.recipe in shipped_recipes() or is_run(rundir.path) or not was_submitted(rundir):
        return
    kept = kept_submission(rundir)
    asked.recipe, asked.overrides = kept.recipe, [*kept.overrides, *asked.overrides]
    asked.run, asked.nproc = asked.run or str(rundir.path), asked.nproc or kept.nproc


def _check(loaded: LoadedRecipe) -> None:
    from bloomery.config.validate import check_recipe

    check_recipe(loaded.recipe, loaded.sources)


def _peer_settings(recipe: str, overrides: Sequence[str]) -> list[str]:
    """Return settings that name the peer of a job, its coordinator and its certificates; [] for other runs.

    The environment of a job need not be this one, and its machine has another name.
    """
    from bloomery.config.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    if not loaded.recipe.elastic.inner_steps:
        return []
    from bloomery.agent.assemble import access_of

    certificates = loaded.recipe.elastic.certificates or os.environ.get("BLOOMERY_CERTIFICATES", "")
    if not (loaded.recipe.elastic.peer or os.environ.get("BLOOMERY_PEER") or certificates):
        raise BloomeryError(
            "This is a run between peers, and the peer that the jobs run has no name.",
            remedy="Give elastic.peer=NAME, another one for each peer, or certificates, which have it.",
        )
    access = access_of(loaded.recipe, loaded.sources, os.environ)
    settings = [f"elastic.peer={access.peer}", f"elastic.coordinator={','.join(access.endpoints)}"]
    if access.bundle is not None:
        settings.append(f"elastic.certificates={access.bundle.directory.absolute()}")
    return [setting for setting in settings if setting not in overrides]


def _refuse_stopped(rundir: RunDirectory, loaded: LoadedRecipe) -> None:
    armed = Switches.of_run(rundir, loaded.recipe.control.directory).armed("stop")
    if armed is not None:
        raise BloomeryError(
            f"The switch {armed} is armed, so no job would train.",
            remedy=f"`{disarming(armed, rundir)}` lets jobs train.",
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
        print(json_text({"jobs": jobs, "scheduler": scheduler, "run": str(rundir.path)}))
    elif not jobs:
        print(f"nothing is missing in the queue of {rundir.path}: bloomery status {rundir.as_word()}")
    else:
        print(f"submitted {', '.join(jobs)} to {scheduler}: bloomery status {rundir.as_word()}")


def _rehearsal(submission: Submission, loaded: LoadedRecipe) -> tuple[Submission, LoadedRecipe]:
    """Return the submission of the rehearsal, and its recipe."""
    from dataclasses import replace

    from bloomery.config.peer_settings import refuse_alone
    from bloomery.operate.rehearsal import rehearsal_of

    refuse_alone(loaded.recipe, loaded.sources)
    settings = rehearsal_of(loaded.recipe, nproc=submission.nproc)
    rehearsal = replace(submission, overrides=(*submission.overrides, *settings))
    return rehearsal, rehearsal.load()
