"""Taking connections: many at once, each with a deadline, strangers sent away without harm to anybody."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from bloomery.elastic.links.greeting import Greeting
from bloomery.elastic.links.handshake import DEADLINE_S, Greeted, Identity, receive
from bloomery.elastic.links.refusal import RefusalLog, Refused
from bloomery.elastic.links.sockets import Patience, origin_of, prepare
from bloomery.elastic.links.trust import Trust

log = logging.getLogger(__name__)

_MAX_STRANGERS = 512
"""Connections that have not yet shown who they are; beyond, the oldest is closed."""


class Listener:
    """Accepts on `sockets` and gives each connection to the handler of its purpose.

    handlers: by purpose; called on a thread of the connection's own, which takes it. admit: why a greeting is
    refused; empty where it is not. Takes the sockets.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        identity: Identity,
        trust: Trust,
        *,
        handlers: Mapping[str, Callable[[Greeted], None]],
        patience: Patience,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._sockets = tuple(sockets)
        self._identity, self._trust = identity, trust
        self._handlers, self._patience, self._deadline_s = dict(handlers), patience, deadline_s
        self.refusals = RefusalLog()
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        for one in self._sockets:
            threading.Thread(target=self._accept_all, args=(one,), name="listener", daemon=True).start()

    def close(self) -> None:
        """Listen no more. Connections that were handed on are not touched."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
            one.close()
        with self._lock:
            for stranger in self._strangers:
                _cut(stranger)

    def _accept_all(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except ConnectionError:
                continue  # it went away while it waited
            except OSError:
                return
            handle = connection.dup()  # TLS takes the connection itself
            with self._lock:
                if len(self._strangers) >= _MAX_STRANGERS:
                    _cut(next(iter(self._strangers)))
                self._strangers[handle] = None
            meeting = threading.Thread(target=self._meet, args=(connection, handle), name="handshake")
            meeting.daemon = True
            meeting.start()

    def _meet(self, connection: socket.socket, handle: socket.socket) -> None:
        origin = origin_of(connection)
        try:
            prepare(connection, self._patience)
            self._trust.check_address(connection.getpeername()[0])
            greeted = receive(
                connection, self._identity, self._trust, admit=self._admit, deadline_s=self._deadline_s
            )
        except (Refused, OSError, ValueError) as error:  # ssl.SSLError is an OSError
            connection.close()
            self.refusals.write(origin, str(error) or type(error).__name__)
            return
        finally:
            with self._lock:
                del self._strangers[handle]
                handle.close()
        self._handlers[greeted.greeting.purpose](greeted)

    def _admit(self, greeting: Greeting) -> str:
        return "" if greeting.purpose in self._handlers else f"nobody is here for '{greeting.purpose}'"


def _cut(connection: socket.socket) -> None:
    """End a connection under whoever works with it; that thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
