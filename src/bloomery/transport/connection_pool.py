"""Keeps connections to other peers between rounds, and collects those that a ring attempt needs.

Both ends must use the same connections for an attempt, and must find dead ones before the ring begins. So the
sender sends `begin` with the attempt's epoch on each connection that it wants, and the receiver answers with
`begin` on the same one; only then do both hand it to their rings. A connection of a ring that failed is
closed, because unread bytes may be left in it.

The sender dials first, the receiver too after `turn_s`, and after that both go through a relay. The way that
worked is tried first the next time. Idle connections are watched: one that ends, or on which anything but
`begin` comes, is closed.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bloomery.errors import PeerError
from bloomery.transport.connection import Connection, ConnectionPlace
from bloomery.transport.trust import PeerRefused

log = logging.getLogger(__name__)

_SPARE, _PLACES = 4, 64
"""One peer may have _SPARE times the connections that a ring needs, and a ring is taken to need _PLACES at
least: a hostile member could use up the descriptors otherwise."""

_DIALS = 48
"""The most connections to one peer that are made at once: its listener bears 64 strangers of an address."""
DIALLED, ACCEPTED, RELAYED = "dialled", "accepted", "relayed"


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A neighbour in the ring, and the connections that the ring needs to it.

    addresses: where it can be dialled; none: it cannot be dialled.
    sends: whether this peer sends and the neighbour receives; else the other way round.
    ranks: the ranks within a peer that have connections.
    streams: connections of each rank.
    """

    peer: str
    incarnation: str
    addresses: tuple[str, ...]
    sends: bool
    ranks: tuple[int, ...]
    streams: int

    @property
    def places(self) -> tuple[ConnectionPlace, ...]:
        """The place of each connection, by rank, then stream."""
        return tuple(
            ConnectionPlace(self.peer, self.incarnation, rank, stream, self.sends)
            for rank in self.ranks
            for stream in range(self.streams)
        )


@dataclass(frozen=True, kw_only=True)
class DialTiming:
    """When each way of connecting is tried.

    turn_s: the seconds after which the next way is tried as well.
    answer_s: how long a neighbour has to answer `begin`, seconds.
    retry_s: the seconds after which a way that failed is tried again.
    """

    turn_s: float
    answer_s: float
    retry_s: float


Dial = Callable[[Neighbour, ConnectionPlace, int, float], Connection]
"""Makes one connection of (neighbour, place, epoch, deadline_s). Raises PeerRefused or OSError."""


class LinkError(PeerError):
    """A neighbour cannot be reached."""

    def __init__(self, peer: str, message: str, *, remedy: str) -> None:
        super().__init__(message, remedy=remedy)
        self.peer = peer


class Cancelled(Exception):
    """The attempt ended before all its connections were agreed on."""


@dataclass(eq=False)
class _Want:
    """One connection that `gather` needs.

    link: None until both ends agree on one.
    busy: the ways on which a thread is connecting now.
    next_try: when a way may be tried again, by the local monotonic clock, seconds.
    why: the newest failure, for the error.
    """

    hop: Neighbour
    place: ConnectionPlace
    link: Connection | None = None
    busy: set[str] = field(default_factory=set)
    next_try: dict[str, float] = field(default_factory=dict)
    why: str = ""


class ConnectionPool:
    """The connections of one peer, idle and used, for use by several threads.

    dial, relay: make a connection directly, or through a peer that relays.
    is_dialable: whether other peers can dial this one.
    turns: when each way is tried.
    """

    def __init__(self, *, dial: Dial, relay: Dial, is_dialable: bool, turns: DialTiming) -> None:
        self._dialling, self._relaying = dial, relay
        self._is_dialable, self._turns = is_dialable, turns
        self._changed = threading.Condition()
        self._links: dict[ConnectionPlace, list[Connection]] = {}
        self._ways: dict[tuple[str, str], str] = {}
        self._closing, self._dials = False, Counter[str]()
        self._logged: tuple[str, str, str] | None = None
        self._most_places = _PLACES
        self._wake, self._woken = socket.socketpair()
        # epoll and kqueue see a connection that is registered while the watcher already waits.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._watcher = threading.Thread(target=self._watch, name="idle links", daemon=True)
        self._watcher.start()

    def offer(self, link: Connection) -> None:
        """Add a connection whose handshake is done; the pool owns it from now on."""
        with self._changed:
            if self._closing:
                link.connection.close()
                return
            self._make_room(link.place.peer)
            self._links.setdefault(link.place, []).append(link)
            self._selector.register(link.connection, selectors.EVENT_READ, link)
            self._changed.notify_all()

    def gather(
        self,
        hops: Sequence[Neighbour],
        *,
        epoch: int,
        deadline_s: float,
        cancelled: threading.Event,
        relays: bool = False,
    ) -> list[Connection]:
        """Return the connections of `hops`, in their order, that both ends agree to use for `epoch`.

        Missing connections are made. The pool owns them all; the caller may use their descriptors until
        `release` or `discard`.

        cancelled: ends the wait with Cancelled; call `check_cancelled` after it is set.
        relays: whether some peer relays.
        Raises LinkError if connections are missing after `deadline_s`.
        """
        began = time.monotonic()
        wants = [_Want(hop, place) for hop in hops for place in hop.places]
        with self._changed:
            self._most_places = max(self._most_places, len(wants))
            while True:
                now = time.monotonic()
                if cancelled.is_set() or self._closing:
                    raise Cancelled
                for want in wants:
                    self._advance(want, epoch, now=now, began=began, relays=relays)
                links = [want.link for want in wants if want.link is not None]
                if len(links) == len(wants):
                    return links
                if now > began + deadline_s:
                    raise _unreachable([want for want in wants if want.link is None], deadline_s)
                self._changed.wait(max(0.0, self._next_moment(wants, began, deadline_s) - now))

    def check_cancelled(self) -> None:
        """Make `gather` check its event `cancelled` now."""
        with self._changed:
            self._changed.notify_all()

    def release(self, epoch: int) -> None:
        """Mark the connections of `epoch` as idle again, after its ring has succeeded at all members."""
        with self._changed:
            for link in self._of_epoch(epoch):
                link.rest()
                if link.connection not in self._selector.get_map():  # as one that was asked on in vain is
                    self._selector.register(link.connection, selectors.EVENT_READ, link)

    def discard(self, epoch: int) -> None:
        """Close every connection that was meant for `epoch`, after its ring or its attempt has failed."""
        with self._changed:
            for link in self._of_epoch(epoch):
                self._close(link)

    def keep(self, lives: Collection[tuple[str, str]]) -> None:
        """Close all idle connections but those to these lives of peers, which are (peer, incarnation)."""
        with self._changed:
            for links in list(self._links.values()):
                for link in list(links):
                    if not link.used and (link.place.peer, link.place.incarnation) not in lives:
                        self._close(link)

    def close(self) -> None:
        """Close all connections, and end the thread that watches idle ones."""
        with self._changed:
            self._closing = True
            for links in list(self._links.values()):
                for link in list(links):
                    self._close(link)
            self._changed.notify_all()
        with suppress(OSError):  # it was closed before
            self._wake.send(b".")
        self._watcher.join(10.0)
        for resource in (self._selector, self._wake, self._woken):
            resource.close()

    @property
    def size(self) -> int:
        """The number of connections, idle and used."""
        with self._changed:
            return sum(len(links) for links in self._links.values())

    def _make_room(self, peer: str) -> None:
        """Close the oldest idle connection to a peer that has more of them than any ring needs."""
        idle = [link for links in self._links.values() for link in links if link.place.peer == peer]
        idle = [link for link in idle if not link.used]
        if len(idle) >= _SPARE * self._most_places:
            self._close(min(idle, key=lambda link: link.since))

    def _of_epoch(self, epoch: int) -> list[Connection]:
        return [
            link
            for links in self._links.values()
            for link in links
            if epoch in (link.used, link.sent_epoch, link.received_epoch) and link.sent_epoch <= epoch
        ]

    def _advance(self, want: _Want, epoch: int, *, now: float, began: float, relays: bool) -> None:
        """Take the next step towards agreeing on one wanted connection."""
        if want.link is not None:
            return
        idle = [link for link in self._links.get(want.place, ()) if not link.used]
        agreed = [link for link in idle if link.sent_epoch == link.received_epoch == epoch]
        if agreed:
            want.link = agreed[0]
            self._take(want.link, epoch)
            return
        if want.place.sends:
            self._propose(want, idle, epoch, now)
        else:
            for link in idle:
                if link.received_epoch == epoch and link.sent_epoch != epoch:
                    self._send_begin(link, epoch)
                    self._advance(want, epoch, now=now, began=began, relays=relays)
                    return
        # A receiver that has an idle connection makes no other one: the sender finds out whether it is dead.
        is_waiting = any(link.sent_epoch == epoch for link in idle) if want.place.sends else bool(idle)
        if not is_waiting:
            for way in self._ways_due(want, now=now, began=began, relays=relays):
                self._begin(want, way, epoch)

    def _propose(self, want: _Want, idle: list[Connection], epoch: int, now: float) -> None:
        """As the sender, send `begin` on one connection, and on the next one if the first stays silent."""
        for link in idle:
            if link.sent_epoch == epoch and now > link.sent_at + self._turns.answer_s:
                want.why = "a kept connection did not answer"
                self._close(link)
        is_asked = any(link.sent_epoch == epoch for link in self._links.get(want.place, ()))
        for link in self._links.get(want.place, ())[::-1]:
            if is_asked:
                return
            if not link.used and link.sent_epoch < epoch:
                is_asked = self._send_begin(link, epoch)

    def _send_begin(self, link: Connection, epoch: int) -> bool:
        try:
            link.send_begin(epoch)
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
        """Return the ways to begin now: at once the one that worked before, and the sender's dialling."""
        hop, turn_s = want.hop, self._turns.turn_s
        last_way = self._ways.get((hop.peer, hop.incarnation), "")
        may_dial, may_accept = bool(hop.addresses), self._is_dialable
        is_first = last_way == DIALLED or (last_way != ACCEPTED and (hop.sends or not may_accept))
        starts = {}
        if may_dial:
            starts[DIALLED] = 0.0 if is_first else turn_s
        if relays:
            direct_s = 2 * turn_s if may_dial or may_accept else 0.0
            starts[RELAYED] = 0.0 if last_way == RELAYED else direct_s
        due = [way for way, start in starts.items() if now >= max(began + start, want.next_try.get(way, 0.0))]
        return [way for way in due if way not in want.busy]

    def _next_moment(self, wants: Sequence[_Want], began: float, deadline_s: float) -> float:
        """Return when `gather` must check again even if no connection has changed, monotonic seconds."""
        turn_s, answer_s = self._turns.turn_s, self._turns.answer_s
        moments = [began + deadline_s + 0.001]
        now = time.monotonic()
        for want in wants:
            if want.link is None:
                moments += [began + turn_s, began + 2 * turn_s, *want.next_try.values()]
                moments += [link.sent_at + answer_s + 0.001 for link in self._links.get(want.place, ())]
        return min(moment for moment in moments if moment > now or moment == moments[0])

    def _begin(self, want: _Want, way: str, epoch: int) -> None:
        target = want.hop.peer if way == DIALLED else ""  # at the relay connections to all neighbours meet
        if self._dials[target] >= _DIALS:
            return  # the end of another one wakes `gather`
        arguments = want, way, self._dialling if way == DIALLED else self._relaying, epoch
        threading.Thread(target=self._make, args=arguments, name="dialler", daemon=True).start()
        want.busy.add(way)
        self._dials[target] += 1

    def _make(self, want: _Want, way: str, make: Dial, epoch: int) -> None:
        pause_s = self._turns.answer_s
        try:
            self.offer(make(want.hop, want.place, epoch, 3 * self._turns.turn_s))
        except (PeerRefused, OSError, PeerError, RuntimeError) as error:  # RuntimeError: no thread is left
            want.why, pause_s = str(error) or type(error).__name__, self._turns.retry_s
        with self._changed:
            self._dials -= Counter([want.hop.peer if way == DIALLED else ""])
            want.next_try[way] = time.monotonic() + pause_s
            want.busy.discard(way)
            self._changed.notify_all()

    def _watch(self) -> None:
        """Read `begin` on idle connections, and close those that end; runs on a thread of its own."""
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
            if link.receive_begin() and link.is_agreed:
                # The ring's first bytes may follow at once, and this thread must not read them.
                self._selector.unregister(link.connection)
        except (PeerRefused, OSError) as error:
            news = (link.place.peer, link.place.incarnation, str(error))
            if news != self._logged:  # a peer that ends closes as many connections as it has streams
                log.info("connections to %s are closed: %s", link.place.peer, error)
            self._logged = news
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
            link.connection.shutdown(socket.SHUT_RDWR)  # ends it for the ranks too, which hold duplicates
        link.connection.close()


def _unreachable(wants: Sequence[_Want], deadline_s: float) -> LinkError:
    want = wants[0]
    addresses = ", ".join(want.hop.addresses) or "no address"
    return LinkError(
        want.place.peer,
        f"{len(wants)} connections with '{want.place.peer}' ({addresses}) could not be made within "
        f"{deadline_s:.0f} s{': ' + want.why if want.why else ''}.",
        remedy="Open its port to this machine, or this one's to it (elastic.listen, elastic.advertise); let "
        "a peer that both reach relay (elastic.relay); or join both to one VPN (WireGuard) and advertise the "
        "addresses there.",
    )
