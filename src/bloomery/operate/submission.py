"""Submits the jobs of a run: from its recipe to the scheduler, and again when the queue runs low."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.config.find import find_recipe, from_home, is_run, shipped_recipes
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.parallel import ParallelSection
from bloomery.config.recipe import Recipe
from bloomery.config.submit import SubmitSection
from bloomery.errors import BloomeryError, TrainingFailed, storage_error
from bloomery.events.journal import Journal, read_tail
from bloomery.events.records import known_values
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches
from bloomery.operate.exclusions import Exclusions
from bloomery.operate.job_board import natural_sort_key
from bloomery.operate.run_state import CANCELLED
from bloomery.operate.schedulers.interface import (
    JobRequest,
    QueuedJob,
    Scheduler,
    SchedulerError,
    SchedulerSilent,
)
from bloomery.operate.schedulers.kubernetes import Kubernetes
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.slurm import Slurm

log = logging.getLogger(__name__)

_SLOW_S, _SPARED_S = 10.0, 45.0
_silent: dict[str, tuple[float, BloomeryError]] = {}
"""Until when a kind of scheduler is not asked again, and what it said last."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The arguments of `bloomery submit`, kept as submission.json in the run directory for those that follow.

    recipe: the recipe's name, or its absolute path.
    overrides: settings of the command line.
    directory: where it was given, absolute; jobs start there.
    nproc: ranks of each node; None leaves it to the launcher.
    more: further options of `bloomery launch` or `bloomery peer`.
    """

    recipe: str
    overrides: tuple[str, ...]
    directory: str
    nproc: int | None = None
    more: tuple[str, ...] = ()

    def load(self) -> LoadedRecipe:
        """Return the recipe with its overrides. Raises ConfigError."""
        return load_recipe(self.recipe, self.overrides)


def submission_of(recipe: str, overrides: Sequence[str], *, nproc: int | None) -> Submission:
    """Return a submission from the present directory, with the absolute path of the recipe, or of the run."""
    path = find_recipe(recipe)
    name = str(path.absolute()) if Path(recipe).suffix == ".toml" else recipe
    if recipe not in shipped_recipes() and is_run(from_home(recipe)):
        name = str(from_home(recipe).absolute())
    return Submission(recipe=name, overrides=tuple(overrides), directory=str(Path.cwd()), nproc=nproc)


def keep_submission(rundir: RunDirectory, submission: Submission) -> None:
    """Write the submission into the run directory. Raises StorageError."""
    try:
        durable.write_whole(_record(rundir), json.dumps(asdict(submission), ensure_ascii=False) + "\n")
    except OSError as refused:
        raise storage_error(refused, path=rundir.path, doing="Keeping the submission") from refused


class PartlyQueued(SchedulerError):
    """The scheduler has queued some of the jobs that were asked for, and refused the next one."""


@contextmanager
def kept_if_queued(rundir: RunDirectory, submission: Submission) -> Iterator[None]:
    """Keep a submission before its jobs are queued in the block, for they read it when they start.

    Where none is queued, the one before it is kept still: jobs of it may run, and submit their successors.
    Where there was none, the run was not submitted, unless the scheduler may have queued a job unheard.
    """
    before: bytes | None = None
    with suppress(OSError):
        before = _record(rundir).read_bytes()
    keep_submission(rundir, submission)
    try:
        yield
    except PartlyQueued:
        raise
    except BloomeryError as refused:
        with suppress(OSError):  # what the scheduler says is the error to tell
            if before is not None:
                durable.write_whole(_record(rundir), before)
            elif not isinstance(refused, SchedulerSilent):
                _record(rundir).unlink(missing_ok=True)
        raise


def kept_submission(rundir: RunDirectory) -> Submission:
    """Return the submission of a run. Raises TrainingFailed where there is none that can be read."""
    try:
        record: dict[str, Any] = json.loads(_record(rundir).read_text())  # Any: parsed JSON
        values = known_values(Submission, record)
        return Submission(
            **values | {"overrides": tuple(record["overrides"]), "more": tuple(record.get("more", ()))}
        )
    except FileNotFoundError as missing:
        raise TrainingFailed(
            f"{rundir.path} was never submitted.",
            remedy="`bloomery submit RECIPE` does it; a run of `bloomery train` ends by `bloomery stop RUN`.",
        ) from missing
    except (OSError, ValueError, KeyError, TypeError) as missing:
        raise TrainingFailed(
            f"{_record(rundir)} cannot be read: {missing}.",
            remedy="Submit with the recipe: bloomery submit RECIPE",
        ) from missing


def recipe_of_run(rundir: RunDirectory) -> Recipe:
    """Return the recipe of a run that was submitted: its own, or before its first start the submission's.

    The file that was submitted may have been moved or edited since. Raises BloomeryError.
    """
    submission = kept_submission(rundir)
    return (load_recipe(str(rundir.recipe)) if rundir.recipe.exists() else submission.load()).recipe


def scheduler_of(section: SubmitSection, run: Path) -> Scheduler:
    """Return the scheduler that a recipe asks for. run: the run directory, absolute."""
    if section.scheduler == "kubernetes":
        return Kubernetes(section.namespace)
    if section.scheduler == "slurm" or (section.scheduler == "auto" and Slurm.is_here()):
        return Slurm()
    return OneMachine(run)


def jobs_of_run(rundir: RunDirectory, recipe: Recipe) -> tuple[Sequence[QueuedJob], str]:
    """Return the jobs of a run, and why the scheduler has not said which there are; "" where it has.

    A run that nobody submitted needs no answer, unless its recipe names the scheduler: a machine may have
    SLURM's commands and no cluster.
    """
    run = rundir.path.absolute()
    try:
        return asked_jobs(scheduler_of(recipe.submit, run), name=recipe.run.name, run=run), ""
    except BloomeryError as refused:
        needs_answer = was_submitted(rundir) or recipe.submit.scheduler != "auto"
        return (), refused.message if needs_answer else ""


def asked_jobs(scheduler: Scheduler, *, name: str, run: Path) -> Sequence[QueuedJob]:
    """Return the jobs of a run. Raises BloomeryError.

    A scheduler that took long to say nothing is not asked again for some time, for other runs neither: who
    looks at twenty runs would wait for twenty minutes.
    """
    kind = type(scheduler).__name__
    until, refused = _silent.get(kind, (0.0, None))
    if refused is not None and time.monotonic() < until:
        raise refused
    began = time.monotonic()
    try:
        jobs = scheduler.jobs(name=name, run=run)
    except BloomeryError as silent:
        now = time.monotonic()
        if now - began > _SLOW_S:
            _silent[kind] = (now + _SPARED_S, silent)
        raise
    _silent.pop(kind, None)
    return jobs


def nodes_of(section: SubmitSection, parallel: ParallelSection) -> int:
    """Return the number of nodes of a job, without spares."""
    if section.nodes != "auto":
        return int(section.nodes)
    if parallel.data == "auto" or parallel.ranks_per_node == "auto":
        return 1
    world = parallel.tensor * parallel.pipeline * int(parallel.data)
    return -(-world // int(parallel.ranks_per_node))


def request_of(
    submission: Submission, loaded: LoadedRecipe, rundir: RunDirectory, *, tasks: int, after: str = ""
) -> JobRequest:
    """Return the request to the scheduler: `tasks` jobs, of which the first waits for the job `after`."""
    section, run = loaded.recipe.submit, rundir.path.absolute()
    nodes = nodes_of(section, loaded.recipe.parallel)
    bloomery = (sys.executable, "-m", "bloomery")
    is_peer = loaded.recipe.elastic.inner_steps > 0
    launch = [
        *bloomery,
        "peer" if is_peer else "launch",
        submission.recipe,
        *submission.overrides,
        "--run",
        str(run),
        *submission.more,
    ]
    launch += ["--nproc", str(submission.nproc)] if submission.nproc else []
    launch += ["--supervise", *(["--spares", str(section.spares)] if section.spares else [])]
    return JobRequest(
        name=loaded.recipe.run.name,
        run=run,
        directory=Path(submission.directory),
        command=tuple(launch),
        nodes=nodes + section.spares,
        section=section,
        exclude=tuple(sorted(Exclusions.of(rundir, section).nodes())),
        tasks=tasks,
        after=after,
        top_up=(*bloomery, "submit", "--top-up", str(run)) if section.keep_queued else (),
    )


def submit(scheduler: Scheduler, request: JobRequest) -> list[str]:
    """Submit the jobs, as one array or as a chain; returns their names.

    Raises SchedulerError, and PartlyQueued where a part of the chain is in the queue.
    """
    if request.section.queue == "array" and not request.section.keep_queued:
        return scheduler.submit(request)
    jobs: list[str] = []
    after = request.after
    for _ in range(request.tasks):
        try:
            jobs += scheduler.submit(replace(request, tasks=1, after=after))
        except SchedulerError as refused:
            if not jobs:
                raise
            told = f"Only {', '.join(jobs)} of {request.tasks} jobs could be queued. {refused.message}"
            raise PartlyQueued(told, remedy=refused.remedy) from refused
        after = jobs[-1]
    return jobs


def top_up(
    scheduler: Scheduler, submission: Submission, loaded: LoadedRecipe, rundir: RunDirectory
) -> list[str]:
    """Submit as many jobs as are missing in the queue; returns their names.

    A run that is over, or whose stop switch is armed, gets none.

    Raises SchedulerError.
    """
    wanted = loaded.recipe.submit.keep_queued
    stopped = Switches.of_run(rundir, loaded.recipe.control.directory).armed("stop")
    if is_finished(rundir) or stopped is not None:
        return []
    jobs = scheduler.jobs(name=loaded.recipe.run.name, run=rundir.path.absolute())
    living = [job for job in jobs if not job.state.is_over]
    missing = wanted - sum(job.tasks for job in living)
    if missing <= 0:
        return []
    last = max(
        living, key=lambda job: (job.state.is_queued, job.submitted, natural_sort_key(job.job)), default=None
    )
    # The number of an array stands for all its tasks; no scheduler takes a range of them here.
    after = last.job.partition("_")[0] if last else ""
    return submit(scheduler, request_of(submission, loaded, rundir, tasks=missing, after=after))


def note_cancelled(rundir: RunDirectory, jobs: Sequence[str]) -> None:
    """Write into operations.jsonl that somebody cancelled these jobs, so nobody misses what does not follow.

    A run that has no records yet gets none, and what cannot be written is logged: the jobs are cancelled.
    """
    if not rundir.exists() and not rundir.operations.exists():
        return
    try:
        with Journal(rundir.operations, is_shared=True) as journal:
            journal.write("job", incarnation=0, step=0, state=CANCELLED, jobs=list(jobs))
    except BloomeryError as refused:
        log.warning("%s", refused.message)


def is_finished(rundir: RunDirectory) -> bool:
    """Return whether the run has used all its samples, by the last `end` in its first rank's journal."""
    finished = False
    for event in read_tail(rundir.journal(), most_bytes=1 << 18):
        if event["event"] in ("start", "end"):
            finished = event["event"] == "end" and bool(event.get("finished"))
    return finished


def check_submittable(loaded: LoadedRecipe, *, overrides: Sequence[str]) -> None:
    """Raise SchedulerError for settings of [submit] that do not fit together."""
    section = loaded.recipe.submit
    if loaded.recipe.elastic.inner_steps and nodes_of(section, loaded.recipe.parallel) + section.spares > 1:
        raise SchedulerError(
            "A peer runs on one machine, and the jobs would have more.",
            remedy="Set submit.nodes=1 and submit.spares=0, and submit a peer of its own for each machine.",
        )
    if section.signal_before_s >= 60.0 * section.minutes:
        raise SchedulerError(
            f"submit.signal_before_s = {section.signal_before_s} is no less than the {section.minutes:g} "
            "minutes of submit.minutes.",
            remedy="Lower it, or ask for more minutes.",
        )
    if any(word.startswith("submit.tasks") for word in overrides) and section.keep_queued:
        raise SchedulerError(
            "submit.tasks and submit.keep_queued both say how many jobs are queued.",
            remedy="Leave one of them out.",
        )


def was_submitted(rundir: RunDirectory) -> bool:
    """Return whether `bloomery submit` has queued jobs of the run."""
    return _record(rundir).exists()


def refuse_missing_run(rundir: RunDirectory) -> None:
    """Raise BloomeryError where the directory holds no run and no submission."""
    if not (rundir.exists() or was_submitted(rundir)):
        raise BloomeryError(
            f"There is no run in {rundir.path}.", remedy="Give a run directory, for instance runs/demo."
        )


def _record(rundir: RunDirectory) -> Path:
    return rundir.path / "submission.json"
