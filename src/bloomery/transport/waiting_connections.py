"""Keeps connections of a peer that serves a state waiting where newcomers that cannot dial it are joined.

The first byte on such a connection is a newcomer's. Then the connection is served like an accepted one, and
another one takes its place.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Collection

from bloomery.transport.connection import Contact
from bloomery.transport.listener import end
from bloomery.transport.state_relay import is_begun
from bloomery.transport.trust import PeerRefused

log = logging.getLogger(__name__)

EACH = 2
"""So many connections wait at each place."""
PAUSE_S, PAUSE_AT_MOST_S = 0.5, 30.0
"""A place that cannot be dialled, or closes a connection, is dialled again after a pause, which doubles."""

Serve = Callable[[socket.socket, str], None]
"""Serves a connection, which it owns, that came from this place.

Raises OSError or RuntimeError if there is no descriptor or no thread for it."""


class WaitingConnections:
    """Waiting connections of one peer, kept by a thread for each place where they wait.

    dial: makes a connection that waits. Raises PeerRefused or OSError.
    """

    def __init__(self, dial: Callable[[Contact], socket.socket]) -> None:
        self._dial = dial
        self._keepers: dict[Contact, _Keeper] = {}

    def keep_at(self, places: Collection[Contact], serve: Serve) -> None:
        """Wait at these peers from now on, and no more at others. Not for several threads at once."""
        for place in self._keepers.keys() - set(places):
            self._keepers.pop(place).end()
        for place in set(places) - self._keepers.keys():
            keeper = self._keepers[place] = _Keeper(place, self._dial, serve)
            threading.Thread(target=keeper.run, name="waiting", daemon=True).start()

    def close(self) -> None:
        """End all connections that wait."""
        for keeper in list(self._keepers.values()):
            keeper.end()


class _Keeper:
    def __init__(self, place: Contact, dial: Callable[[Contact], socket.socket], serve: Serve) -> None:
        self._place, self._dial, self._serve = place, dial, serve
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._waiting: dict[int, socket.socket] = {}
        self._pause_s, self._next_s = PAUSE_S, 0.0

    def run(self) -> None:
        """Make connections, and serve those that newcomers were joined to, until `end` is called."""
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
        except (PeerRefused, OSError) as error:
            log.info("this peer cannot wait at '%s' for newcomers: %s", self._place.peer, error)
            self._pause()
            return
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
            if not is_begun(connection):
                connection.close()
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
