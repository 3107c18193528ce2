"""The job queue of one machine: job files in a directory, and the runner process that runs them in turn.

The runner is `python -m bloomery.operate.schedulers.machine_queue RUN`. A second one ends after waiting a
second for the lock. Only the runner changes a job's record once it is queued; a job is cancelled by a file
beside its record.

A job can outlive its runner, and only the parent of a process learns its exit status. A later runner can
watch such an orphan, signal it and end it; whether it ended well is what the run's own journal says.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import psutil

from bloomery import durable
from bloomery.events.heartbeat import process_age_s
from bloomery.events.journal import read_tail
from bloomery.events.records import known_values
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import NO_LOCKS_HERE, process_identity
from bloomery.operate.schedulers.interface import SIGNAL, JobState

_T = TypeVar("_T")

log = logging.getLogger(__name__)

_SAME_S = 1.0
_TAIL_BYTES = 1 << 18


def began_at(pid: int) -> float:
    """Return when a process began, in seconds since 1970; 0.0 where it is gone."""
    with suppress(psutil.Error):
        return float(psutil.Process(pid).create_time())
    return 0.0


def is_running(pid: int, *, began: float, life: str) -> bool:
    """Return whether a process has not ended, and no later one has its number.

    began: when it began, in seconds since 1970; asked where `life` is "", for it moves with the clock.
    life: what `process_identity` said of it.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        is_same = process_identity(pid) == life if life else abs(process.create_time() - began) < _SAME_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    return False


def outcome_without_status(run: Path, *, started: float) -> tuple[JobState, str]:
    """Return the state of a job whose exit status nobody has, and the reason to show.

    It ended well where the journal of the run's first rank has an `end` without a failure since the job
    started (seconds since 1970).
    """
    last = {}
    with suppress(OSError):
        for event in read_tail(RunDirectory(run).journal(), most_bytes=_TAIL_BYTES):
            if event["event"] in ("start", "end") and float(event["time"]) >= started:
                last = event
    if last.get("event") == "end" and not last.get("failed"):
        return JobState.ENDED, "its exit status is lost; the journal says that it ended well"
    return (
        JobState.FAILED,
        "its exit status is lost, and the journal has no good end",
    )


END = "BLOOMERY_JOB_END"
"""The environment variable of a job with the end of its time limit, in seconds since 1970."""
JOB = "BLOOMERY_JOB"
"""The environment variable of a job with its number in the queue of its run."""
KILL_WAIT_S = 30.0
"""Seconds between SIGTERM, at the end of the time limit, and SIGKILL."""
_POLL_S = 0.1
_DISK_S = 1.0
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_LOCK_S = 1.0
"""The seconds that a new runner waits for the lock, which `ask_to_cancel` and `has_runner` take briefly."""


@dataclass(frozen=True, kw_only=True)
class MachineJob:
    """The record of a job of one machine's queue.

    number: counts from 1 in the run directory.
    command: the words of the command. directory: where it starts. environment: its variables.
    minutes: its time limit. signal_before_s: how long before that it gets SIGUSR1.
    after: the number of the job that must have ended before; 0 for none.
    submitted, started, ended: seconds since 1970; 0.0 where it has not come to that.
    pid, pid_began: its process, and when that began in seconds since 1970.
    pid_life: the `process_identity` of its process, which no later process has; "": not known.
    status: its exit status, negative for a signal; None before its end, and where it is lost.
    """

    number: int
    command: tuple[str, ...]
    directory: str
    minutes: float
    signal_before_s: float
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    state: str = JobState.PENDING
    reason: str = ""
    submitted: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    pid: int = 0
    pid_began: float = 0.0
    pid_life: str = ""
    status: int | None = None

    @property
    def ends(self) -> float:
        """When its time limit ends, in seconds since 1970; it must have started."""
        return self.started + 60.0 * self.minutes

    @property
    def is_orphan(self) -> bool:
        """Whether its process runs, asked where its runner is gone."""
        return self.state == JobState.RUNNING and is_running(
            self.pid, began=self.pid_began, life=self.pid_life
        )


def queue_of(run: Path) -> Path:
    """Return the directory of the queue of a run directory."""
    return run / "queue"


def add(run: Path, job: MachineJob) -> int:
    """Queue a job under the next free number, which is returned. Raises OSError."""
    durable.make_directory(queue_of(run))
    number = max((known.number for known in read_jobs(run)), default=0) + 1
    while True:
        try:
            durable.create(_record(run, number), _text(replace(job, number=number)))
        except FileExistsError:
            number += 1
            continue
        return number


def read_jobs(run: Path) -> list[MachineJob]:
    """Return all jobs of a run directory's queue, in their order."""
    jobs = []
    for path in sorted(queue_of(run).glob("[0-9]*.json")):
        with suppress(ValueError, TypeError, KeyError, OSError):  # what a crash left empty never became a job
            jobs.append(_job(json.loads(path.read_text())))
    return jobs


def ask_to_cancel(run: Path, number: int) -> None:
    """Ask the runner to end a job, or not to start it. Raises OSError.

    Where the runner was killed and left the job running, another runner is started, which ends the job.
    """
    durable.write_whole(_request(run, number), "")
    with _hold(run) as is_ours:
        if is_ours:
            _record_cancelled(run)
    if is_ours and any(job.number == number and job.is_orphan for job in read_jobs(run)):
        start_runner(run)


def start_runner(run: Path) -> None:
    """Start a runner in a session of its own, apart from this terminal; it ends if there is one already."""
    with (queue_of(run) / "runner.log").open("ab") as log_file:
        subprocess.Popen(
            [sys.executable, "-m", "bloomery.operate.schedulers.machine_queue", str(run)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )


def has_locks(run: Path) -> bool:
    """Return whether the file system of a run directory has locks, without which nothing runs a queue."""
    durable.make_directory(queue_of(run))
    try:
        with _hold(run):
            return True
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
        return False


def has_runner(run: Path) -> bool:
    """Return whether a process on this machine runs the queue."""
    path = _lock(run)
    try:
        # Of another user's queue the lock may only be read, which suffices but on NFS (EBADF).
        file = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
    except OSError:
        return False
    try:
        return not durable.try_lock(file)
    except OSError as error:
        if error.errno not in (*NO_LOCKS_HERE, errno.EBADF):
            raise
        return False
    finally:
        os.close(file)


def run_queue(run: Path) -> None:
    """Run the jobs of a queue until none waits; returns at once where another process runs them."""
    while _waiting(run) or any(job.is_orphan for job in read_jobs(run)):
        # Checked again without the lock: a job may have been added since the last check under it.
        with _hold(run, wait_s=_LOCK_S) as is_ours:
            if not is_ours:
                return
            _wait_for_orphans(run)
            _at_last(lambda: _record_cancelled(run))
            while jobs := _waiting(run):
                _run(run, jobs[0])
                _at_last(lambda: _record_cancelled(run))


def _run(run: Path, job: MachineJob) -> None:
    started = time.time()
    job = replace(job, started=started, state=JobState.RUNNING, reason="")
    _write_at_last(run, job)
    environment = os.environ | job.environment | {END: f"{job.ends:.3f}", JOB: str(job.number)}
    log_path = run / "logs" / f"job-{job.number}.log"
    with _at_last(lambda: _opened(log_path)) as output:
        try:
            process = subprocess.Popen(
                job.command,
                cwd=job.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        except OSError as refused:
            over = replace(job, state=JobState.FAILED, status=127, ended=time.time(), reason=str(refused))
            _write_at_last(run, over)
            return
    pid = process.pid
    job = replace(job, pid=pid, pid_began=began_at(pid), pid_life=process_identity(pid))
    _wait(run, job, is_over=lambda: process.poll() is not None)
    status = process.returncode
    state = JobState.ENDED if status == 0 or _request(run, job.number).exists() else JobState.FAILED
    _write_at_last(run, replace(job, status=status, ended=time.time(), state=state))


def _at_last(do: Callable[[], _T]) -> _T:
    """Return what a call returns once the disk lets it; a disk that is full now may have room later.

    A queue that ended instead would forget the job that it runs, and the next one would start another beside.
    """
    is_told = False
    while True:
        try:
            return do()
        except OSError as refused:
            if refused.errno not in _MAY_PASS:
                raise
            if not is_told:
                log.warning("the queue waits for the disk: %s", refused)
            is_told = True
            time.sleep(_DISK_S)


def _write_at_last(run: Path, job: MachineJob) -> None:
    _at_last(lambda: _write(run, job))


def _opened(log_path: Path) -> BinaryIO:
    durable.make_directory(log_path.parent)
    return log_path.open("ab")


def _is_written(run: Path, job: MachineJob) -> bool:
    with suppress(OSError):
        _write(run, job)
        return True
    return False


def _wait(run: Path, job: MachineJob, *, is_over: Callable[[], bool]) -> None:
    """Record a job and wait for its end; signal it before its limit, and end it there or when asked to.

    How long it has run is asked of the kernel, for a clock that is set moves no limit.
    """
    ran_s = process_age_s(job.pid) or max(0.0, time.time() - job.started)
    end_at, kill_at = time.monotonic() + 60.0 * job.minutes - ran_s, float("inf")
    warn_at, is_written = end_at - job.signal_before_s, False
    while not is_over():
        is_written = is_written or _is_written(run, job)
        now = time.monotonic()
        with suppress(ProcessLookupError):
            if now >= warn_at:
                warn_at = float("inf")
                os.kill(job.pid, getattr(signal, f"SIG{SIGNAL}"))
            if now >= end_at or (kill_at == float("inf") and _request(run, job.number).exists()):
                end_at, kill_at = float("inf"), now + KILL_WAIT_S
                os.kill(job.pid, signal.SIGTERM)
            if now >= kill_at:
                kill_at = float("inf")
                os.killpg(job.pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _waiting(run: Path) -> list[MachineJob]:
    return [job for job in read_jobs(run) if job.state == JobState.PENDING]


def _record_cancelled(run: Path) -> None:
    """Record as ended the waiting jobs that were cancelled. Only the holder of the lock calls it."""
    for job in _waiting(run):
        if _request(run, job.number).exists():
            _write(run, replace(job, state=JobState.ENDED, reason="cancelled", ended=time.time()))


def _wait_for_orphans(run: Path) -> None:
    """Wait for the jobs that an earlier runner left running, and record how they ended."""
    for job in read_jobs(run):
        if job.state != JobState.RUNNING:
            continue
        _wait(run, job, is_over=lambda job=job: not job.is_orphan)  # type: ignore[misc]  # mypy: lambda's default
        state, reason = outcome_without_status(run, started=job.started)
        if _request(run, job.number).exists():
            state, reason = JobState.ENDED, "cancelled"
        _write_at_last(run, replace(job, state=state, reason=reason, ended=time.time()))


@contextmanager
def _hold(run: Path, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of the queue, which names this process; yields False where another keeps it `wait_s`."""
    file = os.open(_lock(run), os.O_RDWR | os.O_CREAT, 0o664)
    try:
        is_ours = durable.wait_for_lock(file, timeout_s=wait_s)
        if is_ours:
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        yield is_ours
        if is_ours:
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def _job(record: dict[str, Any]) -> MachineJob:  # Any: parsed JSON
    values = known_values(MachineJob, record)
    return MachineJob(**values | {"command": tuple(record["command"])})


def _text(job: MachineJob) -> str:
    return json.dumps(asdict(job), ensure_ascii=False) + "\n"


def _write(run: Path, job: MachineJob) -> None:
    durable.write_whole(_record(run, job.number), _text(job))


def _record(run: Path, number: int) -> Path:
    return queue_of(run) / f"{number:06d}.json"


def _request(run: Path, number: int) -> Path:
    return queue_of(run) / f"{number:06d}.cancel"


def _lock(run: Path) -> Path:
    return queue_of(run) / "runner.lock"


if __name__ == "__main__":
    run_queue(Path(sys.argv[1]))
