"""Supervises a run over several nodes, whose launchers start, watch, end and restart its ranks together.

Every launcher runs this code. The first that is alive, in the order of hosts, leads: it watches the
heartbeats of all launchers and ranks, and writes the next decision; when it is lost, the next one leads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bloomery.errors import RankLost, StorageError
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.blame import diagnose
from bloomery.operate.decision import HANG, SILENT, Decision, ShareResult, evidence_of
from bloomery.operate.departure import Departure
from bloomery.operate.diagnosis import EXIT_STATUSES, GAVE_UP, NODE_IS_BAD, Cause, Diagnosis
from bloomery.operate.hang import find_hang
from bloomery.operate.job_board import JobBoard, assign_hosts
from bloomery.operate.launcher import port_for_ranks
from bloomery.operate.newest_checkpoint import newest_checkpoint
from bloomery.operate.progress_watch import ProgressWatch
from bloomery.operate.share_log import ShareLog, free_gib, free_share
from bloomery.operate.share_watch import ShareWatch
from bloomery.operate.stacks import RankStack, take_stacks
from bloomery.operate.standstill import StandstillLimits, read_beats
from bloomery.operate.start_check import StartCheck
from bloomery.operate.supervise import AGREED, JobReactions, RestartBudget, why_no_restart
from bloomery.operate.wrong_bits import diagnose_wrong_bits

log = logging.getLogger(__name__)

_TICK_S = 0.25
_SPARES_S = 30.0
"""The seconds to wait for more launchers once enough for a start have come."""
_RESULTS_S = 45.0
"""Seconds that the ranks of living nodes may take to end, once one has failed."""
_STACKS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """nodes: launchers that are expected, spares included. needed: those that start ranks. ranks: of each."""

    nodes: int
    needed: int
    ranks: int


class GroupSupervisor:
    """Runs the attempts of one node, together with the launchers of the others.

    job: a name that is equal on all nodes and differs between jobs.
    say: prints a message for the user.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        board: JobBoard,
        *,
        job: str,
        size: GroupSize,
        say: Callable[[str], None],
        reactions: JobReactions | None = None,
        departure: Departure | None = None,
        check: StartCheck | None = None,
        budget: RestartBudget | None = None,
        limits: StandstillLimits | None = None,
        join_timeout_s: float = 600.0,
    ) -> None:
        self._rundir, self._board, self._job, self._size, self._say = rundir, board, job, size, say
        self._reactions, self._departure, self._check = reactions, departure, check
        self._budget, self._limits = budget or RestartBudget(), limits or StandstillLimits()
        self._join_timeout_s, self._began = join_timeout_s, time.monotonic()
        self._decision: Decision | None = None
        self._unwritten: Decision | None = None
        self._watch: ShareWatch | None = None
        self._asked, self._warned, self._progress = 0, "", ProgressWatch(rundir, self._limits)
        self._enough_since = self._ending_since = self._looked = float("-inf")
        self._stacks_given, self._closed, self._changed = 0, threading.Event(), threading.Condition()
        self._error: BaseException | None = None

    def run(self, run_attempt: Callable[[Decision, ShareWatch], int]) -> int:
        """Take part in attempts until the leader decides the exit status, which is returned.

        run_attempt: runs this node's ranks of one attempt to their end and returns their exit status.
        """
        threads = [
            threading.Thread(target=self._repeat, args=(self._beat, self._board.interval_s), daemon=True),
            threading.Thread(target=self._repeat, args=(self._tick, _TICK_S), daemon=True),
        ]
        if self._check is not None:  # before the first heartbeat: who lives has said what it is
            self._board.put_facts(self._check.gather(self._rundir, self._board.host))
        self._beat()
        for thread in threads:
            thread.start()
        try:
            number = 0
            while True:
                decision = self._next_after(number)
                number = decision.number
                if decision.status is not None:
                    if decision.why:
                        self._say(decision.why)
                    return decision.status
                if decision.share(self._board.host):
                    self._run_share(decision, run_attempt)
        finally:
            self._closed.set()
            for thread in threads:
                thread.join(2.0)

    def _run_share(self, decision: Decision, run_attempt: Callable[[Decision, ShareWatch], int]) -> None:
        host, number = self._board.host, decision.number
        share = ShareLog(self._rundir, ranks=decision.share(host), host=host)
        watch = ShareWatch(
            self._board, decision, share, name=f"{self._job}-{number}", departure=self._departure
        )
        self._watch = watch
        status = run_attempt(decision, watch)
        self._watch = None
        self._asked = self._asked or watch.asked
        result = ShareResult(
            host=host,
            status=status,
            ends=tuple(share.ends(attempt=watch.name)),
            kernel=tuple(share.kernel()),
            shm_free=free_share(Path("/dev/shm")),
            shm_free_gib=free_gib(Path("/dev/shm")),
        )
        self._report(number, result)

    def _report(self, number: int, result: ShareResult) -> None:
        """Tell how an attempt ended, and before that whether this launcher was asked to end.

        A disk that refuses is asked again until the others go on without the result, or for as long as they
        wait for it. Raises StorageError.
        """
        refused_at = time.monotonic() + _RESULTS_S
        while True:
            try:
                self._beat()
                self._board.put(f"result-{number}-{result.host}", result.to_json())
                return
            except StorageError:
                if self._decision is not None and self._decision.number > number:
                    return
                if time.monotonic() > refused_at:
                    raise
                time.sleep(_TICK_S)

    def _next_after(self, number: int) -> Decision:
        """Wait for the newest decision after `number`; a leader that is lost is replaced by another."""
        with self._changed:
            while self._decision is None or self._decision.number <= number:
                self._changed.wait(1.0)
                if self._error is not None:
                    raise self._error
            return self._decision

    def _repeat(self, step: Callable[[], None], interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            try:
                step()
            except (StorageError, OSError):
                continue  # a disk that hangs for a while makes this launcher silent, which the others judge
            except BaseException as error:  # noqa: BLE001 - the edge of a thread: raised by the main thread
                if self._watch is not None and isinstance(error, Exception):
                    self._warn_once(error)  # and this thread goes on to watch the ranks that run
                    continue
                self._error = error
                return

    def _warn_once(self, error: Exception) -> None:
        before, self._warned = self._warned, f"{type(error).__name__}: {error}"
        if self._warned != before:
            log.warning("the job could not be looked after: %s", self._warned)

    def _beat(self) -> None:
        self._board.beat(asked=self._asked, departs=self._departure.reason if self._departure else "")

    def _tick(self) -> None:
        self._follow()
        if self._watch is not None:
            self._watch.poll()
        if self._board.leads():
            self._lead()

    def _follow(self) -> None:
        """Read the decisions that were taken, and give the stacks of the ranks here when asked for."""
        number = self._decision.number if self._decision else 0
        while (record := self._board.get(f"decision-{number + 1:06d}")) is not None:
            self._adopt(Decision.from_json(record))
            number += 1
        decision = self._decision
        if decision is None or self._stacks_given == decision.number:
            return
        if self._board.has(f"ask-{decision.number}"):
            self._stacks_given = decision.number
            stacks = take_stacks(self._beats(decision, decision.share(self._board.host)))
            record = {"stacks": [stack.to_json() for stack in stacks.values()]}
            self._board.put(f"stacks-{decision.number}-{self._board.host}", record)

    def _adopt(self, decision: Decision) -> None:
        with self._changed:
            self._decision, self._unwritten = decision, None
            self._changed.notify_all()
        self._progress, self._ending_since = ProgressWatch(self._rundir, self._limits), float("-inf")

    def _beats(self, decision: Decision, ranks: range) -> dict[int, Any]:
        return read_beats(self._rundir, ranks=ranks, attempt=f"{self._job}-{decision.number}")

    def _lead(self) -> None:
        decision = self._decision
        if self._unwritten is not None:  # the disk refused it, and all that led to it was told already
            self._decide(self._unwritten)
            return
        if decision is None:
            self._begin()
            return
        if decision.status is not None:
            return
        results = self._results(decision)
        missing = [host for host in decision.hosts if host not in results]
        silent = [host for host in missing if not self._board.is_alive(host)]
        ending = self._board.get(f"ending-{decision.number}")
        if ending is None and silent:
            why = f"the launcher on {', '.join(silent)} has been silent for {self._board.silence_s:.0f} s"
            self._end(decision, kind=SILENT, why=why)
        elif ending is None and missing:
            self._look_for_hang(decision)
        if ending is not None and self._ending_since == float("-inf"):
            self._ending_since = self._board.now()
        is_late = ending is not None and self._board.now() - self._ending_since > _RESULTS_S
        if not missing or (ending is not None and (missing == silent or is_late)):
            self._conclude(decision, results, ending)

    def _begin(self) -> None:
        """Decide on the first attempt once all launchers have come, or enough of them some time ago."""
        living, now = self._board.living(), time.monotonic()
        waited_s = now - self._began
        if len(living) < self._size.needed:
            if waited_s > self._join_timeout_s:
                why = (
                    f"{self._size.needed - len(living)} of {self._size.needed} nodes did not come within "
                    f"{waited_s:.0f} s: only {', '.join(living)} did (do all see one {self._rundir.path}?)"
                )
                self._decide(Decision(number=1, status=RankLost.exit_status, why=why))
            return
        if self._enough_since == float("-inf"):
            self._enough_since = now
        if len(living) >= self._size.nodes or now - self._enough_since > _SPARES_S:
            bad = []
            if self._check is not None:
                facts_by_host = self._board.facts(living)
                bad = self._check.unfit_hosts(
                    self._rundir, facts_by_host, say=self._say, reactions=self._reactions
                )
            hosts = [host for host in living if host not in bad][: self._size.needed]
            if len(hosts) < self._size.needed:
                why = f"{', '.join(bad)} must not be used: {len(hosts)} of {self._size.needed} nodes are left"
                self._decide(Decision(number=1, status=EXIT_STATUSES[Cause.UNFIT_NODE], why=why))
                return
            self._attempt(Decision(number=0, newest=newest_checkpoint(self._rundir), bad=tuple(bad)), hosts)

    def _results(self, decision: Decision) -> dict[str, ShareResult]:
        results = {}
        for host in decision.hosts:
            record = self._board.get(f"result-{decision.number}-{host}")
            if record is not None:
                results[host] = ShareResult.from_json(record)
        return results

    def _end(self, decision: Decision, *, kind: str, why: str, **more: object) -> None:
        self._board.put(f"ending-{decision.number}", {"kind": kind, "why": why, **more})
        self._say(f"{why}; ending the ranks")

    def _look_for_hang(self, decision: Decision) -> None:
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        self._looked = now
        beats = self._beats(decision, range(decision.world))
        standstill = self._progress.look(beats, decision.measured_s)
        if standstill is not None:
            finding = find_hang(beats, self._all_stacks(decision), silent=standstill.silent)
            why = f"{standstill}: {finding.summary}"
            self._end(decision, kind=HANG, why=why, finding=asdict(finding))

    def _all_stacks(self, decision: Decision) -> dict[int, RankStack]:
        """Ask all launchers for the stacks of their ranks; return those that come within _STACKS_S."""
        self._board.put(f"ask-{decision.number}", {})
        self._follow()  # which gives those of this node
        deadline, stacks = time.monotonic() + _STACKS_S, dict[int, RankStack]()
        waited_for = list(decision.hosts)
        while waited_for and time.monotonic() < deadline:
            for host in tuple(waited_for):
                record = self._board.get(f"stacks-{decision.number}-{host}")
                if record is not None or not self._board.is_alive(host):
                    waited_for.remove(host)
                for stack in map(RankStack.from_json, (record or {}).get("stacks", ())):
                    stacks[stack.rank] = stack
            time.sleep(0.1)
        return stacks

    def _conclude(
        self, decision: Decision, results: Mapping[str, ShareResult], ending: Mapping[str, Any] | None
    ) -> None:
        """Journal how an attempt ended, and decide what comes next."""
        newest = newest_checkpoint(self._rundir, known=decision.newest)
        statuses = [result.status for result in results.values()]
        is_agreed = ending is None and all(status in AGREED for status in statuses)
        status = max(statuses, default=RankLost.exit_status)
        name = f"{self._job}-{decision.number}"
        asked, left = self._asked or self._board.asked(decision.hosts), self._board.departs(decision.hosts)
        with Journal(self._rundir.operations, is_shared=True) as journal:
            ended = {"attempt": name, "status": status, "left": left}
            journal.write("attempt_end", incarnation=0, step=newest.step, **ended)
            if is_agreed or asked:
                final = status if is_agreed else 128 + asked
                why = f"saved and stopped: {left}" if is_agreed and left else ""
                end = Decision(number=decision.number + 1, status=0 if why else final, why=why, newest=newest)
                self._decide(end)
                return
            evidence = evidence_of(decision, results, ending=ending)
            diagnosis = diagnose_wrong_bits(self._rundir, evidence) or diagnose(evidence)
            in_a_row = 0 if newest > decision.newest else decision.in_a_row
            why_not = why_no_restart(
                diagnosis, budget=self._budget, in_a_row=in_a_row, in_all=decision.in_all
            )
            why_not = why_not or left
            bad = self._bad_nodes(decision, diagnosis, results)
            hosts = assign_hosts(
                decision.hosts, living=self._board.living(), bad=bad, wanted=self._size.needed
            )
            if not why_not and len(hosts) < self._size.needed:
                why_not = f"{len(hosts)} of {self._size.needed} nodes are left in this job"
            told = {"attempt": name, "gives_up": why_not, **diagnosis.to_json()}
            journal.write("diagnosis", incarnation=0, step=newest.step, **told)
        self._say(f"{diagnosis.cause}: {diagnosis}\n  {diagnosis.remedy}")
        following = replace(
            decision,
            newest=newest,
            in_a_row=in_a_row + 1,
            in_all=decision.in_all + 1,
            bad=tuple(bad),
            measured_s=self._progress.longest_turns(decision.measured_s),
        )
        if not why_not:
            self._say(f"starting again from the newest checkpoint (restart {following.in_all})")
            self._attempt(following, hosts)
            return
        if not diagnosis.retries and self._reactions is not None:
            self._reactions.on_repeating(diagnosis)
        is_short = len(hosts) < self._size.needed
        final = diagnosis.exit_status if is_short or not diagnosis.retries else GAVE_UP
        end = Decision(number=decision.number + 1, status=final, why=f"not started again: {why_not}")
        self._decide(end)

    def _bad_nodes(
        self, decision: Decision, diagnosis: Diagnosis, results: Mapping[str, ShareResult]
    ) -> list[str]:
        """Return the hosts to leave out, and put a culprit into quarantine before anything starts again."""
        bad = [*decision.bad, *(host for host in decision.hosts if host not in results)]
        host = diagnosis.culprit.host
        if diagnosis.cause in NODE_IS_BAD and host:
            if self._reactions is not None:
                self._reactions.on_bad_node(diagnosis)
            bad += [host] if diagnosis.cause != Cause.GPU_MEMORY_AT_START else []
        return list(dict.fromkeys(bad))

    def _attempt(self, before: Decision, hosts: list[str]) -> None:
        """Decide on the next attempt, on these hosts."""
        card = self._board.card(hosts[0])
        assert card is not None, "a host that is alive has a card"
        number = before.number + 1
        decision = replace(
            before,
            number=number,
            hosts=tuple(hosts),
            ranks=self._size.ranks,
            meeting=f"{card.address}:{port_for_ranks(is_here=hosts[0] == self._board.host)}",
        )
        with Journal(self._rundir.operations, is_shared=True) as journal:
            fields = {"attempt": f"{self._job}-{number}", "ranks": decision.world, "hosts": hosts}
            step = max(decision.newest.step, 0)
            journal.write("attempt", incarnation=0, step=step, host=self._board.host, **fields)
        self._decide(decision)

    def _decide(self, decision: Decision) -> None:
        self._unwritten = decision
        if self._board.put(f"decision-{decision.number:06d}", decision.to_json()):
            self._adopt(decision)
