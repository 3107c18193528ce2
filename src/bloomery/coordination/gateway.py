"""Sends requests to etcd's JSON gateway: several endpoints, one token, a deadline for each call.

The gateway speaks HTTP, so TLS and certificates are those of Python's `ssl`. Which endpoint answered last is
asked first; one that does not is passed over within `CONNECT_S`.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)

from bloomery.errors import CoordinatorAway, CoordinatorError

log = logging.getLogger(__name__)

Json: TypeAlias = Any  # JSON, of which each caller checks what it uses

CONNECT_S = 0.75
"""For a connection to one endpoint, the first time round; doubled with each round."""
ANSWER_S = 0.8
"""For the answer, where there are other endpoints to ask; doubled likewise."""
_DENIED_AGAIN_S = 10.0
"""Two refusals of a stream so near each other are not for an old token."""
ANSWER_BYTES_AT_MOST = 64 << 20
_PAUSE_S = 0.05
_READ_BYTES = 1 << 16

_UNAUTHENTICATED, _DENIED, _UNAVAILABLE, _DEADLINE, _CANCELLED, _PRECONDITION = 16, 7, 14, 4, 1, 9
_NOT_TAKEN = ("no leader", "too many requests")
"""What etcd says where a request went nowhere, so that it may be sent again whatever it asked."""
_NO_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old", "invalid auth")
_SOCKET_OPTIONS = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who asks. context: trusts the coordinator's certificate, and carries this peer's. user: "" for none."""

    context: ssl.SSLContext | None = None
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Access(user={self.user!r})"


class OutcomeUnknown(Exception):
    """A request was sent and no answer came: it may have been carried out."""


class EtcdRefused(CoordinatorError):
    """etcd understood and said no. code: of gRPC."""

    def __init__(self, message: str, *, code: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class Gateway:
    """The endpoints of one etcd. May be used by several threads."""

    def __init__(self, endpoints: Sequence[str], access: Access | None = None) -> None:
        access = access or Access()
        if not endpoints:
            raise CoordinatorError(
                "no coordinator is named",
                remedy="Set elastic.coordinator, or BLOOMERY_COORDINATOR; `bloomery coordinate` starts one.",
            )
        self.endpoints = tuple(endpoints)
        self._pools = [_pool(endpoint, access.context) for endpoint in endpoints]
        self._access = access
        self._lock = threading.Lock()
        self._token: str | None = None
        self._denied_s = float("-inf")
        self._preferred = 0

    def call(
        self, path: str, body: Mapping[str, Json], *, deadline_s: float, repeatable: bool = True
    ) -> Json:
        """Return the answer. Raises Refused, CoordinatorAway after `deadline_s`, or OutcomeUnknown.

        repeatable: whether asking twice does no harm; otherwise a request whose answer was lost is
        OutcomeUnknown.
        """
        until = time.monotonic() + deadline_s
        connect_s, last = CONNECT_S, "nobody answered"
        while True:
            for number in self._order():
                left = until - time.monotonic()
                if left <= 0:
                    raise self._away(last, deadline_s)
                try:
                    answer = self._ask(number, path, body, connect_s=min(connect_s, left), until=until)
                except _NotSent as error:
                    last = f"{self.endpoints[number]}: {error}"
                except _Lost as error:
                    last = f"{self.endpoints[number]}: {error}"
                    if not repeatable:
                        raise OutcomeUnknown(last) from error
                else:
                    self._prefer(number)
                    return answer
                self._prefer(number + 1)
            connect_s *= 2
            time.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))

    def stream(
        self, path: str, body: Mapping[str, Json], *, deadline_s: float, idle_s: float
    ) -> ResponseStream:
        """Open a stream of answers, one a line. idle_s: after which silence ends it. Raises as `call`."""
        until = time.monotonic() + deadline_s
        last = "nobody answered"
        while True:
            for number in self._order():
                left = until - time.monotonic()
                if left <= 0:
                    raise self._away(last, deadline_s)
                timeout = urllib3.Timeout(connect=min(CONNECT_S * 2, left), read=max(idle_s, 0.1))
                try:
                    response = self._send(number, path, body, timeout=timeout, until=until)
                    if response.status == 200:
                        self._prefer(number)
                        return ResponseStream(response)
                    self._refuse(response.status, _content(response, until=until))
                except (_NotSent, _Lost) as error:
                    last = f"{self.endpoints[number]}: {error}"
                self._prefer(number + 1)
            time.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))

    def stream_refused(self, reason: str) -> None:
        """A stream was opened and ended for this reason. Raises Refused where opening another is no use.

        etcd 3.5 says that permission is denied of a token from before its restart, too. So who is refused
        asks for another token, and is refused for good where that one does no better.
        """
        is_denied = "permission" in reason.lower()
        if not is_denied and not any(word in reason for word in _NO_TOKEN):
            return
        now, is_again = time.monotonic(), False
        with self._lock:
            self._token = None
            if is_denied:
                is_again, self._denied_s = now < self._denied_s + _DENIED_AGAIN_S, now
        if is_again:
            raise self._denied(reason, _DENIED)

    def close(self) -> None:
        """Let the connections go."""
        for pool in self._pools:
            pool.close()

    def _order(self) -> list[int]:
        first = self._preferred
        return [(first + step) % len(self._pools) for step in range(len(self._pools))]

    def _prefer(self, number: int) -> None:
        self._preferred = number % len(self._pools)

    def _ask(
        self, number: int, path: str, body: Mapping[str, Json], *, connect_s: float, until: float
    ) -> Json:
        read_s = max(0.05, until - time.monotonic())
        if len(self._pools) > 1:  # one that hangs leaves time for the others
            read_s = min(read_s, max(0.05, connect_s / CONNECT_S * ANSWER_S))
        timeout = urllib3.Timeout(connect=connect_s, read=read_s)
        response = self._send(number, path, body, timeout=timeout, until=until)
        content = _content(response, until=until)
        if response.status != 200:
            self._refuse(response.status, content)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _Lost(f"its answer is no JSON: {error}") from error

    def _send(
        self, number: int, path: str, body: Mapping[str, Json], *, timeout: urllib3.Timeout, until: float
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        if self._access.user and path != _AUTHENTICATE:
            headers["Authorization"] = self._authenticated(number, until=until)
        try:
            return self._pools[number].urlopen(
                "POST",
                f"/v3/{path}",
                body=json.dumps(body),
                headers=headers,
                timeout=timeout,
                retries=False,
                redirect=False,
                preload_content=False,
            )
        except (NewConnectionError, NameResolutionError, ConnectTimeoutError, SSLError) as error:
            raise _NotSent(_said(error)) from error
        except (HTTPError, OSError) as error:
            raise _Lost(_said(error)) from error

    def _authenticated(self, number: int, *, until: float) -> str:
        """Return the token, asked for once; a restarted etcd has forgotten those it gave out."""
        with self._lock:
            if self._token is None:
                body = {"name": self._access.user, "password": self._access.password}
                connect_s = min(CONNECT_S * 2, max(0.05, until - time.monotonic()))
                try:
                    answer = self._ask(number, _AUTHENTICATE, body, connect_s=connect_s, until=until)
                except _Lost as error:  # whatever it was for was not sent
                    raise _NotSent(str(error)) from error
                if not isinstance(answer.get("token"), str):
                    raise _NotSent("it gave no token")
                self._token = answer["token"]
            return self._token

    def _refuse(self, status: int, content: bytes) -> None:
        """Raise what an answer other than 200 means."""
        try:
            answer = json.loads(content)
            message, code = str(answer["message"]), int(answer["code"])
        except (ValueError, TypeError, KeyError):
            raise _Lost(f"status {status}") from None
        if any(word in message for word in _NO_TOKEN):
            with self._lock:
                had_token, self._token = self._token is not None, None
            if had_token:
                raise _NotSent(message)
        if any(word in message for word in _NOT_TAKEN):
            raise _NotSent(message)
        if code in (_UNAVAILABLE, _DEADLINE, _CANCELLED) or "not leader" in message:
            raise _Lost(message)
        if code in (_DENIED, _UNAUTHENTICATED) or "authentication failed" in message or _is_user(message):
            raise self._denied(message, code)
        raise EtcdRefused(f"the coordinator refuses: {message}", code=code)

    def _denied(self, message: str, code: int) -> EtcdRefused:
        return EtcdRefused(
            f"the coordinator refuses {self._who()}: {message}",
            code=code,
            remedy="Is elastic.certificates this peer's bundle, of this run? "
            "`bloomery coordinate --init-certs` makes one.",
        )

    def _who(self) -> str:
        return f"the user {self._access.user!r}" if self._access.user else "a peer without certificates"

    def _away(self, last: str, deadline_s: float) -> CoordinatorAway:
        shown = ", ".join(self.endpoints)
        return CoordinatorAway(
            f"no coordinator answered at {shown} within {deadline_s:.1f} s (last: {last})",
            remedy="Is it running (`bloomery coordinate`), and is the address right (elastic.coordinator)?",
        )


class ResponseStream:
    """Answers as they come. `shutdown` from another thread ends it."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response

    def answers(self) -> Iterator[Json]:
        """Yield each answer; ends with the connection, or when nothing came for the stream's idle time."""
        held = b""
        try:
            for chunk in self._response.stream(_READ_BYTES):
                *lines, held = (held + chunk).split(b"\n")
                if len(held) > ANSWER_BYTES_AT_MOST:
                    return
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
        except (HTTPError, OSError, ValueError, RecursionError, AttributeError) as error:
            log.debug("a stream of the coordinator ended: %s", error)
        finally:
            self._response.close()

    def shutdown(self) -> None:
        """Wake whoever reads: the stream ends."""
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError) as error:  # closed already
            log.debug("a stream was closed before it was shut down: %s", error)


_AUTHENTICATE = "auth/authenticate"


class _NotSent(Exception):
    """The request reached nobody who acts on it."""


class _Lost(Exception):
    """The request was sent; what became of it is unknown."""


def _pool(endpoint: str, context: ssl.SSLContext | None) -> urllib3.HTTPConnectionPool:
    try:
        url = urllib3.util.parse_url(endpoint)
    except HTTPError as error:
        raise _bad_endpoint(endpoint) from error
    if url.scheme not in ("http", "https") or not url.host or url.path not in (None, "", "/"):
        raise _bad_endpoint(endpoint)
    port = url.port or 2379
    if url.scheme == "http":
        return urllib3.HTTPConnectionPool(url.host, port, maxsize=8, socket_options=_SOCKET_OPTIONS)
    if context is None:
        raise CoordinatorError(
            f"{endpoint} wants certificates, and this peer has none",
            remedy="Set elastic.certificates to this peer's bundle.",
        )
    return urllib3.HTTPSConnectionPool(
        url.host, port, maxsize=8, ssl_context=context, socket_options=_SOCKET_OPTIONS
    )


def _bad_endpoint(endpoint: str) -> CoordinatorError:
    return CoordinatorError(
        f"{endpoint!r} is no endpoint of a coordinator",
        remedy="Write http://HOST:PORT or https://HOST:PORT, several separated by commas.",
    )


def _content(response: urllib3.BaseHTTPResponse, *, until: float) -> bytes:
    """Read an answer to its end, no longer than `until` and no further than is sane."""
    pieces, size = [], 0
    try:
        while piece := response.read1(_READ_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > ANSWER_BYTES_AT_MOST or time.monotonic() > until:
                response.close()
                raise _Lost("its answer does not end")
    except (HTTPError, OSError) as error:
        raise _Lost(_said(error)) from error
    response.release_conn()
    return b"".join(pieces)


def _is_user(message: str) -> bool:
    return "user name" in message or "auth token" in message


def _said(error: Exception) -> str:
    if isinstance(error, ReadTimeoutError):
        return "it did not answer in time"
    if isinstance(error, ConnectTimeoutError):
        return "no connection in time"
    cause = error.__cause__ or error.__context__ or error
    return str(cause) or type(error).__name__
