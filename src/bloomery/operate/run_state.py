"""Judges the state of a run (running, hung, pending, failed …) by its scheduler and its run directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bloomery.errors import remedy_in
from bloomery.events.heartbeat import RankBeat, has_died_here
from bloomery.events.journal import read_tail
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches, note_of
from bloomery.operate.diagnosis import Cause
from bloomery.operate.ledger.operations import time_of
from bloomery.operate.schedulers.interface import JobState, QueuedJob, cancelled_words
from bloomery.operate.standstill import (
    RankObservation,
    Standstill,
    StandstillLimits,
    judge_progress,
    read_ranks_once,
)

CANCELLED = "cancelled"
"""The state in the `job` of operations.jsonl that `bloomery cancel`, or a watcher of the queue, writes."""
_TIME_LIMIT = "guard.stop_after_minutes"
_SAY_WHAT_HELPS = ("suspended: ", "the process of the queue ")
"""How the reasons of Kubernetes and of one machine's queue begin; SLURM has many, which name no command."""
_TAIL_BYTES = 1 << 20
_FRESH_S = 120.0
"""A plain start (no scheduler) whose heartbeats are older than this is gone, in seconds."""
_ENDING_S = 2.0
"""The seconds after a job's recorded end for which its processes may still write."""
_SKEW_S = 60.0
"""The most seconds by which the clocks of the scheduler and of nodes differ."""


class RunStatus(StrEnum):
    """The states of a run; the values are the words that people see."""

    RUNNING = "running"
    STARTING = "starting"
    HUNG = "hung"
    PENDING = "pending"
    HELD = "held"
    NEVER = "dependency never satisfied"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    GONE = "gone"
    NEW = "never started"
    UNKNOWN = "unknown"

    @property
    def is_bad(self) -> bool:
        """Whether a person should look."""
        return self in _BAD


_BAD = {
    RunStatus.HUNG,
    RunStatus.HELD,
    RunStatus.NEVER,
    RunStatus.FAILED,
    RunStatus.GONE,
    RunStatus.SUSPENDED,
}


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """What was observed of a run at one moment.

    jobs: its jobs in the scheduler's queue; () without a scheduler.
    ranks: the newest heartbeat of each rank, as `RankObservation` in seconds of `now`.
    now: the moment of the observation, in seconds.
    last: the last `start` or `end` in the first rank's journal, or {}.
    attempt: what operations.jsonl tells of how the last attempt ended, as `_last_attempt` has it.
    begun: the last `attempt` there, where nothing says that it has ended, or {}. Heartbeats of ranks that it
        has replaced are not among `ranks`.
    switch: the armed stop switch and who armed it; "" where it is not armed.
    silent: why the scheduler has not said which jobs there are; "" where it has, or where there is none.
    died: the ranks whose processes were of this machine and are gone without a last word.
    path: the run directory, as a shell takes it. starts: the command that starts its ranks.
    """

    jobs: Sequence[QueuedJob] = ()
    ranks: Mapping[int, RankObservation] = field(default_factory=dict)
    now: float = 0.0
    last: Mapping[str, Any] = field(default_factory=dict)
    attempt: Mapping[str, Any] = field(default_factory=dict)
    begun: Mapping[str, Any] = field(default_factory=dict)
    switch: str = ""
    silent: str = ""
    died: Sequence[int] = ()
    path: str = "RUN"
    starts: str = "launch"


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """The state of a run, why, and what a person may do.

    job: the job that decided, or None.
    is_at_limit: whether the run stopped because its time was over, and nobody cancelled what was to follow.
    """

    state: RunStatus
    why: str = ""
    remedy: str = ""
    job: QueuedJob | None = None
    is_at_limit: bool = False


def observe_run(
    rundir: RunDirectory,
    jobs: Sequence[QueuedJob],
    *,
    switches: Sequence[Path] = (),
    silent: str = "",
    last: Mapping[str, Any] | None = None,
) -> RunObservation:
    """Return what a run shows now.

    switches: further directories of switches than the run's own.
    silent: why the scheduler has not said which jobs there are; "" where it has.
    last: the newest `start` or `end` of the journal, for who follows it; None has it looked for.
    """
    now = time.time()
    if last is None:
        last = {}
        for event in read_tail(rundir.journal(), most_bytes=_TAIL_BYTES, named=("start", "end")):
            last = event
    attempt, begun = _last_attempt(rundir, last)
    armed = Switches([rundir.control_dir, *switches]).armed("stop")
    note = f" ({note_of(armed)})" if armed and note_of(armed) else ""
    ranks = {
        number: rank
        for number, rank in read_ranks_once(rundir, now=now).items()
        if not _is_replaced(rank.beat, begun)
    }
    return RunObservation(
        path=rundir.as_word(),
        starts="peer" if rundir.rounds.exists() else "launch",
        jobs=tuple(jobs),
        ranks=ranks,
        died=tuple(  # a launcher that started a rank sees its end too, and starts it again
            number
            for number, rank in ranks.items()
            if not rank.beat.attempt and has_died_here(rank.beat, now=now)
        ),
        now=now,
        last=last,
        attempt=attempt,
        begun=begun,
        switch=f"{armed}{note}" if armed else "",
        silent=silent,
    )


def _last_attempt(rundir: RunDirectory, last: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how the last attempt ended, and its `attempt` record while it has not ended; {} for what is not.

    How it ended are the fields of its `attempt_end` and `diagnosis`, with `cancelled` where a job was
    cancelled since the launcher of that attempt began. It is {} where the run has begun again without an
    attempt. A start that was refused because another process trains the run is no attempt.

    last: the newest `start` or `end` of the journal.
    """
    attempt: dict[str, Any] = {}
    begun: dict[str, Any] = {}
    launcher, cancelled = "", False
    names = ("attempt", "attempt_end", "diagnosis", "job")
    for event in read_tail(rundir.operations, most_bytes=_TAIL_BYTES, named=names):
        if event["event"] == "job":
            cancelled = cancelled or event.get("state") == CANCELLED
        elif event["event"] == "attempt":
            before, launcher = launcher, str(event.get("attempt")).rpartition("-")[0]
            attempt, begun, cancelled = {}, event, cancelled and launcher == before
        elif event.get("cause") == Cause.RUN_BUSY:
            attempt, begun = {}, {}
        else:
            is_another = event.get("attempt") != attempt.get("attempt")
            attempt, begun = {**({} if is_another else attempt), **event}, {}
    ended, since = time_of(attempt), time_of(last)
    if ended is not None and since is not None and ended < since - _SKEW_S:
        return {}, begun
    return attempt | ({CANCELLED: True} if cancelled else {}), begun


def judge_state(observation: RunObservation, *, limits: StandstillLimits | None = None) -> RunVerdict:
    """Return the state of a run: a job that runs decides, then one that waits, then what was left behind."""
    limits = limits or StandstillLimits()
    order = (JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING, JobState.PENDING)
    for state in order:
        for job in observation.jobs:
            if job.state == state:
                return _of_job(job, observation, limits)
    queued = [job for job in observation.jobs if job.state.is_queued]
    if queued:
        return _of_job(queued[0], observation, limits)
    return _without_job(observation, limits)


def _of_job(job: QueuedJob, observation: RunObservation, limits: StandstillLimits) -> RunVerdict:
    on = f"job {job.job}" + (f" on {', '.join(job.nodes)}" if job.nodes else "")
    if job.state == JobState.RUNNING:
        return _running(job, observation, limits, on=on)
    if job.state == JobState.PENDING:
        when = "" if job.expected_start is None else f", expected to start {_clock(job.expected_start)}"
        return RunVerdict(state=RunStatus.PENDING, why=f"{on}: {job.reason or 'waits'}{when}", job=job)
    remedies = {
        JobState.HELD: job.reason
        if job.reason.startswith(_SAY_WHAT_HELPS)
        else f"scontrol release {job.job}",
        JobState.NEVER: "the job that it waits for has failed: bloomery cancel, then bloomery submit",
        JobState.SUSPENDED: f"scontrol resume {job.job}",
    }
    return RunVerdict(
        state=RunStatus(job.state.value),  # held, suspended … are the same words
        why=f"{on}: {job.reason or job.state}",
        remedy=remedies.get(job.state, ""),
        job=job,
    )


def _running(job: QueuedJob, observation: RunObservation, limits: StandstillLimits, *, on: str) -> RunVerdict:
    begun = max(_passed(job.started, observation.now), _attempt_s(observation))
    own = {number: rank for number, rank in observation.ranks.items() if rank.beat.time >= begun - 1.0}
    living = {number: rank for number, rank in own.items() if not rank.has_ended}
    if not own:
        waited_s = observation.now - begun
        if begun and waited_s > limits.unmeasured_s:
            why = f"{on}: no rank has written a heartbeat since it began, {waited_s / 60:.0f} minutes ago"
            return RunVerdict(
                state=RunStatus.HUNG, why=why, remedy=f"bloomery cancel, job {job.job}", job=job
            )
        return RunVerdict(state=RunStatus.STARTING, why=f"{on}: no rank has written a heartbeat yet", job=job)
    if not living:
        ended_s = observation.now - max(rank.written_s for rank in own.values())
        why = f"{on}: all ranks ended {ended_s:.0f} s ago"
        state = RunStatus.HUNG if ended_s > limits.ending_s else RunStatus.COMPLETING
        return RunVerdict(state=state, why=why, remedy=f"cancel job {job.job}", job=job)
    standstill = judge_progress(living, now=observation.now, limits=limits, measured_s={})
    if standstill is not None:
        why = f"{on}: {_described(standstill)}"
        return RunVerdict(
            state=RunStatus.HUNG, why=why, remedy=f"cancel job {job.job}; the next goes on", job=job
        )
    if observation.switch:
        return RunVerdict(
            state=RunStatus.COMPLETING, why=f"{on}: stops, for {observation.switch} is armed", job=job
        )
    return RunVerdict(state=RunStatus.RUNNING, why=on, job=job)


def _is_replaced(beat: RankBeat, begun: Mapping[str, Any]) -> bool:
    """Return whether a rank is of an earlier attempt than the one that has begun."""
    is_of_it = beat.attempt in ("", begun.get("attempt", beat.attempt))
    return not is_of_it and beat.time < (time_of(begun) or 0.0)


def _attempt_s(observation: RunObservation) -> float:
    """Return when the attempt began that has not ended; 0.0 without one."""
    return _passed(time_of(observation.begun), observation.now)


def _passed(moment: float | None, now: float) -> float:
    """Return a moment that has passed; 0.0 where it is not known, or the clock was set back since."""
    return moment if moment is not None and moment < now + _SKEW_S else 0.0


def _without_job(observation: RunObservation, limits: StandstillLimits) -> RunVerdict:
    living = {
        number: rank
        for number, rank in observation.ranks.items()
        if not rank.has_ended and number not in observation.died
    }
    since_s = observation.now - _attempt_s(observation)
    if not observation.ranks and since_s < _FRESH_S:
        why = "its launcher has started ranks, and none has written a heartbeat yet"
        return RunVerdict(state=RunStatus.STARTING, why=why)
    # What a job wrote before it ended does not tell of a process that runs without one.
    now, over = observation.now, [job for job in observation.jobs if job.state.is_over]
    after = max((_passed(job.ends, now) for job in over), default=0.0) + _ENDING_S
    begin = max(after, now - _FRESH_S)
    fresh = [number for number, rank in living.items() if rank.written_s > begin]
    if observation.last.get("event") == "end" and observation.last.get("finished") and not fresh:
        return RunVerdict(state=RunStatus.FINISHED, why=str(observation.last.get("reason", "")))
    if fresh:
        standstill = judge_progress(living, now=observation.now, limits=limits, measured_s={})
        if standstill is None:
            return RunVerdict(state=RunStatus.RUNNING, why="started without a scheduler")
        why = _described(standstill)
        return RunVerdict(state=RunStatus.HUNG, why=why, remedy="end it; the same command goes on")
    if observation.silent:
        why = f"no rank lives, and the scheduler does not say which jobs wait: {observation.silent}"
        return RunVerdict(state=RunStatus.UNKNOWN, why=why)
    if observation.last.get("failed") or observation.attempt.get("gives_up"):
        why = _failure(observation)
        # A supervisor arms the switch itself after a failure that would repeat.
        disarm = f"; then bloomery stop {observation.path} --disarm" if observation.switch else ""
        remedy = f"{observation.attempt.get('remedy') or _after_a_guard(observation)}{disarm}"
        return RunVerdict(state=RunStatus.FAILED, why=why, remedy=remedy)
    if observation.switch:
        return RunVerdict(
            state=RunStatus.STOPPED,
            why=f"{observation.switch} is armed",
            remedy=f"bloomery stop {observation.path} --disarm; then {_goes_on(observation)}",
        )
    failed = _failed_jobs(observation)
    if failed:
        last = max(failed, key=lambda job: job.submitted)
        why = f"job {last.job}: {last.state_text} {last.reason}".strip()
        return RunVerdict(
            state=RunStatus.FAILED, why=why, remedy=f"read the job's log in {observation.path}/logs"
        )
    if observation.last.get("event") == "end":
        why = str(observation.attempt.get("left") or observation.last.get("reason", ""))
        return RunVerdict(
            state=RunStatus.STOPPED,
            why=f"saved and stopped: {why}; nothing is queued{cancelled_words(observation.jobs)}",
            remedy=_goes_on(observation),
            is_at_limit=_is_at_limit(observation),
        )
    if not observation.last and not observation.ranks and not observation.begun:
        return RunVerdict(state=RunStatus.NEW, why="nothing has trained here", remedy="bloomery submit")
    age = max((rank.beat.time for rank in observation.ranks.values()), default=_attempt_s(observation))
    since = f" since {_clock(age)}" if age else ""
    errors = [rank.beat.error for rank in observation.ranks.values() if rank.beat.error]
    if observation.ranks and not errors and all(rank.has_ended for rank in observation.ranks.values()):
        why = f"all ranks had ended{since} without an error; the journal has no `end`: it was cut or removed"
        return RunVerdict(state=RunStatus.STOPPED, why=why, remedy=_goes_on(observation))
    gone = f"no process{since}, no job, and no `end` in the journal{cancelled_words(observation.jobs)}"
    why = errors[0].splitlines()[0] if errors else gone
    helps = [remedy_in(error) for error in errors[:1] if remedy_in(error)]
    remedy = " Then ".join([*helps, _goes_on(observation)])
    return RunVerdict(state=RunStatus.FAILED if errors else RunStatus.GONE, why=why, remedy=remedy)


def _failed_jobs(observation: RunObservation) -> list[QueuedJob]:
    failed, said = [job for job in observation.jobs if job.state == JobState.FAILED], observation.last
    if said.get("event") == "end":  # which says nothing of a job that began later
        return [job for job in failed if (job.started or 0.0) > (time_of(said) or observation.now)]
    return [] if observation.ranks else failed


def _is_at_limit(observation: RunObservation) -> bool:
    """Return whether the run ended for the time of its job, or of guard.stop_after_minutes."""
    attempt, reason = observation.attempt, str(observation.last.get("reason", ""))
    is_limit = bool(attempt.get("left")) or reason.startswith(_TIME_LIMIT)
    return is_limit and not attempt.get(CANCELLED)


def _failure(observation: RunObservation) -> str:
    """Return the cause and the summary of the last diagnosis, and why nothing was started again after it."""
    attempt = observation.attempt
    summary = str(attempt.get("summary") or observation.last.get("reason", ""))
    cause, gave_up = str(attempt.get("cause") or ""), attempt.get("gives_up")
    words = f"{cause}: {summary}" if cause and cause not in summary else summary
    return f"{words}; not started again: {gave_up}" if gave_up else words


def _after_a_guard(observation: RunObservation) -> str:
    earlier = f"bloomery rewind {observation.path} --to-step STEP (bloomery ckpt list {observation.path})"
    return f"{earlier}, or other settings; then {_goes_on(observation)}"


def _goes_on(observation: RunObservation) -> str:
    path = observation.path
    by_hand = f"bloomery {observation.starts} {path} --supervise"
    return f"bloomery submit {path}, or {by_hand}: it goes on from the last checkpoint"


def _described(standstill: Standstill) -> str:
    silent = f", silent: ranks {list(standstill.silent)}" if standstill.silent else ""
    return f"{standstill}{silent}"


def _clock(moment: float) -> str:
    same_day = time.localtime(moment)[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if same_day else "%Y-%m-%d %H:%M", time.localtime(moment))
