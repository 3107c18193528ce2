"""Accepts connections from peers, each with a deadline for its handshake; turns strangers away."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from bloomery.protocol.hello import ConnectionHello
from bloomery.transport.handshake import DEADLINE_S, Greeted, Identity, receive
from bloomery.transport.sockets import Patience, origin_of, prepare
from bloomery.transport.stranger_quota import Stranger, Strangers, accept_all, end
from bloomery.transport.trust import PeerRefused, RefusalLog, Trust

log = logging.getLogger(__name__)


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
        self._ended = threading.Event()
        self._strangers = Strangers()
        for one in self._sockets:
            threading.Thread(target=self._accept, args=(one,), name="listener", daemon=True).start()

    def close(self) -> None:
        """Listen no more. Connections that were handed on are not touched."""
        self._ended.set()
        for one in self._sockets:
            end(one)  # wakes who waits in accept
            one.close()
        self._strangers.end_all()

    def _accept(self, listener: socket.socket) -> None:
        accept_all(listener, self._take, ended=self._ended)

    def _take(self, connection: socket.socket, address: str) -> None:
        stranger = self._strangers.enter(connection, address)
        meeting = threading.Thread(target=self._meet, args=(connection, stranger), name="handshake")
        meeting.daemon = True
        try:
            meeting.start()
        except RuntimeError:
            stranger.leave()
            raise

    def _meet(self, connection: socket.socket, stranger: Stranger) -> None:
        origin = origin_of(connection)
        try:
            with stranger:
                prepare(connection, self._patience)
                self._trust.check_address(connection.getpeername()[0])
                greeted = receive(
                    connection, self._identity, self._trust, admit=self._admit, deadline_s=self._deadline_s
                )
        except (PeerRefused, OSError, ValueError, RuntimeError) as error:  # ssl.SSLError is an OSError
            connection.close()
            self.refusals.write(origin, str(error) or type(error).__name__)
            return
        self._handlers[greeted.greeting.purpose](greeted)

    def _admit(self, greeting: ConnectionHello) -> str:
        return "" if greeting.purpose in self._handlers else f"nobody is here for '{greeting.purpose}'"
