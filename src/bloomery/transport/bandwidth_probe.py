"""Measures bandwidth and latency to another peer, over as many streams as the ring all_reduce uses."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bloomery.transport.handshake import Greeted
from bloomery.transport.trust import PeerRefused

_ORDER = struct.Struct(">cI")
_PING, _LOAD = b"p", b"l"
MAX_LOAD = 1 << 28
"""Bytes of one load that are taken."""
_IDLE_S = 30.0
_PIECE = bytes(1 << 16)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A way from one peer to another."""

    mbit_s: float
    rtt_ms: float


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is sent: loads of a stream grow until one takes `enough_s`, or is of `most` bytes."""

    streams: int = 4
    pings: int = 5
    first: int = 1 << 16
    most: int = 1 << 25
    enough_s: float = 0.2


def measure(connections: Sequence[socket.socket], sizes: Sizes, *, deadline_s: float) -> Measured:
    """Ask whoever runs `answer_probe` at the other ends. OSError: it took longer than `deadline_s`."""
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
    return Measured(mbit_s=rate, rtt_ms=rtt_s * 1e3)


def answer_probe(greeted: Greeted) -> None:
    """Serve the other side of `measure` until it ends. Takes the connection."""
    with greeted.connection as connection:
        try:
            connection.settimeout(_IDLE_S)
            while order := _receive(connection, _ORDER.size):
                word, size = _ORDER.unpack(order)
                if size > MAX_LOAD or word not in (_PING, _LOAD):
                    return
                taken = 0
                while taken < size:
                    piece = len(connection.recv(min(1 << 18, size - taken)))
                    if not piece:
                        return
                    taken += piece
                connection.sendall(word)
        except (OSError, PeerRefused):
            return  # whoever measures says so


def _load_all(connections: Sequence[socket.socket], size: int, until: float) -> float:
    """Send `size` bytes over each at once; seconds until the last was answered."""
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
    connection.settimeout(max(0.001, until - began))
    connection.sendall(_ORDER.pack(word, size))
    for start in range(0, size, len(_PIECE)):
        connection.sendall(_PIECE[: size - start])
    if connection.recv(1) != word:
        raise ConnectionError("the probed peer ended")
    return time.monotonic() - began


def _receive(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or b"" where the other end ended before them."""
    content = b""
    while len(content) < count:
        piece = connection.recv(count - len(content))
        if not piece:
            return b""
        content += piece
    return content
