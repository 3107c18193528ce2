"""Evaluates the alert conditions of a run (hung, failed, disk full …), a pure function of an observation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bloomery.operate.ledger.figures import duration
from bloomery.operate.node_shm import SHM_FULL, NodeShm, shm_warning
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.watch.alerts import WatchCondition
from bloomery.operate.watch.disk import DiskForecast, DiskSample, does_not_fit

_NOT_WORKING = (RunStatus.PENDING, RunStatus.STOPPED, RunStatus.NEW, RunStatus.COMPLETING)
STATE = "state"
"""The group of all conditions that are a state of the run."""
_LONGEST = 400
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class WatchLimits:
    """When something counts as worth an alert.

    pending_s: seconds in the queue.
    idle_s: seconds without training whatever the reason, stops included; None where that is nobody's matter.
    disk_s: seconds until a file system is full.
    guard_s: seconds for which a guard's finding is shown.
    save_times: a checkpoint is late after this multiple of the usual time between two, and save_least_s.
    backup_s: seconds for which the newest checkpoint may have no copy elsewhere.
    unheard_s: seconds for which the scheduler does not answer.
    short_s: seconds for which fewer jobs are in the queue than wanted.
    limit_s: seconds for which a run that its time limit stopped may have no job.
    slow_times: a run is slow when its last steps take this multiple of what its steps took before.
    """

    pending_s: float = 3600.0
    idle_s: float | None = None
    disk_s: float = 86400.0
    guard_s: float = 1800.0
    save_times: float = 3.0
    save_least_s: float = 1800.0
    backup_s: float = 7200.0
    unheard_s: float = 600.0
    short_s: float = 900.0
    limit_s: float = 900.0
    slow_times: float = 1.5


@dataclass(frozen=True, kw_only=True)
class WatchedQuota:
    """A quota that the files of a run count for.

    owner: such as "group llm".
    left: what was left of it at the newest check. forecast: when it is used up, from all checks.
    """

    owner: str
    left: DiskSample
    forecast: DiskForecast | None


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """What one check of a run showed, and what earlier checks have kept. Times are seconds since 1970.

    path: the run directory, as commands take it.
    since: when the present state began.
    disk: the newest sample of the file system and the forecast from all samples; None where it has no name.
    quotas: those that the run's files count for; () where there are none, or no command reports them.
    save_bytes: the size of the newest checkpoint.
    shm_used: the used share of /dev/shm of this machine; None where there is none, or where `shm` has it.
    shm: the space of /dev/shm on each node of the run.
    saves: the times of the last checkpoints.
    failed_save: why the last save failed; "" where it did not.
    guards: the newest findings (time, guard, words) of guards.
    step_s, usual_step_s: the seconds of the last steps and of those before them; () where too few are known.
    unsaved_copy_s: seconds since the newest checkpoint that should have a copy elsewhere has none; 0.0 where
        it has one, or where none is wanted.
    silent_s: seconds for which no watcher checked the run, before this check.
    jobs, wanted_jobs, short_s: jobs that run or wait, those that submit.keep_queued wants, and for how long
        there have been fewer; 0 wanted where nobody does.
    awaited_s: seconds for which all ranks wait for other peers, where that is longer than usual; else 0.0.
    peers_command: the command that shows the peers of the run.
    unheard, unheard_s: why the scheduler does not answer, and for how long; "" and 0.0 where it does.
    """

    path: str
    verdict: RunVerdict
    now: float
    since: float
    disk: DiskSample | None = None
    forecast: DiskForecast | None = None
    quotas: Sequence[WatchedQuota] = ()
    save_bytes: int = 0
    shm_used: float | None = None
    shm: Sequence[NodeShm] = ()
    saves: Sequence[float] = ()
    failed_save: str = ""
    guards: Sequence[tuple[float, str, str]] = ()
    step_s: Sequence[float] = ()
    usual_step_s: Sequence[float] = ()
    unsaved_copy_s: float = 0.0
    silent_s: float = 0.0
    awaited_s: float = 0.0
    peers_command: str = ""
    unheard: str = ""
    unheard_s: float = 0.0
    jobs: int = 0
    wanted_jobs: int = 0
    short_s: float = 0.0


def conditions_of(run: WatchedRun, limits: WatchLimits) -> list[WatchCondition]:
    """Return the conditions of the run that hold now and that a person should know."""
    conditions = [
        *_state(run, limits),
        *_scheduler(run, limits),
        *_disk(run, limits),
        *_quotas(run, limits),
        *_saves(run, limits),
        *_health(run, limits),
    ]
    return [replace(condition, line=_one_line(condition.line)) for condition in conditions]


def _one_line(words: str) -> str:
    """Return words of a record in one line without control characters, cut at _LONGEST characters."""
    line = " ".join("".join(character if character.isprintable() else " " for character in words).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _state(run: WatchedRun, limits: WatchLimits) -> Iterator[WatchCondition]:
    state, why = run.verdict.state, run.verdict.why
    for_s = run.now - run.since
    if state.is_bad:
        helps = f"bloomery status {run.path}"
        line = why or f"the run is {state}"
        yield WatchCondition(kind=str(state), line=line, command=run.verdict.remedy or helps, group=STATE)
    elif state == RunStatus.PENDING and for_s > limits.pending_s:
        line = f"in the queue for {duration(for_s)}: {why}"
        yield WatchCondition(kind="pending too long", line=line, command=f"bloomery status {run.path}")
    if run.verdict.is_at_limit and for_s > limits.limit_s:
        line = f"it is not finished, and nothing follows since {duration(for_s)}: {why}"
        yield WatchCondition(kind="nothing follows", line=line, command=f"bloomery submit {run.path}")
    if limits.idle_s is not None and state in _NOT_WORKING and for_s > limits.idle_s:
        line = f"nothing has trained for {duration(for_s)}: {state}{f' ({why})' if why else ''}"
        yield WatchCondition(kind="not running", line=line, command=f"bloomery status {run.path} --nodes")


def _scheduler(run: WatchedRun, limits: WatchLimits) -> Iterator[WatchCondition]:
    if run.unheard_s > limits.unheard_s:
        line = f"the scheduler has not answered for {duration(run.unheard_s)}: {run.unheard}"
        yield WatchCondition(kind="scheduler", line=line, command=f"bloomery status {run.path} --nodes")
    if run.short_s > limits.short_s:
        follows = "when it ends nothing follows" if run.jobs else "nothing trains or waits"
        line = f"{run.jobs} of {run.wanted_jobs} jobs run or wait for {duration(run.short_s)}: {follows}"
        yield WatchCondition(kind="queue", line=line, command=f"bloomery submit {run.path}")


def _disk(run: WatchedRun, limits: WatchLimits) -> Iterator[WatchCondition]:
    if run.disk is not None and does_not_fit(run.disk, run.save_bytes):
        free, needed = run.disk.free_bytes / _GIB, run.save_bytes / _GIB
        line = f"the next checkpoint does not fit: {needed:.2f} GiB, and {free:.2f} GiB are free"
        yield WatchCondition(kind="no room for a save", line=line, command=f"bloomery ckpt list {run.path}")
    if run.forecast is not None and run.forecast.full_in_s < limits.disk_s:
        what = "the disk is full" if run.forecast.what == "space" else "no inodes are left"
        helps = "df -h" if run.forecast.what == "space" else "df -i"
        line = f"{what} in {duration(run.forecast.full_in_s)} at the present pace"
        yield WatchCondition(
            kind=f"disk {run.forecast.what}",
            line=line,
            command=f"{helps} {run.path}; bloomery ckpt list {run.path}",
        )
    if run.shm_used is not None and run.shm_used > SHM_FULL:
        line = f"/dev/shm of this machine is {run.shm_used:.0%} full: data loaders end with a bus error"
        yield WatchCondition(kind="shm", line=line, command="ls -lS /dev/shm; df -h /dev/shm")
    full = [node.host for node in run.shm if node.is_nearly_full]
    if full:
        line = f"{shm_warning(run.shm)}; data loaders end with a bus error"
        command = f"on {full[0]}: ls -lS /dev/shm; df -h /dev/shm"
        yield WatchCondition(kind="node shm", line=line, command=command)


def _quotas(run: WatchedRun, limits: WatchLimits) -> Iterator[WatchCondition]:
    helps = f"quota -s, or lfs quota -h; bloomery ckpt list {run.path}"
    for quota in run.quotas:
        if quota.left.free_bytes >= 0 and does_not_fit(quota.left, run.save_bytes):
            free, needed = quota.left.free_bytes / _GIB, run.save_bytes / _GIB
            room = f"{needed:.2f} GiB, {free:.2f} GiB left"
            line = f"the next checkpoint exceeds the quota of {quota.owner}: {room}"
            yield WatchCondition(kind=f"no quota for a save ({quota.owner})", line=line, command=helps)
        forecast = quota.forecast
        if forecast is not None and forecast.full_in_s < limits.disk_s:
            what = "space" if forecast.what == "space" else "files"
            left = duration(forecast.full_in_s)
            line = f"the quota of {quota.owner} for {what} is used up in {left} at the present pace"
            yield WatchCondition(kind=f"quota {what} ({quota.owner})", line=line, command=helps)


def _saves(run: WatchedRun, limits: WatchLimits) -> Iterator[WatchCondition]:
    if run.failed_save:
        yield WatchCondition(
            kind="saves fail", line=run.failed_save, command=f"df -h {run.path}; df -i {run.path}"
        )
    elif run.verdict.state == RunStatus.RUNNING and len(run.saves) > 2:
        usual_s = median(later - earlier for earlier, later in zip(run.saves, run.saves[1:], strict=False))
        allowed_s = max(limits.save_times * usual_s, limits.save_least_s)
        age_s = run.now - max(run.saves[-1], run.since)
        if age_s > allowed_s:
            line = f"no checkpoint for {duration(age_s)}; they came every {duration(usual_s)}"
            yield WatchCondition(kind="no checkpoint", line=line, command=f"bloomery save {run.path}")
    if run.unsaved_copy_s > limits.backup_s:
        line = f"the newest checkpoint has had no copy elsewhere for {duration(run.unsaved_copy_s)}"
        yield WatchCondition(kind="backup", line=line, command=f"bloomery ckpt list {run.path}")


def _health(run: WatchedRun, limits: WatchLimits) -> Iterator[WatchCondition]:
    newest: dict[str, str] = {}
    for time, guard, words in run.guards:
        if run.now - time <= limits.guard_s:
            newest[guard] = words
    for guard, words in newest.items():
        yield WatchCondition(kind=f"guard {guard}", line=words, command=f"bloomery guard replay {run.path}")
    if run.step_s and run.usual_step_s:
        last_s, usual_s = median(run.step_s), median(run.usual_step_s)
        if last_s > limits.slow_times * usual_s:
            line = f"steps take {last_s:.3g} s, and took {usual_s:.3g} s before"
            yield WatchCondition(kind="slow", line=line, command=f"bloomery report {run.path} --json")
    if run.awaited_s > 0.0:
        line = f"all ranks of this peer have waited for other peers for {duration(run.awaited_s)}"
        yield WatchCondition(kind="peers", line=line, command=run.peers_command)
    if run.silent_s > 0.0:
        line = f"no watcher looked at this run for {duration(run.silent_s)}"
        yield WatchCondition(
            kind="watcher", line=line, command=f"bloomery watch {run.path} (as a service, or cron)"
        )
