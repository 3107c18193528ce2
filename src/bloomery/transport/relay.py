"""Relays bytes between two peers that cannot dial each other: each dials the relay, which joins both.

The relay has authenticated both as peers of the run. Through it they make a handshake of their own, so the
relay does not know their key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from contextlib import suppress

from bloomery.transport.connection import ConnectionPlace
from bloomery.transport.handshake import AuthenticatedConnection

log = logging.getLogger(__name__)

_MAX_CIRCUITS = 1024
_PIECE_BYTES = 1 << 18


class Relay:
    """Joins pairs of connections that name the same circuit.

    wait_s: how long the first connection of a circuit waits for the second, seconds.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[float, socket.socket]] = {}
        self._open: set[socket.socket] = set()

    def join(self, greeted: AuthenticatedConnection) -> None:
        """Join a connection whose purpose is `relay` to its other end, or keep it until that comes."""
        connection, circuit = greeted.connection, greeted.greeting.circuit
        with self._lock:
            self._close_late()
            _, other = self._waiting.pop(circuit, (0.0, None))
            if other is None:
                if len(self._waiting) + len(self._open) // 2 >= _MAX_CIRCUITS:
                    log.warning("a connection is not relayed, because %d are relayed already", _MAX_CIRCUITS)
                    connection.close()
                else:
                    self._waiting[circuit] = (time.monotonic(), connection)
                return
            self._open |= {connection, other}
        log.info("relaying for '%s'", greeted.greeting.peer)
        for source, sink in ((connection, other), (other, connection)):
            threading.Thread(target=self._forward, args=(source, sink), name="relay", daemon=True).start()

    def close(self) -> None:
        """End all relayed and waiting connections."""
        with self._lock:
            for connection in (*self._open, *(connection for _, connection in self._waiting.values())):
                _end(connection)
            self._waiting.clear()

    def _close_late(self) -> None:
        now = time.monotonic()
        for circuit, (since, connection) in list(self._waiting.items()):
            if now > since + self._wait_s:
                del self._waiting[circuit]
                connection.close()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        """Copy from source to sink until either ends, then end both. A pipe keeps the bytes in the kernel."""
        pipe: tuple[int, ...] = ()
        try:
            pipe = reading, writing = os.pipe()
            source.settimeout(None)
            sink.settimeout(None)
            while moved := os.splice(source.fileno(), writing, _PIECE_BYTES):
                while moved:
                    moved -= os.splice(reading, sink.fileno(), moved)
        except OSError as error:
            log.info("a relayed connection ended: %s", error.strerror)
        finally:
            for end in pipe:
                os.close(end)
            _end(source)
            _end(sink)
            with self._lock:
                is_last = source not in self._open or sink not in self._open
                self._open.discard(source)
            if is_last:
                source.close()
                sink.close()


def circuit_of(run: str, me: tuple[str, str], place: ConnectionPlace, epoch: int) -> str:
    """Return the name of a connection through a relay, which both its ends compute alike.

    me: this peer's name and incarnation.
    epoch: of the attempt that needs the connection.
    """
    other = (place.peer, place.incarnation)
    sender, receiver = (me, other) if place.sends else (other, me)
    words = (run, *sender, *receiver, place.lane, place.stream, epoch)
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
