"""Accepts connections from peers, authenticates them within quotas, and passes them to their handlers.

Each connection gets a deadline for its handshake. How many may be unauthenticated is limited, in all and per
address, so that strangers cannot use up the descriptors of the process.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from bloomery.protocol.hello import ConnectionHello
from bloomery.transport.handshake import (
    DEADLINE_S,
    AuthenticatedConnection,
    OwnIdentity,
    handshake_as_listener,
)
from bloomery.transport.sockets import TcpTimeouts, origin_of, prepare
from bloomery.transport.trust import PeerRefused, RefusalLog, Trust

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""The seconds of pause after a connection could not be accepted."""
_LOG_PERIOD_S = 60.0
"""A lasting shortage is logged at most once in this time."""
_MOST = 256
_DESCRIPTORS_EACH = 2
_OF_ADDRESS = 4
"""One address may hold one fourth of all places."""
_OF_DESCRIPTORS = 8
"""Unauthenticated connections of one listener may hold one eighth of the process's descriptors."""
_DESCRIPTORS_AT_MOST = 1 << 20


class Listener:
    """Accepts on `sockets`, which it owns, and gives each connection to the handler of its purpose.

    handlers: functions by purpose. Each is called on a thread of its own and owns the connection.
    patience: when the kernel gives up a silent connection.
    deadline_s: for each handshake, seconds.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        identity: OwnIdentity,
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
                authenticated = handshake_as_listener(
                    connection, self._identity, self._trust, admit=self._admit, deadline_s=self._deadline_s
                )
        except (PeerRefused, OSError, ValueError, RuntimeError) as error:  # ssl.SSLError is an OSError
            connection.close()
            self.refusals.write(origin, str(error) or type(error).__name__)
            return
        self._handlers[authenticated.hello.purpose](authenticated)

    def _admit(self, hello: ConnectionHello) -> str:
        return "" if hello.purpose in self._handlers else f"this peer does not serve '{hello.purpose}'"


def raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors for this process and its children; return the new limit.

    It is not raised above 2^20, because some programs loop over every descriptor that they might have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS_AT_MOST if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_AT_MOST)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):  # if the system allows less than it says, the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def accept_all(
    listener: socket.socket, take: Callable[[socket.socket, str], None], *, ended: threading.Event
) -> None:
    """Give each connection and its address to `take`, until `ended` is set and the listener is shut down.

    take: called with a connection, which it owns, and its address. It may raise OSError or RuntimeError if
        there is no descriptor or no thread for it; then the connection is closed.
    After such a shortage, or if accepting itself fails, the listener pauses and goes on.
    """
    logged_s = float("-inf")
    while not ended.is_set():
        connection: socket.socket | None = None
        try:
            connection, address = listener.accept()
            take(connection, str(address[0]))
        except ConnectionError:
            continue  # the other end closed it while it waited to be accepted
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            if connection is not None:
                connection.close()
            if ended.is_set():
                return
            if time.monotonic() > logged_s + _LOG_PERIOD_S:
                logged_s = time.monotonic()
                log.warning("no connection can be accepted (%s): trying again every %.1f s", error, PAUSE_S)
            ended.wait(PAUSE_S)


class StrangerQuota:
    """Limits the connections of one listener that are not authenticated yet.

    A new connection always gets a place. If its address has too many, the oldest one of that address is
    ended; if there are too many in all, the oldest one of the address that has most. So an attacker that
    opens thousands of connections ends its own ones, and members at other addresses are not hindered.

    total, per_address: how many places there are; 0: computed from the process's limit of descriptors.
    """

    def __init__(self, *, total: int = 0, per_address: int = 0) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        places = _MOST if soft == resource.RLIM_INFINITY else soft // (_OF_DESCRIPTORS * _DESCRIPTORS_EACH)
        self._total = total or max(_OF_ADDRESS, min(_MOST, places))
        self._per_address = per_address or max(1, self._total // _OF_ADDRESS)
        self._lock = threading.Lock()
        self._handles: dict[str, dict[socket.socket, None]] = {}
        """By address, the oldest first. They are duplicates, because TLS takes over the connection itself."""

    def enter(self, connection: socket.socket, address: str) -> StrangerPlace:
        """Give a connection a place, which it keeps until it leaves. OSError: no descriptor is left."""
        network, handle = _network(address), connection.dup()
        with self._lock:
            if len(self._handles.get(network, ())) >= self._per_address:
                self._end_oldest(network)
            elif self._count >= self._total:
                self._end_oldest(max(self._handles, key=lambda address: len(self._handles[address])))
            self._handles.setdefault(network, {})[handle] = None
        return StrangerPlace(self, network, handle)

    def leave(self, network: str, handle: socket.socket) -> None:
        """Free the place of a connection that is authenticated or closed."""
        with self._lock:
            handles = self._handles.get(network, {})
            handles.pop(handle, None)
            if not handles:
                self._handles.pop(network, None)
            handle.close()

    def end_all(self) -> None:
        """End every connection that is not authenticated."""
        with self._lock:
            for handles in self._handles.values():
                for handle in handles:
                    end(handle)

    @property
    def _count(self) -> int:
        return sum(map(len, self._handles.values()))

    def _end_oldest(self, network: str) -> None:
        """Shut down the oldest connection of an address; its thread then closes it and leaves."""
        handles = self._handles[network]
        oldest = next(iter(handles))
        end(oldest)
        del handles[oldest]
        if not handles:
            del self._handles[network]


class StrangerPlace:
    """The place of one connection. A context manager that frees the place at its end."""

    def __init__(self, strangers: StrangerQuota, network: str, handle: socket.socket) -> None:
        self._strangers, self._network, self._handle = strangers, network, handle

    def leave(self) -> None:
        """Free the place. It may be called again."""
        self._strangers.leave(self._network, self._handle)

    def __enter__(self) -> StrangerPlace:
        return self

    def __exit__(self, *ended: object) -> None:
        self.leave()


class MemberQuota:
    """Counts what each member of the run holds, so that one of them cannot take what is there for all.

    at_most: how many one member may hold at a time.
    total: how many all may hold together; None: there is no limit.
    """

    def __init__(self, at_most: int, *, total: int | None = None) -> None:
        self._at_most, self._total = at_most, total
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def enter(self, peer: str) -> bool:
        """Count one more for this member; returns False, and counts nothing, if there is no room for it.

        peer: "" for one whose name nobody has proved, as without certificates: only the total is its limit.
        """
        with self._lock:
            is_full = self._total is not None and self._held.total() >= self._total
            if is_full or (peer and self._held[peer] >= self._at_most):
                return False
            self._held[peer] += 1
            return True

    def leave(self, peer: str) -> None:
        """Count one less for this member."""
        with self._lock:
            self._held[peer] -= 1
            if self._held[peer] <= 0:
                del self._held[peer]


def end(connection: socket.socket) -> None:
    """Shut down a connection in both directions, which also wakes a thread that waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _network(address: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)
