"""Relays state downloads: joins a fetching peer to a reverse connection of a peer that cannot be dialled.

A peer that serves a state and cannot be dialled keeps *reverse connections*, which it dialled itself, waiting
at a relay. A joining peer's connection names the peer that it wants, and is joined to one of those. Then both
ends authenticate each other and check what they receive as they do where one has dialled the other; the relay
copies their bytes and reads none.

The first byte on a waiting connection is a joining peer's. Then the connection is served like an accepted
one, and another one takes its place.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from bloomery.protocol.keys import is_name
from bloomery.transport.connection import Contact
from bloomery.transport.handshake import AuthenticatedConnection
from bloomery.transport.listener import MemberQuota, end
from bloomery.transport.relay import copy_both_ways
from bloomery.transport.sockets import RateLimiter
from bloomery.transport.trust import PeerRefused, RefusalLog

log = logging.getLogger(__name__)

WAITING, OF_SOURCE = 2048, 8
"""The most reverse connections that wait in all, and of one peer: of more, its oldest one is closed."""
WAIT_S = 600.0
"""The seconds after which a waiting connection is closed; a peer that still serves makes another."""
JOINED, OF_NEWCOMER = 256, 32
"""The most connections of fetching peers in all, and of one peer."""
JOIN_S = 5.0
"""The seconds that a fetching connection has for its first byte, and then to be joined to another."""
IDLE_S = 120.0
"""The seconds without a byte after which joined connections end."""


class StateRelay:
    """The reverse connections that wait at this peer, and those that were joined to a fetching peer.

    join_s, wait_s, idle_s: the deadlines, seconds.
    rate_limiter: limits the bytes that are forwarded; None: no limit.
    """

    def __init__(
        self,
        *,
        join_s: float = JOIN_S,
        wait_s: float = WAIT_S,
        idle_s: float = IDLE_S,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        self._join_s, self._wait_s, self._idle_s = join_s, wait_s, idle_s
        self._rate_limiter = rate_limiter
        self._changed, self._refusals = threading.Condition(), RefusalLog()
        self._waiting: dict[str, deque[tuple[float, socket.socket]]] = {}
        """By the peer that waits, the oldest first."""
        self._fetching: set[socket.socket] = set()
        self._quota = MemberQuota(OF_NEWCOMER, total=JOINED)
        self._is_closed = False

    def wait(self, authenticated: AuthenticatedConnection) -> None:
        """Keep a connection whose purpose is `serve` until a joining peer wants the peer that made it."""
        peer, connection = authenticated.hello.peer, authenticated.connection
        with self._changed:
            self._close_late()
            own = self._waiting.setdefault(peer, deque())
            if len(own) >= OF_SOURCE:
                own.popleft()[1].close()
            if self._is_closed or sum(map(len, self._waiting.values())) >= WAITING:
                self._refusals.write(f"'{peer}'", "as many connections wait here as there is room for")
                connection.close()
                return
            own.append((time.monotonic(), connection))
            self._changed.notify_all()

    def take(self, source: str, *, deadline_s: float) -> socket.socket | None:
        """Return a connection of `source` that waits here; None if none comes within `deadline_s`."""
        taken: list[socket.socket] = []

        def is_taken() -> bool:
            connection = self._newest(source)
            taken.extend([connection] if connection is not None else [])
            return bool(taken) or self._is_closed

        with self._changed:
            self._close_late()
            self._changed.wait_for(is_taken, timeout=deadline_s)
        return taken[0] if taken else None

    def join(self, authenticated: AuthenticatedConnection) -> None:
        """Join a connection whose purpose is `fetch` to the peer that it names, and copy until either ends.

        Called on a thread of the connection's own.
        """
        peer, source, newcomer = (
            authenticated.hello.peer,
            authenticated.hello.circuit,
            authenticated.connection,
        )
        if not is_name(source) or not self._quota.enter(peer):
            self._refusals.write(f"'{peer}'", "it names no peer, or has as many connections as it may")
            newcomer.close()
            return
        try:
            with self._changed:
                self._fetching.add(newcomer)
            waiting = None
            if self._has_begun(newcomer):
                waiting = self.take(source, deadline_s=self._join_s)
            if waiting is None:
                self._refusals.write(f"'{peer}'", f"'{source}' does not wait here, or '{peer}' sent nothing")
                return
            log.info("relaying the state of '%s' to '%s'", source, peer)
            copy_both_ways(newcomer, waiting, idle_s=self._idle_s, rate_limiter=self._rate_limiter)
        finally:
            with self._changed:
                self._fetching.discard(newcomer)
            newcomer.close()
            self._quota.leave(peer)

    def close(self) -> None:
        """End all connections that wait or are joined."""
        with self._changed:
            self._is_closed = True
            for connection in self._fetching:
                end(connection)
            for own in self._waiting.values():
                for _, connection in own:
                    connection.close()
            self._waiting.clear()
            self._changed.notify_all()

    def _has_begun(self, newcomer: socket.socket) -> bool:
        """Wait for the joining peer's first byte: the other end takes it as the sign that it was joined."""
        poll = select.poll()
        poll.register(newcomer, select.POLLIN)
        return bool(poll.poll(self._join_s * 1000)) and is_begun(newcomer)

    def _newest(self, source: str) -> socket.socket | None:
        """Take the newest connection of this peer that has not ended. The caller holds the lock."""
        own = self._waiting.get(source, deque())
        while own:
            _, connection = own.pop()
            if not own:
                del self._waiting[source]
            if _is_silent(connection):
                return connection
            connection.close()
        return None

    def _close_late(self) -> None:
        late_s = time.monotonic() - self._wait_s
        for peer, own in list(self._waiting.items()):
            while own and own[0][0] < late_s:
                own.popleft()[1].close()
            if not own:
                del self._waiting[peer]


def is_begun(connection: socket.socket) -> bool:
    """Whether bytes have come on a connection and are to be read."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _is_silent(connection: socket.socket) -> bool:
    """Whether a waiting connection still waits: its peer has neither ended it nor spoken before its turn."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


EACH = 2
"""The reverse connections that wait at each relay."""
PAUSE_S, PAUSE_AT_MOST_S = 0.5, 30.0
"""A relay that cannot be dialled, or closes a connection, is dialled again after a pause, which doubles."""

Serve = Callable[[socket.socket, str], None]
"""Serves a connection, which it owns, that came from this place.

Raises OSError or RuntimeError if there is no descriptor or no thread for it."""


class ReverseDialer:
    """Keeps one peer's reverse connections, with a thread for each relay to which it dials them.

    dial: makes a reverse connection. Raises PeerRefused or OSError.
    """

    def __init__(self, dial: Callable[[Contact], socket.socket]) -> None:
        self._dial = dial
        self._keepers: dict[Contact, _Keeper] = {}

    def keep_at(self, places: Collection[Contact], serve: Serve) -> None:
        """Keep reverse connections to these peers from now on, and to no others. Not for several threads."""
        for place in self._keepers.keys() - set(places):
            self._keepers.pop(place).end()
        for place in set(places) - self._keepers.keys():
            keeper = _Keeper(place, self._dial, serve)
            try:
                threading.Thread(target=keeper.run, name="waiting", daemon=True).start()
            except RuntimeError as error:  # no thread is left: the next call tries it again
                log.info("this peer cannot wait at '%s' for newcomers: %s", place.peer, error)
                continue
            self._keepers[place] = keeper

    def close(self) -> None:
        """End all connections that wait."""
        for keeper in list(self._keepers.values()):
            keeper.end()


class _Keeper:
    def __init__(self, place: Contact, dial: Callable[[Contact], socket.socket], serve: Serve) -> None:
        self._place, self._dial, self._serve = place, dial, serve
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._waiting: dict[int, socket.socket] = {}
        self._since: dict[int, float] = {}
        self._pause_s, self._next_s = PAUSE_S, 0.0

    def run(self) -> None:
        """Make connections, and serve those that joining peers were joined to, until `end` is called."""
        while not self._ended.is_set():
            left_s = self._next_s - time.monotonic()
            if len(self._waiting) < EACH and left_s <= 0:
                self._add()
            elif not self._waiting:
                self._ended.wait(left_s)
            else:
                self._watch(left_s if len(self._waiting) < EACH else None)
        for connection in self._waiting.values():
            connection.close()

    def end(self) -> None:
        """Stop waiting. Connections that are served are not touched."""
        with self._lock:
            self._ended.set()
            for connection in self._waiting.values():
                end(connection)  # wakes the thread that polls it

    def _add(self) -> None:
        try:
            connection = self._dial(self._place)
        except (PeerRefused, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            log.info("this peer cannot wait at '%s' for newcomers: %s", self._place.peer, error)
            self._pause()
            return
        self._since[connection.fileno()] = time.monotonic()
        with self._lock:
            self._waiting[connection.fileno()] = connection
            if self._ended.is_set():
                end(connection)

    def _watch(self, timeout_s: float | None) -> None:
        poll = select.poll()
        for descriptor in self._waiting:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000):
            with self._lock:
                connection = self._waiting.pop(descriptor)
            since = self._since.pop(descriptor, math.inf)
            if not is_begun(connection):
                connection.close()
                if time.monotonic() > since + PAUSE_AT_MOST_S:
                    self._pause_s = PAUSE_S  # it was welcome there, and has only waited as long as it may
                self._pause()
                continue
            self._pause_s = PAUSE_S
            try:
                self._serve(connection, self._place.peer)
            except (OSError, RuntimeError) as error:  # there is no descriptor or no thread for it
                log.warning("a newcomer at '%s' is not served: %s", self._place.peer, error)
                connection.close()

    def _pause(self) -> None:
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_AT_MOST_S)
