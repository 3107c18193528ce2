"""Keeps connections to other peers between rounds, and brings them together for each ring attempt.

Both ends must use the same connections for an attempt, and learn before the ring begins which are dead. So
the sender says `begin` with the attempt's epoch on each connection it wants, the receiver answers on it, and
only then do both hand it to their rings. What an aborted ring leaves in one nobody knows, so it is closed.

Who dials: the sender; after `turn_s` the receiver too; then both go through a relay. What worked is tried
first the next time. An idle connection is watched: one that ends, or on which anything but `begin` comes,
is closed.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bloomery.errors import PeerError
from bloomery.transport.connection import Connection, Place
from bloomery.transport.trust import PeerRefused

log = logging.getLogger(__name__)

DIALLED, ACCEPTED, RELAYED = "dialled", "accepted", "relayed"


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A neighbour in the ring, and the connections wanted to it: `streams` on each of `lanes`.

    addresses: where it may be dialled; none: it cannot be. sends: this peer sends, it receives.
    """

    peer: str
    incarnation: str
    addresses: tuple[str, ...]
    sends: bool
    lanes: tuple[int, ...]
    streams: int

    @property
    def places(self) -> tuple[Place, ...]:
        """Of each connection, by lane, then stream."""
        return tuple(
            Place(self.peer, self.incarnation, lane, stream, self.sends)
            for lane in self.lanes
            for stream in range(self.streams)
        )


@dataclass(frozen=True, kw_only=True)
class Turns:
    """When the next way of connecting is tried as well, how long an answer may take, when to try again."""

    turn_s: float
    answer_s: float
    retry_s: float


Dial = Callable[[Neighbour, Place, int, float], Connection]
"""(hop, place, epoch, deadline_s) → a link. Raises Refused or OSError."""


class LinkError(PeerError):
    """A neighbour cannot be reached."""

    def __init__(self, peer: str, message: str, *, remedy: str) -> None:
        super().__init__(message, remedy=remedy)
        self.peer = peer


class Cancelled(Exception):
    """The attempt is over before its connections were together."""


@dataclass(eq=False)
class _Want:
    """One connection of a gathering. tried: when a way was last begun; busy: ways under way."""

    hop: Neighbour
    place: Place
    link: Connection | None = None
    busy: set[str] = field(default_factory=set)
    next_try: dict[str, float] = field(default_factory=dict)
    why: str = ""


class ConnectionPool:
    """dial, relay: the two ways to make a connection oneself; relay is None where no peer relays."""

    def __init__(self, *, dial: Dial, relay: Dial, is_dialable: bool, turns: Turns) -> None:
        self._dialling, self._relaying = dial, relay
        self._is_dialable, self._turns = is_dialable, turns
        self._changed = threading.Condition()
        self._links: dict[Place, list[Connection]] = {}
        self._ways: dict[tuple[str, str], str] = {}
        self._closing = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._watcher = threading.Thread(target=self._watch, name="idle links", daemon=True)
        self._watcher.start()

    def offer(self, link: Connection) -> None:
        """Take a connection whose handshake is over; the pool owns it from now on."""
        with self._changed:
            if self._closing:
                link.connection.close()
                return
            self._links.setdefault(link.place, []).append(link)
            self._selector.register(link.connection, selectors.EVENT_READ, link)
            self._changed.notify_all()
        self._wake_watcher()

    def gather(
        self,
        hops: Sequence[Neighbour],
        *,
        epoch: int,
        deadline_s: float,
        cancelled: threading.Event,
        relays: bool = False,
    ) -> list[Connection]:
        """The connections of `hops`, in their order, which both ends want for `epoch`. Dials what lacks.

        They stay the pool's; use descriptors until `release` or `discard`. LinkError: one is not to be had;
        Cancelled: `cancelled` was set (call `nudge` after it).
        """
        began = time.monotonic()
        wants = [_Want(hop, place) for hop in hops for place in hop.places]
        with self._changed:
            while True:
                now = time.monotonic()
                if cancelled.is_set() or self._closing:
                    raise Cancelled
                for want in wants:
                    self._further(want, epoch, now=now, began=began, relays=relays)
                links = [want.link for want in wants if want.link is not None]
                if len(links) == len(wants):
                    return links
                if now > began + deadline_s:
                    raise _unreachable([want for want in wants if want.link is None], deadline_s)
                self._changed.wait(max(0.0, self._next_moment(wants, began, deadline_s) - now))

    def nudge(self) -> None:
        """Let `gather` look at its `cancelled` now."""
        with self._changed:
            self._changed.notify_all()

    def release(self, epoch: int) -> None:
        """The ring of `epoch` went well for everybody: its connections are idle again."""
        with self._changed:
            for link in self._of_epoch(epoch):
                link.rest()
                self._selector.register(link.connection, selectors.EVENT_READ, link)
        self._wake_watcher()

    def discard(self, epoch: int) -> None:
        """The ring of `epoch` failed, or its attempt did: close every connection that was meant for it."""
        with self._changed:
            for link in self._of_epoch(epoch):
                self._close(link)

    def keep(self, lives: Collection[tuple[str, str]]) -> None:
        """Close all idle connections to others than these peers' lives: (peer, incarnation)."""
        with self._changed:
            for links in list(self._links.values()):
                for link in list(links):
                    if not link.used and (link.place.peer, link.place.incarnation) not in lives:
                        self._close(link)

    def close(self) -> None:
        """Close everything."""
        with self._changed:
            self._closing = True
            for links in list(self._links.values()):
                for link in list(links):
                    self._close(link)
            self._changed.notify_all()
        self._wake_watcher()
        self._watcher.join(10.0)
        for opened in (self._selector, self._wake, self._woken):
            opened.close()

    @property
    def size(self) -> int:
        """How many connections there are, idle and used."""
        with self._changed:
            return sum(len(links) for links in self._links.values())

    def _of_epoch(self, epoch: int) -> list[Connection]:
        every = [link for links in self._links.values() for link in links]
        return [link for link in every if epoch in (link.used, link.said, link.heard) and link.said <= epoch]

    def _further(self, want: _Want, epoch: int, *, now: float, began: float, relays: bool) -> None:
        """Bring one wanted connection a step nearer to being agreed on."""
        if want.link is not None:
            return
        idle = [link for link in self._links.get(want.place, ()) if not link.used]
        agreed = [link for link in idle if link.said == link.heard == epoch]
        if agreed:
            want.link = agreed[0]
            self._take(want.link, epoch)
            return
        if want.place.sends:
            self._propose(want, idle, epoch, now)
        else:
            for link in idle:
                if link.heard == epoch and link.said != epoch:
                    self._say(link, epoch)
                    self._further(want, epoch, now=now, began=began, relays=relays)
                    return
        # A receiver that has a connection leaves it to the sender to find it dead.
        is_waiting = any(link.said == epoch for link in idle) if want.place.sends else bool(idle)
        if not is_waiting:
            for way in self._ways_due(want, now=now, began=began, relays=relays):
                self._begin(want, way, epoch)

    def _propose(self, want: _Want, idle: list[Connection], epoch: int, now: float) -> None:
        """As the sender: say `begin` on one connection; on the next when the first stays silent."""
        for link in idle:
            if link.said == epoch and now > link.said_at + self._turns.answer_s:
                want.why = "a connection that was kept is silent"
                self._close(link)
        asked = any(link.said == epoch for link in self._links.get(want.place, ()))
        for link in self._links.get(want.place, ())[::-1]:
            if asked:
                return
            if not link.used and link.said < epoch:
                asked = self._say(link, epoch)

    def _say(self, link: Connection, epoch: int) -> bool:
        try:
            link.say_begin(epoch)
        except OSError as error:
            log.info("a connection to %s is broken: %s", link.place.peer, error)
            self._close(link)
            return False
        return True

    def _take(self, link: Connection, epoch: int) -> None:
        link.used = epoch
        with suppress(KeyError):
            self._selector.unregister(link.connection)
        self._ways[link.place.peer, link.place.incarnation] = link.way
        for other in self._links[link.place][:]:
            if other is not link and not other.used and other.since < link.since:
                self._close(other)

    def _ways_due(self, want: _Want, *, now: float, began: float, relays: bool) -> list[str]:
        """Ways to begin now. The first is what worked before, or dialling, by the sender."""
        hop, turn_s = want.hop, self._turns.turn_s
        known = self._ways.get((hop.peer, hop.incarnation), "")
        may_dial, may_accept = bool(hop.addresses), self._is_dialable
        is_first = known == DIALLED or (known != ACCEPTED and (hop.sends or not may_accept))
        starts = {}
        if may_dial:
            starts[DIALLED] = 0.0 if is_first else turn_s
        if relays:
            direct_s = 2 * turn_s if may_dial or may_accept else 0.0
            starts[RELAYED] = 0.0 if known == RELAYED else direct_s
        due = [way for way, start in starts.items() if now >= max(began + start, want.next_try.get(way, 0.0))]
        return [way for way in due if way not in want.busy]

    def _next_moment(self, wants: Sequence[_Want], began: float, deadline_s: float) -> float:
        """When something is to be done though nothing has happened."""
        turn_s, answer_s = self._turns.turn_s, self._turns.answer_s
        moments = [began + deadline_s + 0.001]
        now = time.monotonic()
        for want in wants:
            if want.link is None:
                moments += [began + turn_s, began + 2 * turn_s, *want.next_try.values()]
                moments += [link.said_at + answer_s + 0.001 for link in self._links.get(want.place, ())]
        return min(moment for moment in moments if moment > now or moment == moments[0])

    def _begin(self, want: _Want, way: str, epoch: int) -> None:
        want.busy.add(way)
        make = self._dialling if way == DIALLED else self._relaying
        threading.Thread(
            target=self._make, args=(want, way, make, epoch), name="dialler", daemon=True
        ).start()

    def _make(self, want: _Want, way: str, make: Dial, epoch: int) -> None:
        try:
            link = make(want.hop, want.place, epoch, 3 * self._turns.turn_s)
        except (PeerRefused, OSError, PeerError) as error:
            why = str(error) or type(error).__name__
            with self._changed:
                want.why = why
                want.next_try[way] = time.monotonic() + self._turns.retry_s
                want.busy.discard(way)
                self._changed.notify_all()
            return
        self.offer(link)
        with self._changed:
            want.next_try[way] = time.monotonic() + self._turns.answer_s
            want.busy.discard(way)
            self._changed.notify_all()

    def _watch(self) -> None:
        """Read `begin` on idle connections, and notice those that end."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._woken.recv(4096)
                    continue
                with self._changed:
                    link: Connection = key.data
                    if not link.used and link in self._links.get(link.place, ()):
                        self._read(link)
                        self._changed.notify_all()
            with self._changed:
                if self._closing:
                    return

    def _read(self, link: Connection) -> None:
        try:
            if link.hear_begin() and link.is_agreed:
                # The ring's first bytes may follow at once: they are not this thread's to read.
                self._selector.unregister(link.connection)
        except (PeerRefused, OSError) as error:
            log.info("a connection to %s is closed: %s", link.place.peer, error)
            self._close(link)

    def _close(self, link: Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.connection)
        links = self._links.get(link.place, [])
        if link in links:
            links.remove(link)
        if not links:
            self._links.pop(link.place, None)
        with suppress(OSError):
            link.connection.shutdown(socket.SHUT_RDWR)  # also for who holds another descriptor of it
        link.connection.close()

    def _wake_watcher(self) -> None:
        with suppress(OSError):
            self._wake.send(b".")


def _unreachable(wants: Sequence[_Want], deadline_s: float) -> LinkError:
    first = wants[0]
    where = ", ".join(first.hop.addresses) or "no address"
    return LinkError(
        first.place.peer,
        f"{len(wants)} connections with '{first.place.peer}' ({where}) were not there within "
        f"{deadline_s:.0f} s{': ' + first.why if first.why else ''}.",
        remedy="Open its port to this machine, or this one's to it (elastic.listen, elastic.advertise); let "
        "a peer that both reach relay (elastic.relay); or join both to one VPN (WireGuard) and advertise the "
        "addresses there.",
    )
