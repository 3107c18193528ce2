"""Supervises a run on one machine: ends an attempt that stands still, and restarts after a failure."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.events.heartbeat import RankBeat
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.blame import FailureEvidence, RankEnd, diagnose
from bloomery.operate.diagnosis import GAVE_UP, Diagnosis
from bloomery.operate.hang import HangFinding, find_hang
from bloomery.operate.stacks import take_stacks
from bloomery.operate.standstill import (
    RankObservation,
    StandstillLimits,
    judge_progress,
    longest_turns,
    observe_ranks,
    read_beats,
)

AGREED = (0, 130, 143)
"""The exit statuses of an attempt that finished, or that somebody asked to end."""
_POLL_S = 1.0
_TAIL_BYTES = 1 << 15
_DMESG_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RestartBudget:
    """How often a run may start again.

    without_progress: the allowed restarts in a row without a newer checkpoint.
    in_all: the allowed restarts of one supervised run.
    """

    without_progress: int = 3
    in_all: int = 100


def why_no_restart(diagnosis: Diagnosis, *, budget: RestartBudget, in_a_row: int, in_all: int) -> str:
    """Return why a run does not start again after a failure; "" where it does.

    in_a_row: restarts since the newest checkpoint changed.
    in_all: restarts so far.
    """
    if not diagnosis.retries:
        return "the same start would fail again"
    if in_a_row >= budget.without_progress:
        return f"{in_a_row} restarts in a row brought no newer checkpoint"
    return f"it has been restarted {in_all} times" if in_all >= budget.in_all else ""


class AttemptWatch:
    """Watches the heartbeats of the ranks of one attempt, from a thread, until it is closed.

    world: the number of ranks.
    name: the name of the attempt, which is in the ranks' heartbeats.
    measured_s: the longest turn of each activity in earlier attempts, in seconds.
    hang: why the attempt stands still; None while it does not.
    statuses: the exit status of each rank that has ended.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        *,
        world: int,
        host: str,
        name: str,
        limits: StandstillLimits,
        measured_s: Mapping[str, float],
    ) -> None:
        self.name = name
        self._rundir, self._world, self._host, self._limits = rundir, world, host, limits
        self._measured_s = measured_s
        self._observed: dict[int, RankObservation] = {}
        self.hang: HangFinding | None = None
        self.statuses: dict[int, int] = {}
        self._why, self._pids = "", dict[int, int]()
        self._kernel_before = frozenset(kernel_lines())
        self._log_sizes = {rank: _size(self._log(rank)) for rank in range(world)}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="attempt watch", daemon=True)
        self._thread.start()

    @property
    def measured_s(self) -> dict[str, float]:
        """The longest turn of each activity in this attempt and those before it, in seconds."""
        return longest_turns(self._observed, self._measured_s)

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process number of each rank."""
        self._pids = dict(pids)

    def ended(self, statuses: Mapping[int, int]) -> None:
        """Record the exit status of each rank."""
        self.statuses = dict(statuses)

    def why_to_end(self) -> str:
        """Return why the attempt must be ended now; "" while it need not. Never waits for the disk."""
        return self._why

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join(2 * _POLL_S)

    def evidence(self, *, first_step: int) -> FailureEvidence:
        """Collect what is known of how the attempt ended. first_step: the step from which it began."""
        beats = read_beats(self._rundir, world=self._world, attempt=self.name)
        ends = [self._end(rank, status, beats.get(rank)) for rank, status in sorted(self.statuses.items())]
        kernel = [line for line in kernel_lines() if line not in self._kernel_before]
        return FailureEvidence(
            ranks=ends,
            kernel={self._host: kernel},
            hang=self.hang,
            shm_free=_free_share(Path("/dev/shm")),
            first_step=first_step,
        )

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S) and not self._why:
            beats = read_beats(self._rundir, world=self._world, attempt=self.name)
            now = time.monotonic()
            self._observed = observe_ranks(self._observed, beats, now=now)
            standstill = judge_progress(
                self._observed, now=now, limits=self._limits, measured_s=self._measured_s
            )
            if standstill is None:
                continue
            finding = find_hang(beats, take_stacks(beats), silent=standstill.silent)
            if len(finding.culprits) == 1:
                culprit = beats[finding.culprits[0]]
                finding = replace(finding, hosts=(culprit.host,))
            self.hang = finding
            still = f"no rank has moved for {standstill.still_s:.0f} s ({standstill.allowed_s:.0f} s allowed)"
            self._why = f"{still}: {finding.summary}"

    def _end(self, rank: int, status: int, beat: RankBeat | None) -> RankEnd:
        end = RankEnd(
            rank=rank, host=self._host, pid=self._pids.get(rank, 0), status=status, log=self._log_tail(rank)
        )
        if beat is None:
            return end
        return replace(end, device=beat.device, error=beat.error, step=beat.step)

    def _log(self, rank: int) -> Path:
        return self._rundir.log(host=self._host, rank=rank)

    def _log_tail(self, rank: int) -> str:
        """Return what the rank printed in this attempt, at most the last _TAIL_BYTES."""
        path = self._log(rank)
        size = _size(path)
        begin = max(self._log_sizes[rank], size - _TAIL_BYTES)
        if size <= begin:
            return ""
        with path.open("rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")


def supervise(
    rundir: RunDirectory,
    run_attempt: Callable[[AttemptWatch], int],
    *,
    world: int,
    host: str,
    say: Callable[[str], None],
    budget: RestartBudget | None = None,
    limits: StandstillLimits | None = None,
) -> int:
    """Run attempts until one ends well, is asked to end, or must not be repeated; returns the exit status.

    run_attempt: runs the ranks of one attempt to their end and returns its exit status.
    say: prints a message for the user.
    budget, limits: None takes the defaults of their classes.
    """
    budget, limits = budget or RestartBudget(), limits or StandstillLimits()
    in_a_row = in_all = 0
    measured_s: dict[str, float] = {}
    newest = _newest_step(rundir)
    with Journal(rundir.operations) as journal:
        while True:
            name = f"{host}-{os.getpid()}-{in_all}"
            journal.write("attempt", incarnation=0, step=max(newest, 0), attempt=name, ranks=world, host=host)
            watch = AttemptWatch(
                rundir, world=world, host=host, name=name, limits=limits, measured_s=measured_s
            )
            try:
                status = run_attempt(watch)
            finally:
                watch.close()
            journal.write(
                "attempt_end", incarnation=0, step=_newest_step(rundir), attempt=name, status=status
            )
            if status in AGREED:
                return status
            diagnosis = diagnose(watch.evidence(first_step=max(newest, 0)))
            measured_s, before, newest = watch.measured_s, newest, _newest_step(rundir)
            in_a_row = 0 if newest > before else in_a_row
            why_not = why_no_restart(diagnosis, budget=budget, in_a_row=in_a_row, in_all=in_all)
            journal.write(
                "diagnosis", incarnation=0, step=newest, attempt=name, gives_up=why_not, **diagnosis.to_json()
            )
            say(f"{diagnosis.cause}: {diagnosis}\n  {diagnosis.remedy}")
            if why_not:
                say(f"not started again: {why_not}")
                return diagnosis.exit_status if not diagnosis.retries else GAVE_UP
            in_a_row, in_all = in_a_row + 1, in_all + 1
            say(f"starting again from the newest checkpoint (restart {in_all})")


def kernel_lines() -> list[str]:
    """Return the lines of this machine's kernel log; [] where this user may not read it."""
    try:
        done = subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=_DMESG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _newest_step(rundir: RunDirectory) -> int:
    return max((checkpoint.step for checkpoint in checkpoints(rundir)), default=-1)


def _free_share(path: Path) -> float | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail / facts.f_blocks if facts.f_blocks else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
