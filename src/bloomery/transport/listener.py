"""Accepts connections from peers, gives each a deadline for its handshake, and closes those of strangers."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from bloomery.protocol.hello import ConnectionHello
from bloomery.transport.handshake import DEADLINE_S, AuthenticatedConnection, Identity, handshake_as_listener
from bloomery.transport.sockets import TcpTimeouts, origin_of, prepare
from bloomery.transport.stranger_quota import StrangerPlace, StrangerQuota, accept_all, end
from bloomery.transport.trust import PeerRefused, RefusalLog, Trust

log = logging.getLogger(__name__)


class Listener:
    """Accepts on `sockets`, which it owns, and gives each connection to the handler of its purpose.

    handlers: functions by purpose. Each is called on a thread of its own and owns the connection.
    patience: when the kernel gives up a silent connection.
    deadline_s: for each handshake, seconds.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        identity: Identity,
        trust: Trust,
        *,
        handlers: Mapping[str, Callable[[AuthenticatedConnection], None]],
        patience: TcpTimeouts,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._sockets = tuple(sockets)
        self._identity, self._trust = identity, trust
        self._handlers, self._patience, self._deadline_s = dict(handlers), patience, deadline_s
        self.refusals = RefusalLog()
        self._ended = threading.Event()
        self._strangers = StrangerQuota()
        for listener in self._sockets:
            threading.Thread(target=self._accept, args=(listener,), name="listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Connections that handlers own are not touched."""
        self._ended.set()
        for listener in self._sockets:
            end(listener)  # wakes the thread that waits in accept
            listener.close()
        self._strangers.end_all()

    def _accept(self, listener: socket.socket) -> None:
        accept_all(listener, self._take, ended=self._ended)

    def _take(self, connection: socket.socket, address: str) -> None:
        stranger = self._strangers.enter(connection, address)
        handshake = threading.Thread(target=self._authenticate, args=(connection, stranger), name="handshake")
        handshake.daemon = True
        try:
            handshake.start()
        except RuntimeError:
            stranger.leave()
            raise

    def _authenticate(self, connection: socket.socket, stranger: StrangerPlace) -> None:
        origin = origin_of(connection)
        try:
            with stranger:
                prepare(connection, self._patience)
                self._trust.check_address(connection.getpeername()[0])
                greeted = handshake_as_listener(
                    connection, self._identity, self._trust, admit=self._admit, deadline_s=self._deadline_s
                )
        except (PeerRefused, OSError, ValueError, RuntimeError) as error:  # ssl.SSLError is an OSError
            connection.close()
            self.refusals.write(origin, str(error) or type(error).__name__)
            return
        self._handlers[greeted.greeting.purpose](greeted)

    def _admit(self, greeting: ConnectionHello) -> str:
        return "" if greeting.purpose in self._handlers else f"this peer does not serve '{greeting.purpose}'"
