"""One machine as a scheduler: a queue in the run directory, whose jobs run one after another."""

from __future__ import annotations

import getpass
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bloomery.errors import storage_error
from bloomery.events.run_lock import host_name
from bloomery.operate.schedulers import machine_queue
from bloomery.operate.schedulers.interface import (
    SIGNAL,
    JobRequest,
    JobState,
    QueuedJob,
    SchedulerError,
    SchedulerNode,
)
from bloomery.operate.schedulers.machine_queue import MachineJob, outcome_without_status


class OneMachine:
    """Runs the jobs of one run directory on this machine, one at a time."""

    name = "machine"

    def __init__(self, run: Path) -> None:
        self._run = run

    def script(self, request: JobRequest) -> str:
        """Return the shell script of a job."""
        section = request.section
        lines = ["set -euo pipefail", "umask 002"]
        if section.setup:  # what sets an environment up, such as conda, reads variables that nobody has set
            lines += ["set +u", *section.setup, "set -u"]
        if request.top_up:
            lines.append(f'{shlex.join(request.top_up)} || echo "the queue could not be filled"')
        lines += [f"trap '' {SIGNAL}", f"exec {shlex.join(request.command)}"]
        return "\n".join(lines) + "\n"

    def submit(self, request: JobRequest) -> list[str]:
        """Queue the jobs, and start the process that runs them where there is none."""
        if request.nodes > 1:
            raise SchedulerError(
                f"The run wants {request.nodes} nodes, and its queue is only on this machine.",
                remedy="Submit it where SLURM is, or set submit.nodes=1.",
            )
        job = MachineJob(
            number=0,
            command=("bash", "-c", self.script(request)),
            directory=str(request.directory),
            minutes=request.section.minutes,
            signal_before_s=request.section.signal_before_s,
            user=_user(),
            submitted=round(time.time(), 3),
        )
        try:
            if not machine_queue.has_locks(request.run):
                raise SchedulerError(
                    f"The file system of {request.run} has no locks, so no queue can be kept there.",
                    remedy="Give --run on another disk, or start it by `bloomery launch --supervise`.",
                )
            numbers = [machine_queue.add(request.run, job) for _ in range(request.tasks)]
            machine_queue.start_runner(request.run)
        except OSError as refused:
            raise storage_error(refused, path=request.run, doing="Queueing a job") from refused
        return [str(number) for number in numbers]

    def jobs(self, *, name: str, run: Path) -> list[QueuedJob]:
        """Return all jobs of the run directory's queue."""
        is_run = machine_queue.has_runner(run)
        jobs, free_at = [], time.time()
        for record in machine_queue.read_jobs(run):
            job = _queued(run, record, is_run=is_run)
            if job.state == JobState.RUNNING:
                free_at = record.ends
            elif job.state == JobState.PENDING:
                # At the latest: jobs before it may end before their limits.
                job = _queued(run, record, is_run=is_run, expected_start=free_at)
                free_at += 60.0 * record.minutes
            jobs.append(job)
        return jobs

    def cancel(self, jobs: Sequence[str]) -> None:
        """Ask the queue's process to end these jobs."""
        for job in jobs:
            try:
                machine_queue.ask_to_cancel(self._run, int(job))
            except OSError as refused:
                raise storage_error(refused, path=self._run, doing="Cancelling a job") from refused

    def exclude(self, jobs: Sequence[str], nodes: Sequence[str]) -> None:
        """Do nothing: a job that starts on this machine while it is in quarantine ends by itself."""

    def nodes(self) -> list[SchedulerNode]:
        """Return this machine."""
        is_run = machine_queue.has_runner(self._run)
        return [SchedulerNode(name=host_name(), state="allocated" if is_run else "idle")]


def _queued(run: Path, record: MachineJob, *, is_run: bool, expected_start: float | None = None) -> QueuedJob:
    state, reason = JobState(record.state), record.reason
    if not is_run and state == JobState.PENDING:
        state, reason = (
            JobState.HELD,
            "the process of the queue is gone; any `bloomery submit` starts it again",
        )
    if not is_run and state == JobState.RUNNING:
        if record.is_orphan:
            reason = "the process of the queue is gone, and the job runs on"
        else:
            state, reason = outcome_without_status(run, started=record.started)
    has_ended = state.is_over and record.ended > 0
    return QueuedJob(
        job=str(record.number),
        state=state,
        state_text=str(record.state),
        reason=reason or (f"exit status {record.status}" if record.status else ""),
        user=record.user,
        nodes=(host_name(),) if record.started else (),
        expected_start=expected_start,
        started=record.started or None,
        ends=(record.ended if has_ended else record.ends) if record.started else None,
        submitted=record.submitted,
    )


def _user() -> str:
    with suppress(KeyError, OSError):  # accounts have no name in some containers
        return getpass.getuser()
    return str(os.getuid())
