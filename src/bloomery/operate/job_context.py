"""The scheduler's job in which this process runs: its end, and what it does about failures."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bloomery.config.load import LoadedRecipe
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm
from bloomery.operate.departure import Departure, maintenance_files
from bloomery.operate.diagnosis import Cause, Diagnosis
from bloomery.operate.exclusions import Exclusions, QuarantinedNode, exclude_in_queue
from bloomery.operate.maintenance import notices_of_cloud, notices_of_files, notices_of_slurm
from bloomery.operate.schedulers import kubernetes_manifest
from bloomery.operate.schedulers.machine_queue import END, JOB
from bloomery.operate.schedulers.slurm import Slurm
from bloomery.operate.submission import scheduler_of
from bloomery.operate.supervise import JobReactions

Say = Callable[[str], None]


class NodeInQuarantine(BloomeryError):
    """The node of this process must not be used, which the exit status says."""

    exit_status = 67


def _clock_offset_s() -> float:
    """Return a number of seconds that changes when the clock is set, and only then."""
    return time.time() - time.monotonic()


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """A job of a scheduler.

    scheduler: "slurm", "machine" or "kubernetes". job: its number. step: SLURM's step, or "".
    nodes: its nodes, as SLURM writes them. reservation: the one that it runs in; "" for none.
    ends: the end of its time limit in seconds since 1970, where the environment has it; else None.
    clock_s: what the clock showed when `ends` was read, so that setting it later does not move the end.
    """

    scheduler: str
    job: str
    step: str = ""
    nodes: str = ""
    reservation: str = ""
    ends: float | None = None
    clock_s: float = field(default_factory=_clock_offset_s, compare=False)

    @property
    def name(self) -> str:
        """A name that is equal on all nodes of the job and differs between jobs."""
        return f"{self.scheduler}-{self.job}" + (f".{self.step}" if self.step else "")

    def end(self) -> float | None:
        """Return when the job's time limit ends now, for it may be changed; None where nobody knows.

        Raises SchedulerError where SLURM does not answer.
        """
        if self.scheduler == "slurm":
            return Slurm().end_of_job(self.job)
        return None if self.ends is None else self.ends + _clock_offset_s() - self.clock_s


def job_context(environment: Mapping[str, str]) -> JobContext | None:
    """Return the job in which this process runs; None outside of one."""
    if "SLURM_JOB_ID" in environment:
        step = environment.get("SLURM_STEP_ID", "")
        nodes = environment.get("SLURM_JOB_NODELIST", "")
        # A job that is requeued keeps its number, and its steps count from 0 again.
        again = environment.get("SLURM_RESTART_COUNT", "0")
        step += f"r{again}" if again != "0" else ""
        return JobContext(
            scheduler="slurm",
            job=environment["SLURM_JOB_ID"],
            step=step,
            nodes=nodes,
            reservation=environment.get("SLURM_JOB_RESERVATION", ""),
        )
    if JOB in environment:
        ends = float(environment[END]) if END in environment else None
        return JobContext(scheduler="machine", job=environment[JOB], ends=ends)
    if kubernetes_manifest.JOB_VARIABLE in environment:
        return JobContext(scheduler="kubernetes", job=environment[kubernetes_manifest.JOB_VARIABLE])
    return None


def refuse_quarantined(host: str, rundir: RunDirectory, loaded: LoadedRecipe) -> None:
    """Raise NodeInQuarantine where the run's list of excluded nodes holds `host`, this node's name."""
    node = Exclusions.of(rundir, loaded.recipe.submit).nodes().get(host)
    if node is not None:
        run = shlex.quote(str(rundir.path))
        run = run if rundir.recipe.exists() else f"RECIPE --run {run}"
        raise NodeInQuarantine(
            f"This node is in quarantine: {node}.",
            remedy=f"Nothing was started. `bloomery preflight {run} --long` there lets it back, or `bloomery "
            f"preflight {run} --release {host}`.",
        )


def departure_of(
    context: JobContext | None, host: str, rundir: RunDirectory, loaded: LoadedRecipe, *, asks_scheduler: bool
) -> Departure:
    """Return what says when the run must save and stop: the job's end, and notices of maintenance.

    asks_scheduler: whether this launcher, as one for all, asks SLURM for reservations of the job's nodes.
    """
    control = loaded.recipe.control
    files, began = maintenance_files(rundir, control.directory), time.time()
    sources = [notices_of_cloud(control), lambda: notices_of_files(files, after=began)]
    if context is not None and context.scheduler == "slurm" and asks_scheduler:
        slurm, own = Slurm(), context.reservation
        sources.append(lambda: notices_of_slurm(slurm, slurm.expanded(context.nodes) or (host,), own=own))
    return Departure(
        rundir,
        end_of_job=context.end if context is not None else lambda: None,
        notices=sources,
        ahead_s=60.0 * control.maintenance_minutes,
        unmeasured_s=float(loaded.recipe.submit.signal_before_s),
    )


def reactions_of(rundir: RunDirectory, loaded: LoadedRecipe, *, say: Say) -> JobReactions:
    """Return the functions with which a launcher reacts to failures of its job.

    One puts a bad node into quarantine and excludes it in the queue. The other arms the stop switch after a
    failure that would repeat, so that queued jobs do not fail in the same way.
    """
    section, name = loaded.recipe.submit, loaded.recipe.run.name

    def on_bad_node(diagnosis: Diagnosis) -> None:
        host = diagnosis.culprit.host
        if not host:
            return
        exclusions = Exclusions.of(rundir, section)
        node = QuarantinedNode(
            host=host,
            cause=str(diagnosis.cause),
            since=round(time.time(), 3),
            run=str(rundir.path.absolute()),
            evidence=diagnosis.evidence[0][:200] if diagnosis.evidence else "",
        )
        try:
            exclusions.add(node)
            say(f"{host} is in quarantine ({exclusions.path})")
            scheduler = scheduler_of(section, rundir.path.absolute())
            hosts = sorted(exclusions.nodes())
            jobs = exclude_in_queue(scheduler, rundir, name=name, section=section, nodes=hosts)
            if jobs:
                say(f"{', '.join(hosts)} excluded from {', '.join(jobs)}")
        except BloomeryError as refused:  # the next job looks at the list itself when it starts
            say(f"the queue could not be told: {refused}")

    def on_repeating(diagnosis: Diagnosis) -> None:
        if diagnosis.cause == Cause.RUN_BUSY:
            return  # the switch would stop the healthy training that holds the run
        path = rundir.control("stop")
        try:
            arm(path, why=f"{diagnosis.cause}: {diagnosis.summary}"[:120])
        except OSError as refused:
            say(f"{path} could not be armed: {refused.strerror}")
            return
        say(f"{path} is armed, so that queued jobs do not fail in the same way")

    return JobReactions(on_bad_node=on_bad_node, on_repeating=on_repeating)
