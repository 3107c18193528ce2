"""HTTP(S) server from which joining peers download a checkpoint's files by ranges, rate-limited.

The server answers only GET and HEAD, serves only files that a manifest names, and only to members of the
run: they authenticate by mutual TLS where the run has certificates, and otherwise by the run's token, on
loopback. The handshake, each request and each piece that is sent have a deadline.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Collection, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from pathlib import Path
from typing import cast

from bloomery.errors import PeerError
from bloomery.state_transfer.served_states import (
    BoundedReader,
    OpenFile,
    ServedStates,
    parse_path,
    parse_range,
)
from bloomery.transport.listener import MemberQuota, StrangerPlace, StrangerQuota, accept_all, end
from bloomery.transport.sockets import RateLimiter, addresses_of, open_listener, origin_of
from bloomery.transport.trust import PeerRefused, RefusalLog, Trust, is_loopback, names_of

log = logging.getLogger(__name__)

CONNECTIONS = 64
"""The most connections of a state server in all."""
OF_MEMBER = 16
"""The most of one member; a joining peer opens three to each source, and four for an average."""
PROOF_S = 10.0
"""The seconds within which a stranger must authenticate itself, by TLS or by the run's token."""
REQUEST_S = 10.0
"""The seconds from the first byte of a request within which all of it must have come."""
IDLE_S = 60.0
"""The seconds that a connection may wait between requests."""
SEND_S = 30.0
"""The seconds within which a piece of a mebibyte must have been sent: slower clients are disconnected."""


class StateServer:
    """Serves states until it is closed. A context manager.

    listen: the host:port to listen on; "" for a peer that only dials and gives its connections to `serve`.
    advertise: the host:port that others dial; empty: the one listened on.
    limit_bytes_s: the bytes a second sent to all clients together; 0: no limit.
    rate_limiter: shared with other servers of this peer, in place of `limit_bytes_s`; None: one of its own.
    connections: how many members are served at once. Strangers have a quota of their own until they have
        authenticated themselves.
    """

    def __init__(
        self,
        listen: str,
        trust: Trust,
        states: ServedStates,
        *,
        advertise: Sequence[str] = (),
        limit_bytes_s: float = 0.0,
        rate_limiter: RateLimiter | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        self._trust, self.states, self._advertise = trust, states, tuple(advertise)
        self._rate_limiter = rate_limiter or RateLimiter(limit_bytes_s)
        self._room = MemberQuota(OF_MEMBER, total=connections)
        self._strangers, self._refusals = StrangerQuota(), RefusalLog()
        self._ended = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listeners = [open_listener(listen)] if listen else []
        for listener in self._listeners:
            host = str(listener.getsockname()[0])
            if not trust.has_certificates and not is_loopback(host):
                listener.close()
                raise PeerError(
                    f"Without certificates no state is served at {host}: anybody could take it.",
                    remedy="Listen on 127.0.0.1, or set elastic.certificates.",
                )
            threading.Thread(target=self._accept, args=(listener,), name="serving", daemon=True).start()

    @property
    def address(self) -> str:
        """The host:port that the server listens on; "" if it only gets connections by `serve`."""
        return next(iter(addresses_of(self._listeners)), "")

    @property
    def scheme(self) -> str:
        """The scheme of the server's URLs."""
        return "https" if self._trust.has_certificates else "http"

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs that others fetch from."""
        return tuple(f"{self.scheme}://{place}" for place in self._advertise or addresses_of(self._listeners))

    def offer(self, directory: Path, *, round: int, digest: str) -> tuple[str, ...]:
        """Serve a checkpoint as the state `digest` from now on; returns its URLs.

        Raises CheckpointError and PeerError.
        """
        self.states.put(digest, directory, round=round)
        return self.urls

    def keep(self, digests: Collection[str]) -> None:
        """Serve no other states than these any more."""
        self.states.keep(digests)

    @property
    def is_serving(self) -> bool:
        """Whether there is a state or an average to be served."""
        return not self.states.is_empty

    def serve(self, connection: socket.socket, address: str) -> None:
        """Serve a connection of this address as if it had been accepted, on a thread of its own.

        Raises OSError or RuntimeError if there is no descriptor or no thread for it; else it owns it.
        """
        stranger = self._strangers.enter(connection, address)
        serving = threading.Thread(
            target=self._serve, args=(connection, stranger), name="served", daemon=True
        )
        try:
            serving.start()
        except RuntimeError:
            stranger.leave()
            raise

    def close(self) -> None:
        """End every connection and stop serving."""
        self._ended.set()
        with self._lock:
            open_now = list(self._open)
        for connection in (*self._listeners, *open_now):
            end(connection)  # which also wakes the thread that waits for it
        for listener in self._listeners:
            listener.close()
        self.states.clear()

    def __enter__(self) -> StateServer:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        accept_all(listener, self.serve, ended=self._ended)

    def _serve(self, connection: socket.socket, stranger: StrangerPlace) -> None:
        until = time.monotonic() + PROOF_S
        client, spoken = _Client(origin_of(connection), stranger, self._room, self._refusals), connection
        try:
            with self._lock:
                self._open.add(connection)
            if self._trust.to_listen is not None:
                connection.settimeout(PROOF_S)
                spoken = self._trust.to_listen.wrap_socket(connection, server_side=True)
                with self._lock:
                    self._open.add(spoken)
            reader = BoundedReader(spoken, first_until=until, idle_s=IDLE_S, request_s=REQUEST_S)
            _Handler(spoken, reader, client, self._trust, self.states, self._rate_limiter)
        except ssl.SSLError as error:
            client.refuse(str(error.reason or error))
        except (OSError, ValueError) as error:
            if client.is_served:
                log.info("the connection of %s ended: %s", client.origin, error)
            else:
                client.refuse(str(error))
        finally:
            with self._lock:
                self._open -= {connection, spoken}
            spoken.close()
            client.leave()


class _Client:
    """The client of one connection: a stranger until it is authenticated, then a member that is served.

    stranger: the connection's place in the quota of strangers.
    room: counts the members that may be served at once.
    """

    def __init__(self, origin: str, stranger: StrangerPlace, room: MemberQuota, refusals: RefusalLog) -> None:
        self.origin = origin
        self._stranger, self._room, self._refusals = stranger, room, refusals
        self.is_served, self._member = False, ""

    def admit(self, member: str) -> bool:
        """Count the authenticated client as a member; returns False when there is no room for another."""
        if not self.is_served:
            self.is_served, self._member = self._room.enter(member), member
            self._stranger.leave()
        return self.is_served

    def refuse(self, why: str) -> None:
        """Log a refusal; of many refusals only some are logged."""
        self._refusals.write(self.origin, why)

    def leave(self) -> None:
        """Free the client's place, for its connection has ended."""
        self._stranger.leave()
        if self.is_served:
            self._room.leave(self._member)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "bloomery", ""

    def __init__(
        self,
        connection: socket.socket,
        reader: BoundedReader,
        client: _Client,
        trust: Trust,
        states: ServedStates,
        rate_limiter: RateLimiter,
    ) -> None:
        self.connection = self.request = connection
        self.client_address = (client.origin, 0)
        self._client = client
        self._trust, self._states, self._rate_limiter = trust, states, rate_limiter
        self.rfile = cast("BufferedIOBase", reader)  # as much of it as http.server uses
        self.wfile = cast("BufferedIOBase", _Writer(connection))
        self.close_connection = False
        while not self.close_connection:
            self.handle_one_request()
            reader.begin()

    def do_GET(self) -> None:
        """Answer with the content."""
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self._answer(with_content=False)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: answers are not worth a line, and `_refuse` logs refusals."""

    def _answer(self, *, with_content: bool) -> None:
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request with content")
            return
        if not self._belongs():
            self._refuse(HTTPStatus.UNAUTHORIZED, "it does not show the run's token, or was revoked")
            return
        if not self._client.admit(names_of(self.connection)):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "as many are served as there is room for")
            return
        wanted = parse_path(self.path)
        if wanted is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"no path of a state: {self.path[:100]!r}")
        elif not wanted.file:
            about = self._states.about(wanted.digest)
            if about is None:
                self._refuse(HTTPStatus.NOT_FOUND, "that state is not here", loud=False)
            else:
                self._send(json.dumps(about).encode(), with_content=with_content)
        else:
            with self._states.reading(wanted.digest, wanted.file) as file:
                if file is None and self._states.is_to_come(wanted.digest, wanted.file):
                    self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "that file is not written yet", loud=False)
                else:
                    self._send_file(file, with_content=with_content)

    def _belongs(self) -> bool:
        if self._trust.has_certificates:  # without one the handshake would have failed
            try:
                self._trust.check_certificate(self.connection)
            except PeerRefused:
                return False
            return True
        authorization = self.headers.get("Authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(authorization, b"Bearer " + self._trust.token.hex().encode())

    def _send_file(self, file: OpenFile | None, *, with_content: bool) -> None:
        if file is None:
            self._refuse(HTTPStatus.NOT_FOUND, "that file is not here", loud=False)
            return
        part = parse_range(self.headers.get("Range"), file.bytes)
        if part is None:
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "a range that is not there")
            return
        is_part = "Range" in self.headers
        self.send_response(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(part)))
        if is_part:
            self.send_header("Content-Range", f"bytes {part.start}-{part.stop - 1}/{file.bytes}")
        self.end_headers()
        step = self._rate_limiter.piece_bytes
        for begin in range(part.start, part.stop, step) if with_content else ():
            self._send_piece(file, begin, min(step, part.stop - begin))

    def _send_piece(self, file: OpenFile, begin: int, count: int) -> None:
        data = os.pread(file.descriptor, count, begin)
        if len(data) < count:
            raise OSError("a served file has become shorter")
        self._rate_limiter.take(count)
        self.wfile.write(data)

    def _send(self, content: bytes, *, with_content: bool) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, why: str, *, loud: bool = True) -> None:
        if loud:
            self._client.refuse(why)
            self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


class _Writer:
    """The file that http.server writes to: sends without buffering, each piece within SEND_S."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, data: bytes) -> int:
        self._connection.settimeout(SEND_S)
        self._connection.sendall(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing, for `write` has sent everything."""
