"""The parent of a peer's ranks: one loop, in which everything that happens meets everything that is known.

Threads bring events: ranks speak, the coordinator's news arrive, connections are made, states are fetched.
The loop alone decides, and never waits for anything but the next event.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bloomery.elastic.control.adoption import bear_witness
from bloomery.elastic.control.codec import Testimony
from bloomery.elastic.control.decision import Decision, Ended, Wait, decide
from bloomery.elastic.control.etcd import Etcd
from bloomery.elastic.control.keys import Keys
from bloomery.elastic.control.membership import Membership
from bloomery.elastic.control.snapshot import Present, Snapshot
from bloomery.elastic.control.view import View
from bloomery.elastic.links.station import Contact, Station
from bloomery.elastic.peer.handoff import Gone, Handoff, Heard
from bloomery.elastic.peer.local import LocalRanks
from bloomery.elastic.peer.means import Events, Fetch, Means, PeerSettings, StateServer
from bloomery.elastic.peer.messages import Holding
from bloomery.elastic.peer.presence import Presence
from bloomery.elastic.peer.progress import Progress
from bloomery.elastic.peer.rates import Rates
from bloomery.elastic.peer.roundwork import RoundWork
from bloomery.elastic.peer.supply import Supply
from bloomery.elastic.peer.writer import Writer
from bloomery.elastic.records import Member
from bloomery.elastic.seam import Halt, Replace
from bloomery.errors import CoordinatorError

log = logging.getLogger(__name__)

_TELL_S = 30.0
_LAST_WORDS_S = 2.0
"""How long what ranks said before they ended may take to be heard."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a peer's part in the run ended."""

    why: str
    failed: bool


class PeerParent:
    """Start it before the ranks, which find it by `path`. `run` returns when they are gone.

    server, fetch: this peer's state for others, and others' for this one. relays: kept up to date here.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        etcd: Etcd,
        station: Station,
        server: StateServer,
        fetch: Fetch,
        events: Events,
        relays: list[Contact] | None = None,
    ) -> None:
        self._settings, self._etcd, self._station = settings, etcd, station
        self._mailbox: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._local = LocalRanks(Progress(settings.timeouts))
        self._handoff = Handoff(self._mailbox.put)
        keys, limits = Keys(settings.run), settings.timeouts
        self._writer = Writer(wake=self._poke, failed=self._mailbox.put)
        self._means = Means(
            settings=settings,
            etcd=etcd,
            keys=keys,
            station=station,
            handoff=self._handoff,
            local=self._local,
            writer=self._writer,
            events=events,
            poke=self._poke,
        )
        self._witnessed: Testimony | None = None
        self._membership = membership = Membership(
            etcd, keys, lease_s=limits.lease_s, heartbeat_s=limits.heartbeat_s
        )
        self._view = View(etcd, keys, idle_s=limits.silence_s)
        self._presence = Presence(self._means, membership)
        self._work = RoundWork(self._means, self._presence, membership)
        self._rates = Rates(self._means)
        self._relays = relays if relays is not None else []
        self._supply = Supply(server, fetch, me=settings.peer, poke=self._poke)
        self._holding: Holding | None = None
        self._is_replacing = False
        self._known: Mapping[str, Present] = {}
        self._evicted: dict[int, str] = {}
        self._ending: Ending | None = None
        self._ending_s = float("inf")
        self._told_s = time.monotonic()
        self._is_closed = threading.Event()

    @property
    def path(self) -> Path:
        """Where ranks connect: BLOOMERY_PARENT."""
        return self._handoff.path

    def open(self) -> None:
        """Learn how the run stands. Raises CoordinatorAway where the coordinator is not there."""
        self._view.start(deadline_s=self._settings.timeouts.arrival_s)

    def run(self) -> Ending:
        """Lead this peer through the run, after `open`."""
        snapshot = self._view.snapshot
        threading.Thread(target=self._bring_news, args=(snapshot.version,), name="news", daemon=True).start()
        try:
            while not self._is_over():
                now = time.monotonic()
                until_s = self._step(self._view.snapshot, now)
                self._take_events(until_s)
        finally:
            self._close()
        assert self._ending is not None, "that is why it is over"
        return self._ending

    def ranks_ended(self, *, failed: bool) -> None:
        """Whoever started the ranks says that none is left. From any thread."""
        self._handoff.until_gone(_LAST_WORDS_S)
        self._mailbox.put(_RanksEnded(failed=failed))

    def _poke(self) -> None:
        self._mailbox.put(None)

    def _bring_news(self, version: int) -> None:
        """Put something into the mailbox whenever the coordinator's news arrive."""
        while not self._is_closed.is_set():
            try:
                snapshot = self._view.changed(version, timeout_s=60.0)
            except CoordinatorError as error:
                self._mailbox.put(error)
                return
            if snapshot.version > version:
                version = snapshot.version
                self._poke()

    def _take_events(self, until_s: float) -> None:
        """Wait for one event, and take all that are there."""
        try:
            event = self._mailbox.get(timeout=max(0.0, until_s - time.monotonic()))
            while True:
                self._take(event)
                event = self._mailbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, event: _Event | None) -> None:
        if isinstance(event, _RanksEnded):
            self._presence.vanish()
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
            elif isinstance(event, Gone):
                self._presence.vanish()  # the others need not wait for the lease
                if self._is_finished():  # ranks that begin after the end find that out themselves
                    self._end("the samples are done", failed=False)
                else:
                    self._end(f"rank {event.rank} is gone: {event.why}", failed=True)

    def _is_finished(self) -> bool:
        commit = self._view.snapshot.commit
        return commit is not None and commit.position.consumed >= self._settings.rounds.total_samples

    def _step(self, snapshot: Snapshot, now: float) -> float:
        """Do what is to be done; returns when to look again though nothing has happened."""
        if self._ending is not None or not self._local.are_here:
            return now + 1.0
        self._check_progress(snapshot, now)
        self._take_holding()
        if self._work.held is not None or self._work.seen >= 0:
            self._work.follow(snapshot)
        if self._evicted:
            return now + 1.0
        self._list(snapshot)
        self._remember(snapshot)
        self._know(snapshot)
        self._rates.look(snapshot, is_ringing=self._work.is_ringing, now=now)
        self._replace(snapshot, now)
        self._work.offer(snapshot)
        self._work.ring(snapshot)
        decision = decide(snapshot, me=self._means.me, settings=self._settings.rounds, now=now)
        self._work.act(decision, snapshot, now=now)
        self._work.go(snapshot, decision)
        if isinstance(decision, Ended) and self._work.seen == decision.commit.round:
            self._end(decision.commit.why or "the samples are done", failed=False)
        self._tell(decision, now)
        return self._next_moment(decision, now)

    def _remember(self, snapshot: Snapshot) -> None:
        """Where the coordinator has lost its data: write down what may restore it, once."""
        if snapshot.remembered is None or snapshot.remembered == self._witnessed:
            return
        self._witnessed, me, keys = snapshot.remembered, self._means.me, self._means.keys
        membership = self._membership
        self._means.writer.write("testimony", lambda: bear_witness(membership, keys, me, snapshot))

    def _take_holding(self) -> None:
        """What the ranks hold now, if they said something new."""
        holding = self._local.holding
        if holding is not None and holding is not self._holding and holding != self._holding:
            self._holding = holding
            self._work.held = (holding.round, holding.digest)
            if self._is_replacing:
                self._is_replacing = False
                self._local.progress.satisfied()
            self._supply.serve(holding)

    def _list(self, snapshot: Snapshot) -> None:
        if self._holding is None:
            return
        round, digest = self._work.held or (self._holding.round, self._holding.digest)
        is_served = (self._holding.round, self._holding.digest) == (round, digest)
        # Written anew only when it says something new: others take that for a word on the newest commit.
        self._presence.be(
            Member(
                peer=self._means.me,
                incarnation=self._settings.incarnation,
                addresses=self._station.addresses,
                serves=self._supply.urls if is_served else (),
                round=round,
                digest=digest,
                lanes=self._local.world or 1,
                recipe=self._settings.recipe,
                samples=self._holding.samples,
                relays=self._settings.relays,
                epoch=snapshot.highest,
                overtaken=0 if self._supply.is_failing else self._work.overtaken,
            )
        )

    def _know(self, snapshot: Snapshot) -> None:
        """Who relays, and who is gone for good."""
        if snapshot.members == self._known:
            return
        self._known = snapshot.members
        listed = [one.member for _, one in sorted(snapshot.members.items())]
        self._relays[:] = [
            Contact(peer=one.peer, incarnation=one.incarnation, addresses=one.addresses)
            for one in listed
            if one.relays and one.addresses
        ]
        self._station.pool.keep({(one.peer, one.incarnation) for one in listed})
        mine = snapshot.members.get(self._means.me)
        for name, other in sorted(snapshot.members.items()):
            if mine is None or other.life >= mine.life:
                continue
            ranks = other.member.lanes
            if other.member.recipe != self._settings.recipe:
                self._end(f"'{name}', who was there before, trains another recipe", failed=True)
            elif ranks != mine.member.lanes:
                self._end(
                    f"'{name}', who was there before, has {ranks} ranks: use --nproc {ranks}", failed=True
                )

    def _replace(self, snapshot: Snapshot, now: float) -> None:
        """Where the ranks hold another state than the run: fetch the run's, and have them load it."""
        commit, held = snapshot.commit, self._work.held
        if commit is None or held is None or self._work.seen < commit.round:
            return
        if held[1] == commit.digest:
            self._supply.stop()
            return
        fetched = self._supply.fetch(snapshot, now=now)
        if fetched is None:
            return
        self._work.held, self._is_replacing = None, True
        self._local.progress.expect(now=now)
        why = f"this peer held round {held[0]}, the run stands at round {commit.round}"
        self._means.events.write("replaced", round=commit.round, held=held[0], seconds=fetched.seconds)
        self._handoff.tell(
            Replace(
                round=commit.round,
                digest=commit.digest,
                position=commit.position,
                directory=fetched.directory,
                why=why,
            )
        )

    def _check_progress(self, snapshot: Snapshot, now: float) -> None:
        """Be unlisted while a rank does not move, and come back when it does."""
        stuck = self._local.progress.stuck(now)
        if stuck and not self._evicted:
            words = "; ".join(f"rank {rank}: {what}" for rank, what in stuck.items())
            log.warning("this peer's ranks do not move (%s): it is unlisted until they do", words)
            self._means.events.write("evicted", round=snapshot.round, why=words)
            self._presence.vanish()
            self._work.stop()
        elif self._evicted and not stuck:
            log.warning("this peer's ranks move again")
            self._means.events.write("back", round=snapshot.round)
        self._evicted = stuck

    def _tell(self, decision: Decision, now: float) -> None:
        """Say now and then whom this peer waits for."""
        if now < self._told_s + _TELL_S:
            return
        self._told_s = now
        if isinstance(decision, Wait):
            log.info("waiting: %s%s", decision.why, f" ({', '.join(decision.whom)})" if decision.whom else "")

    def _next_moment(self, decision: Decision, now: float) -> float:
        moments = [now + _TELL_S, self._local.progress.next_deadline(), self._supply.next_moment()]
        if isinstance(decision, Wait):
            moments.append(decision.until_s)
        elif not isinstance(decision, Ended):
            moments.append(now + 0.5)
        return max(now, min(moment for moment in moments if moment is not None) + 0.001)

    def _end(self, why: str, *, failed: bool) -> None:
        """Tell the ranks to end."""
        if self._ending is not None:
            return
        self._ending = Ending(why=why, failed=failed)
        self._ending_s = time.monotonic()
        self._work.stop()
        self._handoff.tell(Halt(why=why, failed=failed))

    def _leave(self, why: str) -> None:
        """The ranks end by intention."""
        self._presence.vanish()
        self._work.stop()
        self._ending, self._ending_s = Ending(why=why, failed=False), time.monotonic()
        self._means.events.write("leave", round=self._work.seen, why=why)

    def _is_over(self) -> bool:
        if self._ending is None:
            return False
        ended = self._local.are_gone or self._local.world is None
        return ended or time.monotonic() > self._ending_s + self._settings.timeouts.ending_s

    def _close(self) -> None:
        self._is_closed.set()
        self._presence.vanish()
        self._writer.close(within_s=self._settings.timeouts.coordinator_s)
        self._handoff.close()
        self._view.close()


@dataclass(frozen=True, kw_only=True)
class _RanksEnded:
    failed: bool


_Event = Heard | Gone | CoordinatorError | _RanksEnded
