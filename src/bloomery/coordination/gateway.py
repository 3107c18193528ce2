"""HTTP client of etcd's JSON gateway: fails over between endpoints, renews its token, bounds every call.

The gateway speaks HTTP, so TLS and certificates are those of Python's `ssl`. The endpoint that answered last
is asked first; an endpoint that cannot be reached costs `CONNECT_S`, then the next one is asked.
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
from pathlib import Path
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

Json: TypeAlias = Any  # decoded JSON; each caller checks the fields that it uses

CONNECT_S = 0.75
"""The time-out of a connection to one endpoint; it doubles each time all endpoints have failed."""
ANSWER_S = 0.8
"""The time-out of an answer if there are other endpoints to ask; it doubles likewise."""
_DENIED_AGAIN_S = 10.0
"""A second refusal of a stream within this time cannot be due to an old token."""
ANSWER_BYTES_AT_MOST = 64 << 20
_PAUSE_S = 0.05
_READ_BYTES = 1 << 16

_UNAUTHENTICATED, _DENIED, _UNAVAILABLE, _DEADLINE, _CANCELLED, _PRECONDITION = 16, 7, 14, 4, 1, 9
_NOT_TAKEN = ("no leader", "too many requests")
"""Messages of etcd that mean that it did not act on a request, so that any request may be sent again."""
_NO_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old", "invalid auth")
_UNVERIFIED = "certificate verify failed"
_SOCKET_OPTIONS = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


@dataclass(frozen=True, kw_only=True)
class Access:
    """Credentials for etcd: TLS context, user and password.

    context: it trusts the coordinator's authority and has this peer's certificate; None: plain HTTP.
    user: "": there is no authentication by password.
    """

    context: ssl.SSLContext | None = None
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Access(user={self.user!r})"


class OutcomeUnknown(Exception):
    """A request was sent, but no answer came, so it may have been carried out."""


class EtcdRefused(CoordinatorError):
    """etcd refused a request. code: the status code of gRPC."""

    def __init__(self, message: str, *, code: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class Gateway:
    """The endpoints of one etcd cluster, for use by several threads."""

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
        """Return the answer. Raises EtcdRefused, CoordinatorAway after `deadline_s`, or OutcomeUnknown.

        repeatable: whether it is harmless to send the request twice. If not, a lost answer raises
            OutcomeUnknown.
        """
        until = time.monotonic() + deadline_s
        connect_s, last_failure = CONNECT_S, "no endpoint was asked in time"
        while True:
            for number in self._order():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise self._away(last_failure, deadline_s)
                try:
                    answer = self._ask(number, path, body, connect_s=min(connect_s, left_s), until=until)
                except _NotSent as error:
                    last_failure = f"{self.endpoints[number]}: {error}"
                except _Lost as error:
                    last_failure = f"{self.endpoints[number]}: {error}"
                    if not repeatable:
                        raise OutcomeUnknown(last_failure) from error
                else:
                    self._prefer(number)
                    return answer
                self._prefer(number + 1)
            connect_s *= 2
            time.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))

    def stream(
        self, path: str, body: Mapping[str, Json], *, deadline_s: float, idle_s: float
    ) -> ResponseStream:
        """Open a stream of answers, one a line. Raises EtcdRefused or CoordinatorAway.

        idle_s: the seconds of silence after which a stream ends.
        """
        until = time.monotonic() + deadline_s
        last_failure = "no endpoint was asked in time"
        while True:
            for number in self._order():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise self._away(last_failure, deadline_s)
                timeout = urllib3.Timeout(connect=min(CONNECT_S * 2, left_s), read=max(idle_s, 0.1))
                try:
                    token = self._token_for(number, path, until=until)
                    response = self._send(number, path, body, timeout=timeout, token=token)
                    if response.status == 200:
                        self._prefer(number)
                        return ResponseStream(response)
                    self._refuse(response.status, _content(response, until=until), token=token)
                except (_NotSent, _Lost) as error:
                    last_failure = f"{self.endpoints[number]}: {error}"
                self._prefer(number + 1)
            time.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))

    def stream_refused(self, reason: str) -> None:
        """Note why etcd ended a stream. Raises EtcdRefused if opening another would not help.

        etcd 3.5 also says "permission denied" of a token that it gave out before its restart. So the first
        time the token is dropped, and only a second refusal shortly afterwards raises.
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

    def load_certificate(self, certificate: Path, key: Path) -> None:
        """Show this certificate on new connections. Raises OSError if it cannot be used."""
        if self._access.context is not None:
            self._access.context.load_cert_chain(certificate, key)

    def close(self) -> None:
        """Close the connections."""
        for pool in self._pools:
            pool.close()

    def _order(self) -> list[int]:
        return [(self._preferred + step) % len(self._pools) for step in range(len(self._pools))]

    def _prefer(self, number: int) -> None:
        self._preferred = number % len(self._pools)

    def _ask(
        self, number: int, path: str, body: Mapping[str, Json], *, connect_s: float, until: float
    ) -> Json:
        read_s = max(0.05, until - time.monotonic())
        if len(self._pools) > 1:  # an endpoint that hangs must leave time for the others
            read_s = min(read_s, max(0.05, connect_s / CONNECT_S * ANSWER_S))
        timeout = urllib3.Timeout(connect=connect_s, read=read_s)
        token = self._token_for(number, path, until=until)
        response = self._send(number, path, body, timeout=timeout, token=token)
        content = _content(response, until=until)
        if response.status != 200:
            self._refuse(response.status, content, token=token)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _Lost(f"its answer is no JSON: {error}") from error

    def _send(
        self, number: int, path: str, body: Mapping[str, Json], *, timeout: urllib3.Timeout, token: str
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        if token:
            headers["Authorization"] = token
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

    def _token_for(self, number: int, path: str, *, until: float) -> str:
        """Return the token of this user for a request; "" where none is sent.

        It is asked for once, and again after etcd has refused it.
        """
        if not self._access.user or path == _AUTHENTICATE:
            return ""
        with self._lock:
            if self._token is None:
                body = {"name": self._access.user, "password": self._access.password}
                connect_s = min(CONNECT_S * 2, max(0.05, until - time.monotonic()))
                try:
                    answer = self._ask(number, _AUTHENTICATE, body, connect_s=connect_s, until=until)
                except _Lost as error:  # the request that needs the token was not sent
                    raise _NotSent(str(error)) from error
                if not isinstance(answer.get("token"), str):
                    raise _NotSent("it gave no token")
                self._token = answer["token"]
            return self._token

    def _refuse(self, status: int, content: bytes, *, token: str) -> None:
        """Raise the exception for an answer with another status than 200. token: what was sent; "": none."""
        try:
            answer = json.loads(content)
            message, code = str(answer["message"]), int(answer["code"])
        except (ValueError, TypeError, KeyError):
            raise _Lost(f"status {status}") from None
        if token and any(word in message for word in _NO_TOKEN):
            with self._lock:
                if self._token == token:  # else another thread, whose request it refused too, has dropped it
                    self._token = None
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

    def _away(self, last_failure: str, deadline_s: float) -> CoordinatorAway:
        shown = ", ".join(self.endpoints)
        remedy = "Is it running (`bloomery coordinate`), and is the address right (elastic.coordinator)?"
        if _UNVERIFIED in last_failure:
            remedy = (
                "It shows a certificate that was not made with these (elastic.certificates), or not for this "
                "address: copy the bundle again from the coordinator's machine; or name the address there "
                "with `bloomery coordinate --init-certs … --hosts`, and start the coordinator again."
            )
        return CoordinatorAway(
            f"no coordinator answered at {shown} within {deadline_s:.1f} s (last: {last_failure})",
            remedy=remedy,
        )


class ResponseStream:
    """The answers of one request, as they come; `shutdown` from another thread ends them."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response

    def answers(self) -> Iterator[bytes]:
        """Yield each answer, as JSON, until the connection ends or is silent for the stream's idle time."""
        rest = b""  # the beginning of a line whose end has not come yet
        try:
            for chunk in self._response.stream(_READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > ANSWER_BYTES_AT_MOST:
                    return
                for line in lines:
                    if line.strip():
                        yield line
        except (HTTPError, OSError, ValueError, AttributeError) as error:
            log.debug("a stream of the coordinator ended: %s", error)
        finally:
            self._response.close()

    def shutdown(self) -> None:
        """End the stream: `answers` returns in the thread that waits in it."""
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError) as error:  # closed already
            log.debug("a stream was closed before it was shut down: %s", error)


_AUTHENTICATE = "auth/authenticate"


class _NotSent(Exception):
    """etcd did not act on the request: it was not sent, or was turned away before it was read."""


class _Lost(Exception):
    """The request was sent, but it is unknown whether etcd acted on it."""


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
            f"{endpoint} requires certificates, and this peer has none",
            remedy="Set elastic.certificates to this peer's bundle.",
        )
    return urllib3.HTTPSConnectionPool(
        url.host, port, maxsize=8, ssl_context=context, socket_options=_SOCKET_OPTIONS
    )


def _bad_endpoint(endpoint: str) -> CoordinatorError:
    return CoordinatorError(
        f"{endpoint!r} is not the endpoint of a coordinator",
        remedy="Write http://HOST:PORT or https://HOST:PORT, several separated by commas.",
    )


def _content(response: urllib3.BaseHTTPResponse, *, until: float) -> bytes:
    """Read an answer to its end. Raises _Lost after `until` or ANSWER_BYTES_AT_MOST."""
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
