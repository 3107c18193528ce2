"""The agent of a peer: the torch-free parent process that leads the peer's ranks through the rounds of a run.

Threads put events into one queue: messages of ranks, changes in the coordinator, connections, fetched states.
One loop takes them, decides by the newest snapshot of the run, and waits for nothing but the next event.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bloomery.agent.admission import Admission
from bloomery.agent.agent_context import (
    AgentContext,
    CoordinatorWriter,
    EventSink,
    FetchState,
    PeerSettings,
    ServesState,
)
from bloomery.agent.backup_choice import BackupChoice
from bloomery.agent.known_commits import KnownCommits, RecoveryReporter
from bloomery.agent.rank_server import RankGone, RankSent, RankServer
from bloomery.agent.rank_state import LocalRanks, RankProgress
from bloomery.agent.registration import BandwidthReports, Registration
from bloomery.agent.round_driver import RoundDriver
from bloomery.agent.state_serving import CopyKeeper, ReverseConnections
from bloomery.agent.state_sync import Behind, KeptAverages, StateSync, SyncedState
from bloomery.coordination.decide import NEEDS_SOMEBODY, Decision, Ended, Wait, decide
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.membership import Membership
from bloomery.coordination.run_view import RunView, SnapshotListener
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.errors import CoordinatorError
from bloomery.protocol.keys import Keys
from bloomery.protocol.rank_messages import StateHeld, StopTraining
from bloomery.protocol.records import Member
from bloomery.transport.connection import Contact
from bloomery.transport.connection_manager import ConnectionManager

log = logging.getLogger(__name__)

_LOG_EVERY_S = 30.0
_LAST_WORDS_S = 2.0
"""The seconds that the agent waits for messages that ranks sent before they ended."""


@dataclass(frozen=True, kw_only=True)
class PeerOutcome:
    """How a peer's part in the run ended. failed: False if the end was asked for, or all samples are used."""

    why: str
    failed: bool


class Agent:
    """Leads one peer. Create it before the ranks, which connect to `path`; `run` returns when they ended.

    server, fetch: `server` serves this peer's state to others, `fetch` fetches theirs.
    knowledge: what this peer knew of the run when it last took part in it.
    relays: a list, which this agent keeps filled with the members that forward connections.
    backups: decides whether this peer makes the run's backups; None where the recipe asks for none.
    averages: averages kept for peers that missed their rounds; None: such peers fetch a whole state.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        etcd: Etcd,
        connection_manager: ConnectionManager,
        server: ServesState,
        fetch: FetchState,
        events: EventSink,
        knowledge: KnownCommits,
        relays: list[Contact] | None = None,
        backups: BackupChoice | None = None,
        averages: KeptAverages | None = None,
    ) -> None:
        self._settings, self._etcd, self._connection_manager = settings, etcd, connection_manager
        self._mailbox: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._local = LocalRanks(RankProgress(settings.timeouts))
        self._rank_server = RankServer(self._mailbox.put)
        keys, limits = Keys(settings.run), settings.timeouts
        self._writer = CoordinatorWriter(wake=self._wake, failed=self._mailbox.put)
        self._context = AgentContext(
            settings=settings,
            etcd=etcd,
            keys=keys,
            connection_manager=connection_manager,
            rank_server=self._rank_server,
            local=self._local,
            writer=self._writer,
            events=events,
            wake=self._wake,
        )
        self._snapshot = RunSnapshot()
        self._membership = membership = Membership(
            etcd,
            keys,
            lease_s=limits.lease_s,
            heartbeat_s=limits.heartbeat_s,
            failed=self._mailbox.put,
        )
        known, claims = knowledge.remembered, settings.rounds.limits
        self._view = RunView(etcd, keys, idle_s=limits.coordinator_silence_s, remembered=known, limits=claims)
        self._listener = SnapshotListener(self._view, wake=self._wake, failed=self._mailbox.put)
        self._recovery = RecoveryReporter(self._context, membership, knowledge)
        self._admission = Admission(self._context, membership, refuse=self._mailbox.put)
        self._registration = Registration(self._context, membership)
        self._round_driver = RoundDriver(self._context, self._registration, membership, averages)
        self._bandwidths, self._backups = BandwidthReports(self._context, membership), backups
        self._reverse = ReverseConnections(
            connection_manager, server, relays if relays is not None else [], me=settings.peer
        )
        reach = connection_manager.reach
        self._state_sync = StateSync(fetch, me=settings.peer, wake=self._wake, averages=averages, reach=reach)
        self._copies = CopyKeeper(server, self._rank_server, self._local, me=settings.peer)
        self._listed_wants = ""
        self._holding: StateHeld | None = None
        self._replacing: SyncedState | None = None
        self._members: Mapping[str, ListedMember] = {}
        self._evicted: dict[int, str] = {}
        self._ending: PeerOutcome | None = None
        self._ending_s = float("inf")
        self._logged_s, self._needs = time.monotonic(), ""

    @property
    def path(self) -> Path:
        """The socket to which the ranks connect; the variable BLOOMERY_PARENT tells them this path."""
        return self._rank_server.path

    def open(self) -> None:
        """Read the state of the run. Raises CoordinatorAway where the coordinator cannot be reached."""
        self._view.start(deadline_s=self._settings.timeouts.coordinator_start_s)

    def run(self) -> PeerOutcome:
        """Lead this peer through the run until its ranks have ended. Call `open` first."""
        self._listener.start(self._view.snapshot.version)
        try:
            while not self._is_over():
                now, began_s = time.monotonic(), time.thread_time()
                until_s = self._step(self._newest(), now)
                self._listener.note_cost(time.thread_time() - began_s)
                self._take_events(until_s)
        finally:
            self._close()
        assert self._ending is not None, "that is why it is over"
        return self._ending

    def ranks_ended(self, *, failed: bool) -> None:
        """Tell the agent that no rank is left. Whoever started the ranks calls this, on any thread."""
        self._rank_server.wait_until_gone(_LAST_WORDS_S)
        self._mailbox.put(_RanksEnded(failed=failed))

    def _newest(self) -> RunSnapshot:
        """The newest snapshot; the last one where the view ended by an error, which ends this peer."""
        try:
            self._snapshot = self._view.snapshot
        except CoordinatorError as error:
            self._take(error)
        return self._snapshot

    def _wake(self) -> None:
        self._mailbox.put(None)

    def _take_events(self, until_s: float) -> None:
        """Wait for an event until `until_s`, then take all that have arrived."""
        try:
            event = self._mailbox.get(timeout=max(0.0, until_s - time.monotonic()))
            while True:
                self._take(event)
                event = self._mailbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, event: _Event | None) -> None:
        if isinstance(event, _RanksEnded):
            self._registration.unlist()
            self._end("its ranks have ended", failed=event.failed)
            self._ending_s = float("-inf")
        elif isinstance(event, CoordinatorError):
            self._end(event.message, failed=True)
        elif event is not None:
            self._local.take(event, now=time.monotonic())
            if self._ending is not None:
                return
            if self._local.leaves is not None:
                self._leave(self._local.leaves)
            elif isinstance(event, RankGone):
                self._registration.unlist()  # so that the others need not wait until the lease expires
                if self._is_finished():  # ranks that start after the end of the run stop by themselves
                    self._end("the samples are done", failed=False)
                else:
                    self._end(f"rank {event.rank} is gone: {event.why}", failed=True)

    def _is_finished(self) -> bool:
        commit = self._newest().commit
        return commit is not None and commit.position.consumed >= self._settings.rounds.total_samples

    def _step(self, snapshot: RunSnapshot, now: float) -> float:
        """Act on the newest snapshot; return when to be called again if no event comes before."""
        if self._ending is not None or not self._local.are_here:
            return now + 1.0
        self._check_progress(snapshot, now)
        self._take_holding()
        contradiction = self._recovery.contradiction(snapshot, self._holding)
        if contradiction is not None:
            self._registration.unlist()
            self._end(contradiction, failed=True, saves=True)
            return now + 1.0
        if not snapshot.forgotten and (self._round_driver.held is not None or self._round_driver.seen >= 0):
            self._round_driver.follow(snapshot)
        if self._evicted:
            return now + 1.0
        if self._holding is not None and self._admission.is_other(snapshot):
            return now + 1.0
        self._list(snapshot)
        self._recovery.follow(snapshot, self._holding, is_listed=self._registration.is_listed(snapshot))
        self._note_members(snapshot)
        start = self._holding.position if self._holding is not None else None
        own = self._registration.own_view(snapshot)
        decision = decide(own, me=self._context.me, settings=self._settings.rounds, now=now, start=start)
        self._round_driver.ring(snapshot)
        if not snapshot.forgotten:  # else the ranks would load the state of an earlier round
            self._take_part(snapshot, decision, now)
        is_syncing = self._holding is None or self._state_sync.is_fetching
        is_busy = is_syncing or self._round_driver.is_ringing
        self._bandwidths.update(snapshot, is_busy=is_busy, now=now)
        self._log_wait(decision, now)
        return self._next_moment(decision, now)

    def _take_part(self, snapshot: RunSnapshot, decision: Decision, now: float) -> None:
        """Make the ranks hold the run's state, offer their part of the round, and carry out the decision."""
        self._replace(snapshot, now)
        self._round_driver.offer(snapshot)
        self._round_driver.carry_out(decision, snapshot, now=now)
        self._round_driver.start_round(snapshot, decision)
        if isinstance(decision, Ended) and self._round_driver.seen == decision.commit.round:
            self._end(decision.commit.why or "the samples are done", failed=False)

    def _take_holding(self) -> None:
        """Note which state the ranks hold, or that they refused one, if they have reported that anew."""
        why, synced = self._local.take_refusal(), self._replacing
        if why is not None and synced is not None:
            whom = ", ".join(synced.sources)
            log.warning("the state of round %d from '%s': %s", synced.commit.round, whom, why)
            self._context.events.write("refused", round=synced.commit.round, whom=whom, why=why)
            self._state_sync.refuse(synced)
            self._holding = None  # the ranks may now report the same state as before
        holding, went_back = self._local.holding, self._round_driver.held is None and self._replacing is None
        if holding is not None and (went_back or holding != self._holding):
            if self._holding is None:
                self._admission.publish(self._local.reading)
            self._holding = holding
            self._round_driver.held = (holding.round, holding.digest)
            if self._replacing is not None:
                self._replacing = None
                self._local.progress.satisfied()

    def _list(self, snapshot: RunSnapshot) -> None:
        if self._holding is None:
            return
        round, digest = self._round_driver.held or (self._holding.round, self._holding.digest)
        self._copies.update(snapshot)
        self._reverse.update(snapshot)
        self._listed_wants = self._state_sync.wants
        # Written again only when something has changed: others read it as an answer to the newest commit.
        self._registration.publish(
            Member(
                peer=self._context.me,
                incarnation=self._settings.incarnation,
                addresses=self._connection_manager.addresses,
                serves=self._reverse.serves,
                round=round,
                digest=digest,
                ranks=self._local.world or 1,
                recipe=self._admission.fingerprint,
                samples=self._holding.samples,
                relays=self._settings.relays,
                epoch=snapshot.own_highest,
                overtaken=0 if self._state_sync.needs_no_waiting else self._round_driver.overtaken,
                backed_up=None if self._backups is None else self._backups.round,
                saves=self._holding.saves,
                copies=self._copies.made,
                wants=self._listed_wants,
            ),
            after=snapshot.commit_revision,
        )
        if self._backups is not None:
            self._backups.update(snapshot)

    def _note_members(self, snapshot: RunSnapshot) -> None:
        """Close connections to members that are gone, and compare the numbers of ranks."""
        self._connection_manager.revoke(snapshot.revoked)
        if snapshot.members == self._members:
            return
        self._members = snapshot.members
        members = [listed.member for _, listed in sorted(snapshot.members.items())]
        self._connection_manager.pool.keep({(member.peer, member.incarnation) for member in members})
        why = self._admission.wrong_ranks(snapshot)
        if why:
            self._end(why, failed=True)

    def _replace(self, snapshot: RunSnapshot, now: float) -> None:
        """Fetch the run's state and have the ranks load it, where they hold another one."""
        commit, own_state = snapshot.commit, self._round_driver.held
        if commit is None or own_state is None or self._round_driver.seen < commit.round:
            return
        if own_state[1] == commit.digest:
            self._state_sync.stop()
            return
        ranks = self._local.world or 1
        behind = Behind(
            round=own_state[0], digest=own_state[1], overtaken=self._round_driver.overtaken, ranks=ranks
        )
        fetched = self._state_sync.fetch(snapshot, now=now, behind=behind)
        if fetched is None:
            return
        self._round_driver.held, self._replacing = None, fetched
        self._local.progress.expect(now=now)
        kind, round = "caught_up" if fetched.is_average else "replaced", fetched.commit.round
        self._context.events.write(kind, round=round, held=own_state[0], seconds=fetched.seconds)
        why = f"this peer held round {own_state[0]}, the run stands at round {commit.round}"
        fetched.hand_over(self._rank_server, count=ranks, why=why)

    def _check_progress(self, snapshot: RunSnapshot, now: float) -> None:
        """Take this peer off the list while one of its ranks makes no progress."""
        stuck = self._local.progress.stuck(now)
        if stuck and not self._evicted:
            words = "; ".join(f"rank {rank}: {activity}" for rank, activity in stuck.items())
            log.warning("ranks of this peer make no progress (%s): the peer is unlisted until they do", words)
            self._context.events.write("evicted", round=snapshot.round, why=words)
            self._registration.unlist()
            self._round_driver.stop()
        elif self._evicted and not stuck:
            log.warning("the ranks of this peer make progress again")
            self._context.events.write("back", round=snapshot.round)
        self._evicted = stuck

    def _log_wait(self, decision: Decision, now: float) -> None:
        """Log now and then whom this peer waits for; log at once what only an operator can end."""
        is_news = isinstance(decision, Wait) and decision.why != self._needs
        self._needs = decision.why if isinstance(decision, Wait) and decision.why in NEEDS_SOMEBODY else ""
        if now < self._logged_s + _LOG_EVERY_S and not (is_news and self._needs):
            return
        self._logged_s = now
        if isinstance(decision, Wait):
            log.info("waiting: %s%s", decision.why, f" ({', '.join(decision.whom)})" if decision.whom else "")

    def _next_moment(self, decision: Decision, now: float) -> float:
        moments = [now + _LOG_EVERY_S, self._local.progress.next_deadline(), self._state_sync.next_moment()]
        if self._state_sync.wants != self._listed_wants:
            moments.append(now)  # to be listed with it
        if isinstance(decision, Wait):
            moments.append(decision.until_s)
        elif not isinstance(decision, Ended):
            moments.append(now + 0.5)
        return max(now, min(moment for moment in moments if moment is not None) + 0.001)

    def _end(self, why: str, *, failed: bool, saves: bool = False) -> None:
        """Tell the ranks to end. saves: they save their state even if `failed`, because it is right."""
        if self._ending is not None:
            return
        self._ending = PeerOutcome(why=why, failed=failed)
        self._ending_s = time.monotonic()
        self._round_driver.stop()
        self._rank_server.send(StopTraining(why=why, failed=failed and not saves))

    def _leave(self, why: str) -> None:
        """End this peer because one rank said that it leaves, and tell the other ranks to stop."""
        self._registration.unlist()
        self._end(why, failed=False)
        self._context.events.write("leave", round=self._round_driver.seen, why=why)

    def _is_over(self) -> bool:
        if self._ending is None:
            return False
        ended = self._local.are_gone or self._local.world is None
        return ended or time.monotonic() > self._ending_s + self._settings.timeouts.ending_s

    def _close(self) -> None:
        self._listener.close()
        self._registration.unlist()
        self._writer.close(within_s=self._settings.timeouts.coordinator_s)
        self._rank_server.close()
        self._view.close()


@dataclass(frozen=True, kw_only=True)
class _RanksEnded:
    failed: bool


_Event = RankSent | RankGone | CoordinatorError | _RanksEnded
