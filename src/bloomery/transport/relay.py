"""Relays ring connections between two peers that cannot dial each other, by copying bytes both ways.

Both have dialled this peer, which has authenticated each as a peer of the run. Through it they make a
handshake of their own, so the relay does not know their key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

from bloomery.transport.connection import ConnectionPlace
from bloomery.transport.handshake import AuthenticatedConnection
from bloomery.transport.listener import end
from bloomery.transport.sockets import RateLimiter
from bloomery.transport.trust import RefusalLog

log = logging.getLogger(__name__)

_MAX_CIRCUITS = 1024
_OF_MEMBER = _MAX_CIRCUITS // 4
"""The most ends of circuits that one member may have at a relay."""
_PIECE_BYTES = 1 << 18
_TIMEOUT = struct.Struct("@ll")


class Relay:
    """Joins pairs of connections that name the same circuit of a ring.

    wait_s: how long the first connection of a circuit waits for the second, seconds.
    rate_limiter: limits the bytes that are forwarded; None: no limit.
    """

    def __init__(self, *, wait_s: float, rate_limiter: RateLimiter | None = None) -> None:
        self._wait_s, self._rate_limiter = wait_s, rate_limiter
        self._lock, self._refusals = threading.Lock(), RefusalLog()
        self._waiting: dict[str, tuple[float, socket.socket, str]] = {}
        self._open: dict[socket.socket, str] = {}
        """The ends that are joined, each with the member that it belongs to."""

    def join(self, authenticated: AuthenticatedConnection) -> None:
        """Keep a connection whose purpose is `relay` until its other end comes; then copy between both.

        Called on a thread of the connection's own. It returns at once for the first end of a circuit, and
        for the second one when either has ended.
        """
        connection, circuit, peer = (
            authenticated.connection,
            authenticated.hello.circuit,
            authenticated.hello.peer,
        )
        with self._lock:
            self._close_late()
            held = sum(owner == peer for owner in (*self._open.values(), *self._waiting_peers))
            if held >= _OF_MEMBER or len(self._waiting) + len(self._open) // 2 >= _MAX_CIRCUITS:
                self._refusals.write(f"'{peer}'", f"it is not relayed, for {held} of its ends are here")
                connection.close()
                return
            _, other, first = self._waiting.pop(circuit, (0.0, None, ""))
            if other is None:
                self._waiting[circuit] = (time.monotonic(), connection, peer)
                return
            self._open |= {connection: peer, other: first}
        log.info("relaying for '%s'", peer)
        try:
            copy_both_ways(connection, other, rate_limiter=self._rate_limiter)
        finally:
            with self._lock:
                del self._open[connection], self._open[other]

    def close(self) -> None:
        """End all relayed and waiting connections."""
        with self._lock:
            for connection in (*self._open, *(connection for _, connection, _ in self._waiting.values())):
                end(connection)
            self._waiting.clear()

    @property
    def _waiting_peers(self) -> Iterator[str]:
        return (peer for _, _, peer in self._waiting.values())

    def _close_late(self) -> None:
        now = time.monotonic()
        for circuit, (since, connection, _) in list(self._waiting.items()):
            if now > since + self._wait_s:
                del self._waiting[circuit]
                connection.close()


def copy_both_ways(
    one: socket.socket, other: socket.socket, *, idle_s: float = 0.0, rate_limiter: RateLimiter | None = None
) -> None:
    """Copy the bytes of each connection to the other one until either ends; then close both, which it owns.

    idle_s: both end after so many seconds without a byte in either direction; 0: only when one of them ends.
    rate_limiter: limits the bytes of both directions together; None: no limit.
    """
    copying = _Copying(idle_s, rate_limiter or RateLimiter(0.0))
    try:
        for connection in (one, other):
            connection.settimeout(None)
            limit = _TIMEOUT.pack(int(idle_s), int(idle_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        back = threading.Thread(target=copying.copy, args=(other, one), name="relay", daemon=True)
        back.start()
        copying.copy(one, other)
        back.join()
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
        log.warning("a connection is not relayed: %s", error)
    finally:
        one.close()
        other.close()


class _Copying:
    def __init__(self, idle_s: float, rate_limiter: RateLimiter) -> None:
        self._idle_s, self._moved_s = idle_s, time.monotonic()
        self._rate_limiter = rate_limiter
        self._piece_bytes = min(_PIECE_BYTES, rate_limiter.piece_bytes)

    def copy(self, source: socket.socket, sink: socket.socket) -> None:
        """Copy from source to sink until either ends, then end both. A pipe keeps the bytes in the kernel."""
        pipe: tuple[int, ...] = ()
        try:
            pipe = reading, writing = os.pipe()
            while moved := self._fill_pipe(source, writing):
                self._moved_s = time.monotonic()
                self._rate_limiter.take(moved)
                while moved:
                    moved -= os.splice(reading, sink.fileno(), moved)
        except OSError as error:
            log.info("a relayed connection ended: %s", error.strerror)
        finally:
            for descriptor in pipe:
                os.close(descriptor)
            end(source)
            end(sink)

    def _fill_pipe(self, source: socket.socket, pipe: int) -> int:
        """Move bytes from the source into the pipe, and return how many; 0: the source has ended."""
        while True:
            try:
                return os.splice(source.fileno(), pipe, self._piece_bytes)
            except BlockingIOError:  # silent for idle_s, as one direction may be while the other is busy
                if time.monotonic() >= self._moved_s + self._idle_s:
                    raise


def circuit_of(run: str, me: tuple[str, str], place: ConnectionPlace, epoch: int) -> str:
    """Return the name of a connection through a relay, which both its ends compute alike.

    me: this peer's name and incarnation.
    epoch: of the attempt that needs the connection.
    """
    other = (place.peer, place.incarnation)
    sender, receiver = (me, other) if place.sends else (other, me)
    words = (run, *sender, *receiver, place.rank, place.stream, epoch)
    return hashlib.sha256(repr(words).encode()).hexdigest()
