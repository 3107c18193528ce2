"""Reaching a peer at one of several addresses: the next one a moment later, the first that answers."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from bloomery.elastic.links.sockets import split_address
from bloomery.elastic.links.trust import Trust

STAGGER_S = 0.25
"""RFC 8305: how long an address may be tried alone."""


def dial(addresses: Sequence[str], trust: Trust, *, deadline_s: float) -> socket.socket:
    """A connected socket, blocking. OSError: no address answered in time; Refused: none may be dialled."""
    until = time.monotonic() + deadline_s
    waiting = iter(_resolved(addresses, trust))
    failures: list[str] = []
    with selectors.DefaultSelector() as selector:
        try:
            more = True
            while more or selector.get_map():
                if time.monotonic() > until:
                    failures.append("no answer in time")
                    break
                more = more and _start_next(waiting, selector, failures)
                alone_s = STAGGER_S if more else until - time.monotonic()
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
                    key.fileobj.close()  # type: ignore[union-attr]  # sockets alone are registered
    raise ConnectionError(", ".join(failures) or "it has no address")


def _resolved(addresses: Sequence[str], trust: Trust) -> Iterator[tuple[str, int, tuple[object, ...]]]:
    for address in addresses:
        host, port = split_address(address)
        for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            trust.check_address(str(place[0]))
            yield address, family, place


def _start_next(
    waiting: Iterator[tuple[str, int, tuple[object, ...]]],
    selector: selectors.BaseSelector,
    failures: list[str],
) -> bool:
    """Begin with the next address; whether there may be more."""
    try:
        address, family, place = next(waiting)
    except StopIteration:
        return False
    except OSError as error:
        failures.append(str(error))
        return True
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
