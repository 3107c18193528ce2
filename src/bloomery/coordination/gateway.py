"""HTTP client of etcd's JSON gateway: fails over between endpoints, renews its token, bounds every call.

The gateway speaks HTTP, so TLS and certificates are those of Python's `ssl`. The endpoint that answered last
is asked first; an endpoint that cannot be reached costs `CONNECT_S`, then the next one is asked.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    SSLError,
)

from bloomery.coordination.etcd_answers import (
    ANSWER_BYTES_AT_MOST,
    DENIED,
    NEEDS_NEW_TOKEN,
    AnswerTooLong,
    Lost,
    NotSent,
    ResponseStream,
    TokenRefused,
    cause_of,
    denied,
    refusal,
    remedy_of,
)
from bloomery.errors import CoordinatorAway, CoordinatorError
from bloomery.transport.name_lookup import connect_by_name

Json: TypeAlias = Any  # decoded JSON; each caller checks the fields that it uses

CONNECT_S = 0.75
"""The time-out of a connection to one endpoint; it doubles each time all endpoints have failed."""
ANSWER_S = 0.8
"""The time-out of an answer if there are other endpoints to ask; it doubles likewise."""
_DENIED_AGAIN_S = 10.0
"""A second refusal of a stream within this time cannot be due to an old token."""
_AUTHENTICATE_S = 5.0
"""The least seconds that a request for a token gets: etcd hashes a password on purpose slowly."""
_TRUSTED_S, _TRUSTED_S_AT_MOST = 30.0, 960.0
"""The age up to which a token is not dropped for a lost request; it doubles until a request is answered."""
_NOBODY_ASKED = "no endpoint was asked in time"
_PAUSE_S = 0.05
_READ_BYTES = 1 << 16

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
        self._token_s, self._trusted_s = float("-inf"), _TRUSTED_S
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
        connect_s, last_failure = CONNECT_S, _NOBODY_ASKED
        while True:
            for number in self._order():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise self._away(last_failure, deadline_s)
                try:
                    answer = self._ask(number, path, body, connect_s=min(connect_s, left_s), until=until)
                except (NotSent, Lost) as error:
                    failure = f"{self.endpoints[number]}: {error}"
                    # The last request has hardly any time: that it got no answer does not tell why.
                    if left_s >= CONNECT_S or last_failure == _NOBODY_ASKED:
                        last_failure = failure
                    if isinstance(error, Lost) and not repeatable:
                        raise OutcomeUnknown(failure) from error
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
        last_failure = _NOBODY_ASKED
        while True:
            for number in self._order():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise self._away(last_failure, deadline_s)
                timeout = urllib3.Timeout(connect=min(CONNECT_S * 2, left_s), read=max(idle_s, 0.1))
                try:
                    with self._token_for(number, path, until=until) as token:
                        response = self._send(number, path, body, timeout=timeout, token=token)
                        if response.status == 200:
                            self._prefer(number)
                            return ResponseStream(response)
                        self._refuse(response.status, _content(response, until=until), token=token)
                except (NotSent, Lost) as error:
                    if left_s >= CONNECT_S or last_failure == _NOBODY_ASKED:
                        last_failure = f"{self.endpoints[number]}: {error}"
                self._prefer(number + 1)
            time.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))

    def stream_refused(self, reason: str) -> None:
        """Note why etcd ended a stream. Raises EtcdRefused if opening another would not help.

        etcd 3.5 also says "permission denied" of a token that it gave out before its restart. So the first
        time the token is dropped, and only a second refusal shortly afterwards raises.
        """
        is_denied = "permission" in reason.lower()
        if not is_denied and not any(word in reason for word in NEEDS_NEW_TOKEN):
            return
        now, is_again = time.monotonic(), False
        with self._lock:
            self._token = None
            if is_denied:
                is_again, self._denied_s = now < self._denied_s + _DENIED_AGAIN_S, now
        if is_again:
            raise denied(reason, DENIED, who=self._who())

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
        with self._token_for(number, path, until=until) as token:
            response = self._send(number, path, body, timeout=timeout, token=token)
            content = _content(response, until=until)
            if response.status != 200:
                self._refuse(response.status, content, token=token)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise Lost(f"its answer is no JSON: {error}") from error

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
            raise NotSent(cause_of(error)) from error
        except (HTTPError, OSError) as error:
            raise Lost(cause_of(error)) from error

    @contextmanager
    def _token_for(self, number: int, path: str, *, until: float) -> Iterator[str]:
        """Yield the token of this user for one request; "" where none is sent.

        It is asked for once, and again after a request with it was refused for it, or was lost: an etcd that
        has lost its data does not answer to a token of before until its log is as long as the log was then.
        """
        token = "" if not self._access.user or path == _AUTHENTICATE else self._known_token(number, until)
        try:
            yield token
        except TokenRefused:
            self._drop(token)
            raise
        except Lost:
            # A new token is not to blame, and etcd works hard for each: one that is slow would get slower.
            if token and time.monotonic() >= self._token_s + self._trusted_s:
                self._drop(token)
                self._trusted_s = min(2 * self._trusted_s, _TRUSTED_S_AT_MOST)
            raise
        if token:
            self._trusted_s = _TRUSTED_S

    def _known_token(self, number: int, until: float) -> str:
        with self._lock:
            now = time.monotonic()
            if self._token is None and now >= until:
                raise NotSent("another thread got no token in time")
            if self._token is None:
                body = {"name": self._access.user, "password": self._access.password}
                # All threads wait for this one, and the next would begin anew: it has time to succeed.
                until = max(until, now + _AUTHENTICATE_S)
                connect_s = min(CONNECT_S * 2, max(0.05, until - now))
                try:
                    answer = self._ask(number, _AUTHENTICATE, body, connect_s=connect_s, until=until)
                except Lost as error:  # the request that needs the token was not sent
                    raise NotSent(str(error)) from error
                if not isinstance(answer, dict) or not isinstance(answer.get("token"), str):
                    raise NotSent("it gave no token")
                self._token, self._token_s = answer["token"], time.monotonic()
            return self._token

    def _refuse(self, status: int, content: bytes, *, token: str) -> None:
        raise refusal(status, content, has_token=bool(token), who=self._who())

    def _drop(self, token: str) -> None:
        """Ask for a new token with the next request, unless another thread has dropped this one already."""
        with self._lock:
            if self._token == token:
                self._token = None

    def _who(self) -> str:
        return f"the user {self._access.user!r}" if self._access.user else "a peer without certificates"

    def _away(self, last_failure: str, deadline_s: float) -> CoordinatorAway:
        shown = ", ".join(self.endpoints)
        return CoordinatorAway(
            f"no coordinator answered at {shown} within {deadline_s:.1f} s (last: {last_failure})",
            remedy=remedy_of(last_failure),
        )


_AUTHENTICATE = "auth/authenticate"


class _PlainConnection(HTTPConnection):
    """A connection whose time-out also limits the lookup of its name."""

    def _new_conn(self) -> socket.socket:
        return connect_by_name(self, super()._new_conn)


class _TlsConnection(HTTPSConnection):
    """A connection whose time-out also limits the lookup of its name."""

    def _new_conn(self) -> socket.socket:
        return connect_by_name(self, super()._new_conn)


def _pool(endpoint: str, context: ssl.SSLContext | None) -> urllib3.HTTPConnectionPool:
    try:
        url = urllib3.util.parse_url(endpoint)
    except HTTPError as error:
        raise _bad_endpoint(endpoint) from error
    if url.scheme not in ("http", "https") or not url.host or url.path not in (None, "", "/"):
        raise _bad_endpoint(endpoint)
    port = url.port or 2379
    pool: urllib3.HTTPConnectionPool
    if url.scheme == "http":
        pool = urllib3.HTTPConnectionPool(url.host, port, maxsize=8, socket_options=_SOCKET_OPTIONS)
        pool.ConnectionCls = _PlainConnection
        return pool
    if context is None:
        raise CoordinatorError(
            f"{endpoint} requires certificates, and this peer has none",
            remedy="Set elastic.certificates to this peer's bundle.",
        )
    pool = urllib3.HTTPSConnectionPool(
        url.host, port, maxsize=8, ssl_context=context, socket_options=_SOCKET_OPTIONS
    )
    pool.ConnectionCls = _TlsConnection
    return pool


def _bad_endpoint(endpoint: str) -> CoordinatorError:
    return CoordinatorError(
        f"{endpoint!r} is not the endpoint of a coordinator",
        remedy="Write http://HOST:PORT or https://HOST:PORT, several separated by commas.",
    )


def _content(response: urllib3.BaseHTTPResponse, *, until: float) -> bytes:
    """Read an answer to its end. Raises Lost after `until`, and AnswerTooLong."""
    pieces, size = [], 0
    try:
        while piece := response.read1(_READ_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > ANSWER_BYTES_AT_MOST:
                response.close()
                raise AnswerTooLong
            if time.monotonic() > until:
                response.close()
                raise Lost("its answer does not end")
    except (HTTPError, OSError) as error:
        raise Lost(cause_of(error)) from error
    response.release_conn()
    return b"".join(pieces)
