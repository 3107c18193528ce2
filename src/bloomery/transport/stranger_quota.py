"""Accepts connections despite errors, and limits how many may be unauthenticated, in all and per address."""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

PAUSE_S = 0.5
_SAID_S = 60.0
"""A shortage that lasts is logged no more often than this."""
_MOST = 256
_DESCRIPTORS_EACH = 2
_OF_ADDRESS = 4
"""One address may have this fraction of all places: one fourth."""
_OF_DESCRIPTORS = 8
"""Strangers of one listener may hold this fraction of the process's descriptors: one eighth."""
_DESCRIPTORS_AT_MOST = 1 << 20


def raise_descriptor_limit() -> int:
    """Let this process and its children open as many descriptors as the system allows; returns how many.

    Not above 2^20: some programs loop over every descriptor that they might have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_AT_MOST if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_AT_MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the system allows less than it says: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def accept_all(
    listener: socket.socket, take: Callable[[socket.socket, str], None], *, ended: threading.Event
) -> None:
    """Give each connection and its address to `take`, until `ended` is set and the listener is shut down.

    take: owns the connection, unless it raises OSError or RuntimeError (there is no descriptor or no thread
    for it). Then, and where nothing can be accepted, this pauses and goes on, so that the shortage ends no
    listener.
    """
    said_s = float("-inf")
    while not ended.is_set():
        connection: socket.socket | None = None
        try:
            connection, address = listener.accept()
            take(connection, str(address[0]))
        except ConnectionError:
            continue  # it went away while it waited
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            if connection is not None:
                connection.close()
            if ended.is_set():
                return
            if time.monotonic() > said_s + _SAID_S:
                said_s = time.monotonic()
                log.warning("no connection can be taken (%s): trying again every %.1f s", error, PAUSE_S)
            ended.wait(PAUSE_S)


class Strangers:
    """The connections of one listener that are not authenticated yet.

    A new one always gets a place. Where it is one too many, the oldest of its address is ended, or of the
    address that has most: so whoever opens connections by the thousand ends its own, and a member at another
    address completes its handshake. total, per_address: places; by default from the limit of descriptors.
    """

    def __init__(self, *, total: int = 0, per_address: int = 0) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        places = _MOST if soft == resource.RLIM_INFINITY else soft // (_OF_DESCRIPTORS * _DESCRIPTORS_EACH)
        self._total = total or max(_OF_ADDRESS, min(_MOST, places))
        self._per_address = per_address or max(1, self._total // _OF_ADDRESS)
        self._lock = threading.Lock()
        self._handles: dict[str, dict[socket.socket, None]] = {}
        """By address, the oldest first. Handles are duplicates, since TLS takes the connection itself."""

    def enter(self, connection: socket.socket, address: str) -> Stranger:
        """Give it a place, which it keeps until it leaves. OSError: there is no descriptor left."""
        network, handle = _network(address), connection.dup()
        with self._lock:
            if len(self._handles.get(network, ())) >= self._per_address:
                self._end_oldest(network)
            elif self._count >= self._total:
                self._end_oldest(max(self._handles, key=lambda each: len(self._handles[each])))
            self._handles.setdefault(network, {})[handle] = None
        return Stranger(self, network, handle)

    def leave(self, network: str, handle: socket.socket) -> None:
        """Its place is free: it is authenticated, or gone."""
        with self._lock:
            here = self._handles.get(network, {})
            here.pop(handle, None)
            if not here:
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
        """End one connection under whoever works with it: that thread closes it and leaves."""
        handles = self._handles[network]
        oldest = next(iter(handles))
        end(oldest)
        del handles[oldest]
        if not handles:
            del self._handles[network]


class Stranger:
    """One connection's place. A context manager: it leaves at the end, at the latest."""

    def __init__(self, strangers: Strangers, network: str, handle: socket.socket) -> None:
        self._strangers, self._network, self._handle = strangers, network, handle

    def leave(self) -> None:
        """It is authenticated, or gone. May be called again."""
        self._strangers.leave(self._network, self._handle)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *ended: object) -> None:
        self.leave()


def end(connection: socket.socket) -> None:
    """End a connection in both directions, also under another thread that waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _network(address: str) -> str:
    """What counts as one address: an IPv4 address, or the 64 bits of IPv6 that one site has."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)
