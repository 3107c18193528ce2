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
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, eq=False)
class _WaitingEnd:
    """An end of a circuit that waits for the other one.

    peer: the member that it belongs to. mark: which member it expects, see `mark_of`.
    since: when it came, by the local monotonic clock, seconds.
    """

    connection: socket.socket
    peer: str
    circuit: str
    mark: tuple[int, int]
    since: float

    def fits(self, other: _WaitingEnd) -> bool:
        """Whether each of two ends of one name belongs to the member that the other one expects."""
        return self.peer != other.peer and all(
            one.mark in (UNMARKED, mark_of(one.circuit, end.peer))
            for one, end in ((self, other), (other, self))
        )


class Relay:
    """Joins two connections of one circuit of a ring if each belongs to the peer that the other expects.

    Every member can compute the name of a circuit, so an end is not joined to whoever names it first.

    wait_s: how long the first connection of a circuit waits for the second, seconds.
    rate_limiter: limits the bytes that are forwarded; None: no limit.
    """

    def __init__(self, *, wait_s: float, rate_limiter: RateLimiter | None = None) -> None:
        self._wait_s, self._rate_limiter = wait_s, rate_limiter
        self._lock, self._refusals = threading.Lock(), RefusalLog()
        self._waiting: dict[str, list[_WaitingEnd]] = {}
        self._open: dict[socket.socket, str] = {}
        """The ends that are joined, each with the member that it belongs to."""

    def join(self, authenticated: AuthenticatedConnection) -> None:
        """Keep a connection whose purpose is `relay` until its other end comes; then copy between both.

        Called on a thread of the connection's own. It returns at once for the first end of a circuit, and
        for the second one when either has ended.
        """
        hello, connection = authenticated.hello, authenticated.connection
        circuit, peer = hello.circuit, hello.peer
        mark = (hello.rank, hello.stream)
        end_here = _WaitingEnd(
            connection=connection, peer=peer, circuit=circuit, mark=mark, since=time.monotonic()
        )
        with self._lock:
            self._close_late()
            held = sum(
                owner == peer for owner in (*self._open.values(), *(each.peer for each in self._all_waiting))
            )
            waiting = sum(map(len, self._waiting.values()))
            if held >= _OF_MEMBER or waiting + len(self._open) // 2 >= _MAX_CIRCUITS:
                self._refusals.write(f"'{peer}'", f"it is not relayed, for {held} of its ends are here")
                connection.close()
                return
            other = self._taken(end_here)
            if other is None:
                self._waiting.setdefault(circuit, []).append(end_here)
                return
            self._open |= {connection: peer, other.connection: other.peer}
        log.info("relaying for '%s'", peer)
        try:
            copy_both_ways(connection, other.connection, rate_limiter=self._rate_limiter)
        finally:
            with self._lock:
                del self._open[connection], self._open[other.connection]

    def close(self) -> None:
        """End all relayed and waiting connections."""
        with self._lock:
            for connection in (*self._open, *(waiting.connection for waiting in self._all_waiting)):
                end(connection)
            self._waiting.clear()

    @property
    def _all_waiting(self) -> Iterator[_WaitingEnd]:
        return (waiting for ends in self._waiting.values() for waiting in ends)

    def _taken(self, here: _WaitingEnd) -> _WaitingEnd | None:
        """Take the newest end that waits for this one, for its member may have left an older one there."""
        ends = self._waiting.get(here.circuit, [])
        found = next((waiting for waiting in reversed(ends) if waiting.fits(here)), None)
        if found is not None:
            self._drop(found)
        return found

    def _drop(self, waiting: _WaitingEnd) -> None:
        ends = self._waiting[waiting.circuit]
        ends.remove(waiting)
        if not ends:
            del self._waiting[waiting.circuit]

    def _close_late(self) -> None:
        now = time.monotonic()
        for waiting in list(self._all_waiting):
            if now > waiting.since + self._wait_s:
                self._drop(waiting)
                waiting.connection.close()


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


UNMARKED = (0, 0)
"""The mark of an end that expects anybody, as versions before marks made it."""


def mark_of(circuit: str, peer: str) -> tuple[int, int]:
    """Return the numbers by which an end of a circuit says which peer it expects at the other end.

    They are 20 bits of a hash, in the fields `rank` and `stream` of the hello, which older versions leave at
    0 and do not read.
    """
    number = int.from_bytes(hashlib.sha256(f"{circuit} {peer}".encode()).digest()[:4], "big") >> 12
    return number >> 8, number & 0xFF
