"""Parses addresses, opens sockets for links between sites, and limits the send rate of all threads together.

`dial` tries the addresses of a peer, each a moment after the one before, and takes the first that answers.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bloomery.errors import PeerError
from bloomery.transport.name_lookup import look_up
from bloomery.transport.trust import PeerRefused, Trust

_CONGESTION_CONTROL = b"bbr"
"""BBR keeps its rate where losses are not due to congestion, as between sites."""


@dataclass(frozen=True, kw_only=True)
class TcpTimeouts:
    """When the kernel gives up a silent connection.

    idle_s: silence before the first keep-alive probe, seconds.
    probe_s: time between probes, seconds.
    probes: the unanswered probes that end the connection.
    unanswered_s: the seconds that sent data may stay unacknowledged.
    """

    idle_s: int = 15
    probe_s: int = 5
    probes: int = 3
    unanswered_s: float = 20.0


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address, for instance ('::1', 29600) of '[::1]:29600'. Raises PeerError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise PeerError(
            f"'{address}' is not an address.", remedy="Write host:port, and [::1]:29600 for IPv6."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return the address of host and port, for instance '[::1]:29600' of ('::1', 29600)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_listener(address: str, *, backlog: int = 512) -> socket.socket:
    """Return a listening socket; one at [::] accepts IPv4 too. PeerError: the address cannot be used."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port),
            family=family,
            backlog=backlog,
            reuse_port=False,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise PeerError(
            f"Nothing can listen on {address}: {error.strerror}.",
            remedy="Choose another elastic.listen (or BLOOMERY_LISTEN); port 0 takes a free one.",
        ) from error


def addresses_of(listeners: Sequence[socket.socket]) -> tuple[str, ...]:
    """Return the addresses at which these sockets can be dialled; not for sockets that listen everywhere."""
    return tuple(join_address(*listener.getsockname()[:2]) for listener in listeners)


def prepare(connection: socket.socket, patience: TcpTimeouts) -> None:
    """Set the options of a long-lived connection: no delay, keep-alive through NATs, and time-outs."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, patience.idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, patience.probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, patience.probes)
    unanswered_ms = int(patience.unanswered_s * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered_ms)
    with suppress(OSError):  # if the kernel lacks it or forbids it, the system's default stays
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_CONTROL)


def origin_of(connection: socket.socket) -> str:
    """Return the address of the other end, for logs."""
    try:
        address = connection.getpeername()
    except OSError:
        return "an end that has closed"
    return join_address(*address[:2]) if address else "an encrypted connection"  # which has a proxy


STAGGER_S = 0.25
"""The seconds that an address is tried before the next one is tried as well (RFC 8305)."""


def dial(addresses: Sequence[str], trust: Trust, *, deadline_s: float) -> socket.socket:
    """Return a connected, blocking socket.

    OSError: no address that `trust` allows answered in time.
    """
    until = time.monotonic() + deadline_s
    failures: list[str] = []
    untried = iter(_resolved(addresses, trust, failures, until=until))
    with selectors.DefaultSelector() as selector:
        try:
            has_more = True
            while has_more or selector.get_map():
                if time.monotonic() > until:
                    failures.append("no answer in time")
                    break
                has_more = has_more and _start_next(untried, selector, failures)
                alone_s = STAGGER_S if has_more else until - time.monotonic()
                if not selector.get_map():
                    continue
                for key, _ in selector.select(max(0.0, min(alone_s, until - time.monotonic()))):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    selector.unregister(connection)
                    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not error:
                        connection.settimeout(None)
                        return connection
                    failures.append(f"{key.data}: {os.strerror(error)}")
                    connection.close()
        finally:
            for key in list(selector.get_map().values()):
                with suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
    raise ConnectionError(", ".join(failures) or "the peer has no address")


def _resolved(
    addresses: Sequence[str], trust: Trust, failures: list[str], *, until: float
) -> Iterator[tuple[str, int, tuple[object, ...]]]:
    """Yield what may be dialled, and note why the rest cannot be.

    until: when all must have been looked up, by the monotonic clock. Each address gets an equal share of what
        is left.
    """
    for number, address in enumerate(addresses):
        try:
            host, port = split_address(address)
            share_s = (until - time.monotonic()) / (len(addresses) - number)
            for family, place in look_up(host, port, deadline_s=share_s):
                trust.check_dialled(str(place[0]))
                yield address, family, place
        except PeerError as error:
            failures.append(error.message)
        except (OSError, PeerRefused, UnicodeError) as error:  # UnicodeError: it is no name of a machine
            failures.append(f"{address}: {error}")


def _start_next(
    untried: Iterator[tuple[str, int, tuple[object, ...]]],
    selector: selectors.BaseSelector,
    failures: list[str],
) -> bool:
    """Begin to connect to the next address; return whether there may be more."""
    try:
        address, family, place = next(untried)
    except StopIteration:
        return False
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(0.0)
    try:
        connection.connect(place)
    except BlockingIOError:
        pass
    except OSError as error:
        failures.append(f"{address}: {error.strerror}")
        connection.close()
        return True
    selector.register(connection, selectors.EVENT_WRITE, address)
    return True


_PIECE_BYTES, _LEAST_PIECE_BYTES = 1 << 20, 4096
_TURNS, _ROUND_S = 64, 4.0
"""A receiver takes a connection for dead that is silent for some seconds, as those whose turn is far are."""
_AHEAD_S = 0.1
"""The seconds whose share of the limit may be sent at once after a pause."""


class RateLimiter:
    """Limits the bytes sent in a second by all threads together. Thread-safe; callers are served in order.

    bytes_s: the limit in bytes a second; 0: no limit.
    clock, sleep: replaced by tests.
    """

    def __init__(
        self,
        bytes_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s, self._clock, self._sleep = bytes_s, clock, sleep
        self._lock = threading.Lock()
        self._paid_until = clock() - _AHEAD_S

    @property
    def piece_bytes(self) -> int:
        """The bytes to send at a time, so few that _TURNS senders have all had their turn after _ROUND_S."""
        if not self._bytes_s:
            return _PIECE_BYTES
        return int(min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, self._bytes_s * _ROUND_S / _TURNS)))

    def take(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        if not self._bytes_s:
            return
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - _AHEAD_S) + count / self._bytes_s
            wait_s = self._paid_until - now
        if wait_s > 0:
            self._sleep(wait_s)
