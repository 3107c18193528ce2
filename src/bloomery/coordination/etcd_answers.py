"""Tells etcd's final refusals from answers after which a request may be sent again; reads its streams.

An etcd that elects a leader, hands over its leadership, restarts or has no space left refuses requests for a
while. That must end no agent, so such a refusal counts as one of an etcd that is away.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError

from bloomery.errors import CoordinatorAway, CoordinatorError

log = logging.getLogger(__name__)

ANSWER_BYTES_AT_MOST = 64 << 20
DENIED = 7
COMPACTED = 11
"""The status of a request about a revision whose history was compacted."""
_READ_BYTES = 1 << 16
_UNAUTHENTICATED, _UNAVAILABLE, _DEADLINE, _CANCELLED = 16, 14, 4, 1
_UNKNOWN, _ABORTED, _INTERNAL = 2, 10, 13
_PASSING = (_UNAVAILABLE, _DEADLINE, _CANCELLED, _UNKNOWN, _ABORTED, _INTERNAL)
"""Statuses of a server that could not finish a request; it may have acted on it."""
_NO_SPACE = "database space exceeded"
_AUTHENTICATION_OFF = "authentication is not enabled"
_NOT_TAKEN = ("no leader", "too many requests", "raft proposal dropped", _NO_SPACE, _AUTHENTICATION_OFF)
"""Messages of etcd that mean that it did not act on a request, so that any request may be sent again."""
NEEDS_NEW_TOKEN = (
    "invalid auth token",
    "user name is empty",
    "revision of auth store is old",
    "invalid auth",
)
_UNVERIFIED = "certificate verify failed"


class NotSent(Exception):
    """etcd did not act on the request: it was not sent, or was turned away before it was read."""


class TokenRefused(NotSent):
    """etcd does not know the token of a request, so it did not act on the request."""


class Lost(Exception):
    """The request was sent, but it is unknown whether etcd acted on it."""


class EtcdRefused(CoordinatorError):
    """etcd refused a request. code: the status code of gRPC."""

    def __init__(self, message: str, *, code: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class AnswerTooLong(CoordinatorAway):
    """An answer is longer than this client reads; a request for less may be answered."""

    def __init__(self) -> None:
        super().__init__(f"the coordinator's answer is longer than {ANSWER_BYTES_AT_MOST >> 20} MiB")


def refusal(status: int, content: bytes, *, has_token: bool, who: str) -> Exception:
    """Return the exception that an answer with another status than 200 stands for.

    has_token: whether a token was sent. who: the user, for the message about a denied request.
    """
    try:
        answer = json.loads(content)
        message, code = str(answer["message"]), int(answer["code"])
    except (ValueError, TypeError, KeyError):
        return Lost(f"status {status}")
    if has_token and any(word in message for word in NEEDS_NEW_TOKEN):
        return TokenRefused(message)
    if any(word in message for word in _NOT_TAKEN):
        return NotSent(message)
    if code in _PASSING or "not leader" in message:
        return Lost(message)
    if code in (DENIED, _UNAUTHENTICATED) or "authentication failed" in message or _is_user(message):
        return denied(message, code, who=who)
    return EtcdRefused(f"the coordinator refuses: {message}", code=code)


def denied(message: str, code: int, *, who: str) -> EtcdRefused:
    """Return the error for a request that etcd does not permit this user."""
    return EtcdRefused(
        f"the coordinator refuses {who}: {message}",
        code=code,
        remedy="Is elastic.certificates this peer's bundle, of this run? "
        "`bloomery coordinate --init-certs` makes one.",
    )


def remedy_of(last_failure: str) -> str:
    """Return what may help against the failure for which no endpoint answered in time."""
    if _UNVERIFIED in last_failure:
        return (
            "It shows a certificate that was not made with these (elastic.certificates), or not for this "
            "address: copy the bundle again from the coordinator's machine; or name the address there "
            "with `bloomery coordinate --init-certs … --hosts`, and start the coordinator again."
        )
    if _NO_SPACE in last_failure:
        return (
            "Its database has reached its quota, so it accepts no writes. On its machine: `etcdctl compact` "
            "the present revision, `etcdctl defrag`, then `etcdctl alarm disarm`; peers go on by themselves."
        )
    if _AUTHENTICATION_OFF in last_failure:
        return "Is it still starting? Otherwise `bloomery coordinate --grant` creates the peers' accounts."
    return "Is it running (`bloomery coordinate`), and is the address right (elastic.coordinator)?"


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


def cause_of(error: Exception) -> str:
    """Return why a request failed, for messages."""
    if isinstance(error, ReadTimeoutError):
        return "it did not answer in time"
    # A refused connection and an unknown name are of this kind too, and did not take long.
    if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
        return "no connection in time"
    cause = error.__cause__ or error.__context__ or error
    return str(cause) or type(error).__name__


def _is_user(message: str) -> bool:
    return "user name" in message or "auth token" in message
