"""Supervises a run on one machine: kills an attempt that hangs, and restarts after a failure."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.blame import diagnose
from bloomery.operate.departure import Departure
from bloomery.operate.diagnosis import GAVE_UP, NODE_IS_BAD, Cause, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence
from bloomery.operate.hang import HangFinding, find_hang
from bloomery.operate.newest_checkpoint import newest_checkpoint
from bloomery.operate.progress_watch import ProgressWatch
from bloomery.operate.share_log import ShareLog, free_gib, free_share
from bloomery.operate.stacks import take_stacks
from bloomery.operate.standstill import StandstillLimits, read_beats
from bloomery.operate.wrong_bits import diagnose_wrong_bits

log = logging.getLogger(__name__)

AGREED = (0, 130, 143)
"""The exit statuses of an attempt that finished, or that somebody asked to end."""
_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RestartBudget:
    """How often a run may start again.

    without_progress: the allowed restarts in a row without a newer checkpoint.
    in_all: the allowed restarts of one supervised run.
    """

    without_progress: int = 3
    in_all: int = 100


@dataclass(frozen=True, kw_only=True)
class JobReactions:
    """The functions that a supervisor calls with the diagnosis of a failure before it starts the ranks again.

    on_bad_node: called where a node is the culprit and must not be used again, to quarantine it.
    on_repeating: called where every further start would fail in the same way, to stop the queued jobs.
    """

    on_bad_node: Callable[[Diagnosis], None]
    on_repeating: Callable[[Diagnosis], None]


def why_no_restart(diagnosis: Diagnosis, *, budget: RestartBudget, in_a_row: int, in_all: int) -> str:
    """Return why a run does not start again after a failure; "" where it does.

    in_a_row: restarts since the run last saved a newer checkpoint.
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
    asked: the signal that asked this launcher to end; 0 for none.
    failure: why the attempt failed, where its launcher knows; "" where only the ranks can tell.
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
        departure: Departure | None = None,
    ) -> None:
        self.name = name
        self._rundir, self._world, self._host = rundir, world, host
        self._measured_s, self._departure = measured_s, departure
        self._progress = ProgressWatch(rundir, limits)
        self._hang: HangFinding | None = None
        self._is_ending, self._why, self.asked, self.failure = False, "", 0, ""
        self._has_started = False
        self._share = ShareLog(rundir, ranks=range(world), host=host)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="attempt watch", daemon=True)
        self._thread.start()

    @property
    def hang(self) -> HangFinding | None:
        """Why the attempt hangs; None while it does not, and where a rank had failed before it did."""
        return None if self._is_ending else self._hang

    @property
    def measured_s(self) -> dict[str, float]:
        """The longest turn of each activity in this attempt and those before it, in seconds."""
        return self._progress.longest_turns(self._measured_s)

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process id of each rank."""
        self._share.started(pids)
        self._has_started = True

    def unlogged(self, rank: int, line: str) -> None:
        """Record a line of a rank that its log did not take, as on a full disk."""
        self._share.unlogged(rank, line)

    def ending(self) -> None:
        """Record that a rank has failed by itself: from now on no standstill is judged."""
        self._is_ending = True

    def ended(self, statuses: Mapping[int, int], *, killed: Collection[int]) -> None:
        """Record the exit status of each rank, and which ranks this launcher killed."""
        self._share.ended(statuses, killed=killed)

    def signalled(self, number: int) -> None:
        """Record that a signal asked this launcher to end, or that the scheduler has warned the job."""
        if number != signal.SIGUSR1:
            self.asked = number
        elif self._departure is not None:
            self._departure.warned()

    def why_to_stop(self) -> str:
        """Return why the ranks must save and stop now; "" while they need not."""
        return self._departure.reason if self._departure is not None else ""

    def why_to_end(self) -> str:
        """Return why the attempt must be ended now; "" while it need not. Never waits for the disk."""
        return self._why

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join(2 * _POLL_S)

    def evidence(self, *, first_step: int) -> FailureEvidence:
        """Collect what is known of how the attempt ended. first_step: the step from which it began."""
        return FailureEvidence(
            ranks=self._share.ends(attempt=self.name),
            kernel={self._host: self._share.kernel()},
            hang=self.hang,
            shm_free=free_share(Path("/dev/shm")),
            shm_free_gib=free_gib(Path("/dev/shm")),
            first_step=first_step,
        )

    def _watch(self) -> None:
        logged_error = ""
        while not self._closed.wait(_POLL_S) and not self._why and not self._is_ending:
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - without this thread no standstill is ever found
                before, logged_error = logged_error, f"{type(error).__name__}: {error}"
                if logged_error != before:
                    log.warning("it could not be judged whether the ranks stand still: %s", logged_error)

    def _look(self) -> None:
        self._share.note_children()
        beats = read_beats(self._rundir, ranks=range(self._world), attempt=self.name)
        if not beats and not self._has_started:  # what comes before the ranks has its own deadlines
            return
        standstill = self._progress.look(beats, self._measured_s)
        if standstill is None:
            return
        finding = find_hang(beats, take_stacks(beats), silent=standstill.silent)
        self._hang = finding
        self._why = f"{standstill}: {finding.summary}"


def supervise(
    rundir: RunDirectory,
    run_attempt: Callable[[AttemptWatch], int],
    *,
    world: int,
    host: str,
    say: Callable[[str], None],
    reactions: JobReactions | None = None,
    departure: Departure | None = None,
    budget: RestartBudget | None = None,
    limits: StandstillLimits | None = None,
) -> int:
    """Run attempts until one ends well, is asked to end, or must not be repeated, and return the exit status.

    run_attempt: runs the ranks of one attempt to their end and returns its exit status.
    say: prints a message for the user.
    reactions: what a job of a scheduler does about failures; None outside of one.
    departure: says when the run must save and stop; None: never.
    budget, limits: None takes the defaults of their classes.
    """
    budget, limits = budget or RestartBudget(), limits or StandstillLimits()
    in_a_row = in_all = 0
    measured_s: dict[str, float] = {}
    newest = newest_checkpoint(rundir)
    began_ms = int(1000 * time.time())  # in containers, host and process number are those of the start before
    with Journal(rundir.operations, is_shared=True) as journal:
        while True:
            name = f"{host}-{os.getpid()}-{began_ms:x}-{in_all}"
            journal.write(
                "attempt", incarnation=0, step=max(newest.step, 0), attempt=name, ranks=world, host=host
            )
            watch = AttemptWatch(
                rundir,
                world=world,
                host=host,
                name=name,
                limits=limits,
                measured_s=measured_s,
                departure=departure,
            )
            try:
                status = run_attempt(watch)
            finally:
                watch.close()
            before, newest = newest, newest_checkpoint(rundir, known=newest)
            leaves = departure.reason if departure is not None else ""
            ended = {"attempt": name, "status": status, "left": leaves}
            journal.write("attempt_end", incarnation=0, step=newest.step, **ended)
            if status in AGREED:
                if leaves:
                    say(f"saved and stopped: {leaves}")
                    return 0
                return status
            if watch.asked:
                return 128 + watch.asked
            evidence = watch.evidence(first_step=max(before.step, 0))
            diagnosis = diagnose_wrong_bits(rundir, evidence) or diagnose(evidence)
            if diagnosis.cause == Cause.UNKNOWN and watch.failure:
                diagnosis = replace(diagnosis, summary=watch.failure)
            measured_s = watch.measured_s
            in_a_row = 0 if newest > before else in_a_row
            why_not = why_no_restart(diagnosis, budget=budget, in_a_row=in_a_row, in_all=in_all) or leaves
            if reactions is not None and diagnosis.cause in NODE_IS_BAD:
                reactions.on_bad_node(diagnosis)
                why_not = why_not or f"{host} is in quarantine, and the next job starts elsewhere"
            told = {"attempt": name, "gives_up": why_not, **diagnosis.to_json()}
            journal.write("diagnosis", incarnation=0, step=newest.step, **told)
            say(f"{diagnosis.cause}: {diagnosis}\n  {diagnosis.remedy}")
            if why_not:
                say(f"not started again: {why_not}")
                if reactions is not None and not diagnosis.retries:
                    reactions.on_repeating(diagnosis)
                is_final = not diagnosis.retries or diagnosis.cause in NODE_IS_BAD
                return diagnosis.exit_status if is_final else GAVE_UP
            in_a_row, in_all = in_a_row + 1, in_all + 1
            say(f"starting again from the newest checkpoint (restart {in_all})")
