"""Relays bytes between two peers that cannot dial each other: each dials the relay, which joins both.

The relay knows that both are of the run. What they say through it they say end to end: the handshake, and
with it the key, is between the two.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from contextlib import suppress

from bloomery.transport.connection import Place
from bloomery.transport.handshake import Greeted

log = logging.getLogger(__name__)

_MAX_CIRCUITS = 1024
_PIECE_BYTES = 1 << 18


class Relay:
    """Joins connections of equal circuits. wait_s: how long the first end waits for the second."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[float, socket.socket]] = {}
        self._open: set[socket.socket] = set()

    def join(self, greeted: Greeted) -> None:
        """Take a connection whose purpose is `relay`."""
        connection, circuit = greeted.connection, greeted.greeting.circuit
        with self._lock:
            self._close_late()
            _, other = self._waiting.pop(circuit, (0.0, None))
            if other is None:
                if len(self._waiting) + len(self._open) // 2 >= _MAX_CIRCUITS:
                    log.warning("no more than %d connections are relayed", _MAX_CIRCUITS)
                    connection.close()
                else:
                    self._waiting[circuit] = (time.monotonic(), connection)
                return
            self._open |= {connection, other}
        log.info("relaying for '%s'", greeted.greeting.peer)
        for source, sink in ((connection, other), (other, connection)):
            threading.Thread(target=self._forward, args=(source, sink), name="relay", daemon=True).start()

    def close(self) -> None:
        """Forward nothing more."""
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
        """Copy until either ends; then both do. Bytes stay in the kernel, on their way through a pipe."""
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


def circuit_of(run: str, me: tuple[str, str], place: Place, epoch: int) -> str:
    """The name of a connection through a relay, which both its ends compute alike. me: peer, incarnation."""
    other = (place.peer, place.incarnation)
    sender, receiver = (me, other) if place.sends else (other, me)
    words = (run, *sender, *receiver, place.lane, place.stream, epoch)
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
