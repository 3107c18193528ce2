"""The interface of a scheduler: submit, list, cancel, exclude; and its records of jobs and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from bloomery.config.submit import SubmitSection
from bloomery.errors import BloomeryError

SIGNAL = "USR1"
"""The signal that a scheduler sends to all processes of a job some time before its limit."""


class SchedulerError(BloomeryError):
    """The scheduler refused, is missing, or did not answer."""


class SchedulerSilent(SchedulerError):
    """The scheduler did not answer in time: it may have done what it was asked for all the same."""


class JobState(StrEnum):
    """The states of a job that bloomery tells apart."""

    PENDING = "pending"
    HELD = "held"
    NEVER = "dependency never satisfied"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    ENDED = "ended"
    FAILED = "failed"

    @property
    def is_queued(self) -> bool:
        """Whether the job waits for its start."""
        return self in (JobState.PENDING, JobState.HELD, JobState.NEVER)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, well or not."""
        return self in (JobState.ENDED, JobState.FAILED)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job, or several of which each goes on where the one before it ended.

    name: the name of the run.
    run: its run directory, absolute.
    directory: where the job starts.
    command: the words of the command that each node runs.
    nodes: the number of nodes, spares included.
    section: the settings of `[submit]`.
    exclude: the nodes that must not be used.
    tasks: the number of jobs.
    after: the job that must have ended before the first of these starts; "" for none.
    top_up: the words of a command that the job runs first, to submit the jobs that are missing; () for none.
    """

    name: str
    run: Path
    directory: Path
    command: tuple[str, ...]
    nodes: int
    section: SubmitSection
    exclude: tuple[str, ...] = ()
    tasks: int = 1
    after: str = ""
    top_up: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job, or the tasks of an array that have not started yet.

    job: the name by which the scheduler takes it, as in "712_3".
    state_text: the scheduler's own word for the state.
    reason: why it waits, or "".
    nodes: the names of its nodes; () before it starts.
    tasks: the number of jobs that this record stands for, above 1 for tasks of an array.
    expected_start, started, ends: seconds since 1970; None where the scheduler does not say.
    submitted: seconds since 1970, 0 where the scheduler does not say.
    """

    job: str
    state: JobState
    state_text: str
    reason: str = ""
    user: str = ""
    nodes: tuple[str, ...] = ()
    tasks: int = 1
    expected_start: float | None = None
    started: float | None = None
    ends: float | None = None
    submitted: float = 0.0


def cancelled_words(jobs: Sequence[QueuedJob]) -> str:
    """Return which jobs somebody cancelled, for the end of a sentence; "" for none.

    A scheduler forgets them after some minutes.
    """
    names = [job.job for job in jobs if job.state.is_over and job.state_text.startswith("CANCELLED")]
    return f"; the scheduler says that somebody cancelled job {', '.join(names)}" if names else ""


@dataclass(frozen=True, kw_only=True)
class SchedulerNode:
    """A node as the scheduler sees it.

    state: "idle", "allocated", "mixed", "drained", "down" or another word of the scheduler's.
    reason: why it takes no jobs; "" where it does.
    """

    name: str
    state: str
    reason: str = ""


class Scheduler(Protocol):
    """What a scheduler can do for a run. Every method raises SchedulerError where the scheduler refuses."""

    name: str

    def script(self, request: JobRequest) -> str:
        """Return the text that `submit` would hand to the scheduler."""
        ...

    def submit(self, request: JobRequest) -> list[str]:
        """Queue the jobs and return their names."""
        ...

    def jobs(self, *, name: str, run: Path) -> list[QueuedJob]:
        """Return the jobs of a run, whoever submitted them: those that wait or run, and some that ended."""
        ...

    def cancel(self, jobs: Sequence[str]) -> None:
        """End these jobs, or take them out of the queue. A job that has ended already counts as cancelled."""
        ...

    def exclude(self, jobs: Sequence[str], nodes: Sequence[str]) -> None:
        """Let these jobs, which wait, never start on `nodes`; this replaces their earlier exclusions."""
        ...

    def nodes(self) -> list[SchedulerNode]:
        """Return all nodes that jobs of this user may get."""
        ...
