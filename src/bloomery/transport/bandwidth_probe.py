"""Measures bandwidth and latency to another peer, over as many streams as the ring all_reduce uses."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bloomery.transport.handshake import AuthenticatedConnection
from bloomery.transport.trust import PeerRefused

_REQUEST = struct.Struct(">cI")
_PING, _LOAD = b"p", b"l"
MAX_LOAD = 1 << 28
"""The most bytes of one load that the answering peer accepts."""
_IDLE_S = 30.0
_PIECE = bytes(1 << 16)


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """Bandwidth and round-trip time from this peer to another."""

    mbit_s: float
    rtt_ms: float


@dataclass(frozen=True, kw_only=True)
class ProbeSizes:
    """How much a probe sends.

    streams: connections that send at the same time.
    pings: round trips, of which the shortest counts.
    first, most: bytes of the first and of the largest load of a stream; each is four times the one before.
    enough_s: the seconds of a load after which no larger one follows.
    """

    streams: int = 4
    pings: int = 5
    first: int = 1 << 16
    most: int = 1 << 25
    enough_s: float = 0.2


def measure(connections: Sequence[socket.socket], sizes: ProbeSizes, *, deadline_s: float) -> LinkMeasurement:
    """Measure connections whose other ends run `answer_probe`. OSError: it took longer than `deadline_s`."""
    until = time.monotonic() + deadline_s
    for connection in connections:
        connection.settimeout(deadline_s)
    rtt_s = min(_exchange(connections[0], _PING, 0, until) for _ in range(sizes.pings))
    size = sizes.first
    while True:
        took_s = _load_all(connections, size, until)
        if took_s - rtt_s / 2 >= sizes.enough_s or size >= sizes.most:
            break
        size = min(size * 4, sizes.most)
    rate = 8e-6 * size * len(connections) / max(took_s - rtt_s / 2, 1e-6)
    return LinkMeasurement(mbit_s=rate, rtt_ms=rtt_s * 1e3)


def answer_probe(authenticated: AuthenticatedConnection) -> None:
    """Serve the other end of `measure` until it closes the connection, which this function owns."""
    with authenticated.connection as connection:
        try:
            connection.settimeout(_IDLE_S)
            while request := _receive(connection, _REQUEST.size):
                word, size = _REQUEST.unpack(request)
                if size > MAX_LOAD or word not in (_PING, _LOAD):
                    return
                received = 0
                while received < size:
                    piece = len(connection.recv(min(1 << 18, size - received)))
                    if not piece:
                        return
                    received += piece
                connection.sendall(word)
        except (OSError, PeerRefused):
            return  # the measuring end reports the error


def _load_all(connections: Sequence[socket.socket], size: int, until: float) -> float:
    """Send `size` bytes over each connection at the same time; return the seconds until all have answered."""
    failures: list[OSError] = []

    def load(connection: socket.socket) -> None:
        try:
            _exchange(connection, _LOAD, size, until)
        except OSError as error:
            failures.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=load, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.monotonic() - began


def _exchange(connection: socket.socket, word: bytes, size: int, until: float) -> float:
    began = time.monotonic()
    load = (_PIECE[: size - start] for start in range(0, size, len(_PIECE)))
    for piece in itertools.chain([_REQUEST.pack(word, size)], load):
        connection.settimeout(max(0.001, until - time.monotonic()))  # each call has a time-out of its own
        connection.sendall(piece)
    connection.settimeout(max(0.001, until - time.monotonic()))
    if connection.recv(1) != word:
        raise ConnectionError("the probed peer closed the connection")
    return time.monotonic() - began


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or b"" if the other end closed the connection before."""
    content = b""
    while len(content) < count:
        piece = connection.recv(count - len(content))
        if not piece:
            return b""
        content += piece
    return content
