"""Runs TLS in a thread between a socket and a socket pair, so that native code reads plain descriptors."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading

log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 18


def tls_proxied(connection: ssl.SSLSocket) -> socket.socket:
    """Return a plain, non-blocking socket whose bytes are sent and received encrypted over `connection`.

    It owns the connection. When either is closed, the other one is closed too.
    """
    ours, theirs = socket.socketpair()
    for end in (ours, theirs, connection):
        end.settimeout(0.0)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PIECE_BYTES)
    threading.Thread(target=_TlsProxy(connection, ours).run, name="tls proxy", daemon=True).start()
    return theirs


class _TlsProxy:
    """Copies both directions on one thread, because two threads must not use one TLS connection."""

    def __init__(self, tls: ssl.SSLSocket, plain: socket.socket) -> None:
        self._tls, self._plain = tls, plain
        self._outward, self._inward = memoryview(b""), memoryview(b"")
        self._tls_wants_write = self._tls_wants_read = False

    def run(self) -> None:
        """Copy until one end is closed or fails."""
        try:
            while True:
                moved = self._move_outward() | self._move_inward()
                if not moved:
                    self._wait()
        except EOFError:
            pass
        except OSError as error:  # ssl.SSLError is an OSError
            log.info("an encrypted connection ended: %s", error)
        finally:
            self._tls.close()
            self._plain.close()

    def _move_outward(self) -> bool:
        moved = False
        if not self._outward:
            try:
                self._outward = memoryview(self._plain.recv(_PIECE_BYTES))
                moved = True
            except BlockingIOError:
                return False
            if not self._outward:
                raise EOFError
        try:
            self._tls_wants_read = False
            self._outward = self._outward[self._tls.send(self._outward) :]
            self._tls_wants_write = bool(self._outward)
            return True
        except ssl.SSLWantWriteError:
            self._tls_wants_write = True
        except ssl.SSLWantReadError:
            self._tls_wants_read = True
        return moved

    def _move_inward(self) -> bool:
        moved = False
        if not self._inward:
            try:
                self._inward = memoryview(self._tls.recv(_PIECE_BYTES))
                moved = True
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            if not self._inward:
                raise EOFError
        try:
            self._inward = self._inward[self._plain.send(self._inward) :]
            return True
        except BlockingIOError:
            return moved

    def _wait(self) -> None:
        """Wait until bytes can be copied. `poll` cannot see what TLS has read already, so ask TLS first."""
        if self._tls.pending() and not self._inward:
            return
        poll = select.poll()
        tls_events = select.POLLIN if not self._inward or self._tls_wants_read else 0
        tls_events |= select.POLLOUT if self._outward and self._tls_wants_write else 0
        plain_events = select.POLLIN if not self._outward else 0
        plain_events |= select.POLLOUT if self._inward else 0
        poll.register(self._tls, tls_events)
        poll.register(self._plain, plain_events)
        poll.poll()
