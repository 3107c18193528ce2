"""Joins newcomers that fetch a state to peers that serve one and that they cannot dial.

A peer that serves a state keeps connections waiting here. A newcomer's connection names the peer that it
wants, and is joined to one of those. Then both ends authenticate each other and check what they receive as
they do where one has dialled the other; the relay copies their bytes and reads none.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque

from bloomery.protocol.keys import is_name
from bloomery.transport.handshake import AuthenticatedConnection
from bloomery.transport.listener import MemberQuota, end
from bloomery.transport.relay import copy_both_ways
from bloomery.transport.trust import RefusalLog

log = logging.getLogger(__name__)

WAITING, OF_SOURCE = 2048, 8
"""So many connections may wait in all, and so many of one peer: of more, its oldest one is closed."""
WAIT_S = 600.0
"""A connection that has waited so many seconds is closed; a peer that still serves makes another."""
JOINED, OF_NEWCOMER = 256, 32
"""So many fetching connections may be here in all, and of one newcomer."""
JOIN_S = 5.0
"""So many seconds a newcomer's connection has for its first byte, and then for somebody to join it to."""
IDLE_S = 120.0
"""Joined connections end after so many seconds without a byte."""


class StateRelay:
    """The connections of peers that serve a state, waiting at this peer, and those joined to newcomers.

    join_s, wait_s, idle_s: the deadlines, seconds.
    """

    def __init__(self, *, join_s: float = JOIN_S, wait_s: float = WAIT_S, idle_s: float = IDLE_S) -> None:
        self._join_s, self._wait_s, self._idle_s = join_s, wait_s, idle_s
        self._changed, self._refusals = threading.Condition(), RefusalLog()
        self._waiting: dict[str, deque[tuple[float, socket.socket]]] = {}
        """By the peer that waits, the oldest first."""
        self._fetching: set[socket.socket] = set()
        self._quota = MemberQuota(OF_NEWCOMER, total=JOINED)
        self._is_closed = False

    def wait(self, authenticated: AuthenticatedConnection) -> None:
        """Keep a connection whose purpose is `serve` until a newcomer wants the peer that made it."""
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
            copy_both_ways(newcomer, waiting, idle_s=self._idle_s)
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
        """Wait for the newcomer's first byte: the other end takes it as the sign that it was joined."""
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
