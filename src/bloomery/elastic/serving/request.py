"""What may be asked of a peer's state server: a path, a range, and a reader with bounds."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass

from bloomery.checkpoint.manifest import INDEX, MANIFEST
from bloomery.elastic.serving.shelf import is_digest

REQUEST_BYTES_AT_MOST = 16 << 10
PREFIX = "/state/"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A state, or one of its files. file: "" for what there is to say of the state."""

    digest: str
    file: str = ""


def parse_path(path: str) -> Wanted | None:
    """What a path asks for: /state/<digest>, /state/<digest>/<file>; None for any other path.

    Nothing is unquoted and nothing is joined to a directory: a name is looked up among those served.
    """
    digest, slash, file = path.removeprefix(PREFIX).partition("/")
    if not path.startswith(PREFIX) or not is_digest(digest):
        return None
    if slash and not (_FILE.fullmatch(file) or file in (MANIFEST, INDEX)):
        return None
    return Wanted(digest=digest, file=file)


def parse_range(header: str | None, size: int) -> range | None:
    """The bytes that are asked for: all without a header; None where they are not all there."""
    if header is None:
        return range(size)
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return None
    begin, last = int(match[1]), int(match[2])
    return range(begin, last + 1) if begin <= last < size else None


class BoundedReader:
    """Lines of a request: so many bytes and so much time for each request, however slowly they come.

    As much of a file as http.server's handler uses.
    """

    def __init__(self, connection: socket.socket, *, idle_s: float, request_s: float) -> None:
        self._connection, self._idle_s, self._request_s = connection, idle_s, request_s
        self._held = b""
        self.closed = False
        self.begin()

    def begin(self) -> None:
        """A request is over: the next one has its own bounds."""
        self._left = REQUEST_BYTES_AT_MOST
        self._until: float | None = None

    def readline(self, limit: int = -1) -> bytes:
        """The next line with its end; what there is where the connection ends. OSError: out of bounds."""
        while b"\n" not in self._held:
            if len(self._held) >= self._left:
                raise ConnectionError(f"a request of more than {REQUEST_BYTES_AT_MOST:,} bytes")
            now = time.monotonic()
            timeout_s = self._idle_s if self._until is None else self._until - now
            if timeout_s <= 0:
                raise TimeoutError("the request takes too long")
            self._connection.settimeout(timeout_s)
            piece = self._connection.recv(4096)
            if not piece:
                break
            self._until = self._until or time.monotonic() + self._request_s
            self._held += piece
        end = self._held.find(b"\n") + 1 or len(self._held)
        line, self._held = self._held[:end], self._held[end:]
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionError(f"a request of more than {REQUEST_BYTES_AT_MOST:,} bytes")
        return line

    def close(self) -> None:
        """Part of a file's interface; the connection is closed by who owns it."""
        self.closed = True
