"""Access control of the dashboard: tokens for reading and acting, allowed Host names, security headers."""

from __future__ import annotations

import hmac
import secrets
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from bloomery.errors import BloomeryError, storage_error

COOKIE = "bloomery-dashboard"
LEAST_TOKEN = 16  # characters
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_OPEN_PATHS = ("/", "/api/session")
_OPEN_PREFIX = "/static/"

Scope = MutableMapping[str, Any]  # Any: of ASGI
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """The rules of who may read and who may act.

    token: what readers present where `is_private`, and actions always; None where there are no actions.
    hosts: the names under which a loopback server may be asked, so that no foreign page reaches it through a
        name of its own (DNS rebinding); () lets every name pass, for a server that wants a token.
    """

    token: str | None = None
    is_private: bool = False
    has_actions: bool = False
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")

    def is_token(self, presented: str) -> bool:
        """Return whether this is the token, in a time that does not tell how much of it is right."""
        return self.token is not None and hmac.compare_digest(presented.encode(), self.token.encode())

    def may_read(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether a request with these headers may read."""
        return not self.is_private or self.is_token(bearer(headers)) or self.is_token(_cookie(headers))

    def knows_host(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether the request names this server as it is known."""
        host = headers.get(b"host", b"").decode("latin-1")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return not self.hosts or name in self.hosts


class AccessGate:
    """Wraps the server's application: refuses requests that may not read; sets headers in every answer."""

    def __init__(self, application: Application, rules: AccessRules) -> None:
        self._application, self._rules = application, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        headers = dict(scope["headers"])
        path = str(scope["path"])
        if not self._rules.knows_host(headers):
            await _refuse(send_with_headers, 421, b'{"told": "this server has another name"}')
        elif (
            path not in _OPEN_PATHS
            and not path.startswith(_OPEN_PREFIX)
            and not self._rules.may_read(headers)
        ):
            await _refuse(send_with_headers, 401, b'{"told": "a token is wanted"}')
        else:
            await self._application(scope, receive, send_with_headers)


def bearer(headers: dict[bytes, bytes]) -> str:
    """Return the token in the Authorization header; "" where there is none."""
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def read_token(path: Path) -> str:
    """Return the token in a file. Raises StorageError, and BloomeryError for a short or an open one."""
    try:
        token, mode = path.read_text(errors="replace").strip(), path.stat().st_mode
    except OSError as refused:
        raise storage_error(refused, path=path, doing="Reading the token") from refused
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise BloomeryError(f"Others can read {path}, which holds the token.", remedy=f"chmod 600 {path}")
    if len(token) < LEAST_TOKEN or not token.isascii() or len(token.split()) != 1:
        raise BloomeryError(
            f"The token in {path} must be one word of at least {LEAST_TOKEN} ASCII characters.",
            remedy=f"Write one: (umask 077; openssl rand -hex 24 > {path})",
        )
    return token


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(24)


def _cookie(headers: dict[bytes, bytes]) -> str:
    for text in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        # By itself, for SimpleCookie reads nothing after a cookie of another server that it cannot read.
        if text.partition("=")[0].strip() == COOKIE:
            with suppress(CookieError):
                cookie: SimpleCookie = SimpleCookie(text.strip())
                return cookie[COOKIE].value if COOKIE in cookie else ""
    return ""


async def _refuse(send: Send, status: int, body: bytes) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
    )
    await send({"type": "http.response.body", "body": body})
