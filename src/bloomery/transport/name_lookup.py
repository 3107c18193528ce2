"""Looks up names of machines with a deadline, since `getaddrinfo` takes as long as the resolver does.

A lookup runs on a thread of its own. Whoever asks for the same name meanwhile waits for the same lookup, so a
resolver that hangs holds one thread a name, and one that is slow has answered by one of the next tries.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from functools import cache

from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, NameResolutionError

_AT_MOST = 64
"""The most names that are looked up at the same time."""
_DEADLINE_S = 30.0
"""For a connection without a time-out, seconds."""

FoundAddress = tuple[int, tuple[object, ...]]
"""The family of an address, and the address as `socket.connect` takes it."""


def look_up(host: str, port: int, *, deadline_s: float) -> list[FoundAddress]:
    """Return the addresses of a machine; at once for a numeric one.

    Raises socket.gaierror, which names the machine if its lookup has not ended after `deadline_s`, and
    UnicodeError for what is no name of a machine.
    """
    if _is_numeric(host):
        return _asked(host, port)
    return _lookups().wait_for(host, port, deadline_s=deadline_s)


def connect_by_name(connection: HTTPConnection, connect: Callable[[], socket.socket]) -> socket.socket:
    """Return what `connect`, the connection's own method, returns for the first address that answers.

    Its time-out also limits the lookup of its name. Raises what `connect` raises.
    """
    name, timeout_s = connection._dns_host, connection.timeout
    if _is_numeric(name):
        return connect()
    deadline_s = _DEADLINE_S if timeout_s is None else float(timeout_s)
    try:
        found = look_up(name, connection.port, deadline_s=deadline_s)
    except (socket.gaierror, UnicodeError) as error:
        reason = error if isinstance(error, socket.gaierror) else socket.gaierror(str(error))
        raise NameResolutionError(connection.host, connection, reason) from reason
    failure: HTTPError | None = None
    try:
        for _, address in found:
            connection._dns_host = str(address[0])
            try:
                return connect()
            except HTTPError as error:
                failure = error
    finally:
        connection._dns_host = name  # of which the certificate has to be
    raise failure or NameResolutionError(name, connection, socket.gaierror(f"{name} has no address"))


class _Lookup:
    """A lookup under way, or its result."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.found: list[FoundAddress] = []
        self.error: OSError | UnicodeError | None = None


class _Lookups:
    """The lookups under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], _Lookup] = {}

    def wait_for(self, host: str, port: int, *, deadline_s: float) -> list[FoundAddress]:
        lookup = self._begin(host, port)
        if not lookup.is_over.wait(max(0.0, deadline_s)):
            why = f"the name '{host}' was not looked up within {deadline_s:.1f} s"
            raise socket.gaierror(socket.EAI_AGAIN, why)
        if isinstance(lookup.error, UnicodeError):
            raise UnicodeError(str(lookup.error)) from lookup.error
        if lookup.error is not None:
            raise socket.gaierror(*lookup.error.args) from lookup.error
        return lookup.found

    def _begin(self, host: str, port: int) -> _Lookup:
        with self._lock:
            lookup = self._under_way.get((host, port))
            if lookup is not None:
                return lookup
            if len(self._under_way) >= _AT_MOST:
                why = f"{_AT_MOST} names are being looked up already, so '{host}' is not"
                raise socket.gaierror(socket.EAI_AGAIN, why)
            lookup = _Lookup()
            thread = threading.Thread(target=self._run, args=(host, port, lookup), name="lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise socket.gaierror(socket.EAI_AGAIN, f"no thread is left to look up '{host}'") from error
            self._under_way[host, port] = lookup
            return lookup

    def _run(self, host: str, port: int, lookup: _Lookup) -> None:
        try:
            lookup.found = _asked(host, port)
        except (OSError, UnicodeError) as error:
            lookup.error = error
        finally:
            with self._lock:
                del self._under_way[host, port]
            lookup.is_over.set()


@cache
def _lookups() -> _Lookups:
    return _Lookups()


def _asked(host: str, port: int) -> list[FoundAddress]:
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, place) for family, _, _, _, place in answers]


def _is_numeric(host: str) -> bool:
    """Whether this is an address and no name, so that nobody has to be asked."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
