"""The checkpoints that a peer serves to newcomers, with files held open, and the requests it understands.

A state is known by its digest. The newest two are kept: while others still fetch the one, the next is there.
What is on the shelf may be renamed or removed on the disk: whoever reads it goes on reading the same bytes.

The parsers of a request's path and range refuse what is malformed, and `BoundedReader` limits its size.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, read_manifest
from bloomery.errors import CheckpointError, PeerError

KEPT = 2
_DIGEST = re.compile(r"[A-Za-z0-9]{1,128}")


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A file that can be read at any place by any thread."""

    descriptor: int
    bytes: int


@dataclass(kw_only=True)
class _State:
    name: str
    round: int
    files: Mapping[str, OpenFile]
    readers: int = 0
    is_retired: bool = False


class ServedStates:
    """States by digest. Thread-safe."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}

    def put(self, digest: str, directory: Path, *, round: int) -> None:
        """Serve this checkpoint as the state `digest`, unless that is served already.

        Raises CheckpointError for one that is not whole, and PeerError.
        """
        if not is_digest(digest):
            raise PeerError(f"{digest!r} is no digest of a state", remedy="This is a mistake in bloomery.")
        with self._lock:
            if digest in self._states:
                self._states[digest] = self._states.pop(digest)  # the newest again
                return
        state = _State(name=directory.name, round=round, files=_opened(directory))
        with self._lock:
            retired = [self._states.pop(digest)] if digest in self._states else []  # put meanwhile
            self._states[digest] = state
            while len(self._states) > self._kept:
                retired.append(self._states.pop(next(iter(self._states))))
            for one in retired:
                one.is_retired = True
                if not one.readers:
                    _close(one)

    @contextmanager
    def reading(self, digest: str, file: str) -> Iterator[OpenFile | None]:
        """A file of a state, open as long as this lasts; None where there is no such state or file."""
        with self._lock:
            state = self._states.get(digest)
            found = state.files.get(file) if state else None
            if state and found:
                state.readers += 1
        try:
            yield found
        finally:
            if state and found:
                with self._lock:
                    state.readers -= 1
                    if state.is_retired and not state.readers:
                        _close(state)

    def about(self, digest: str) -> dict[str, object] | None:
        """Name and round of a state; None where it is not here."""
        with self._lock:
            state = self._states.get(digest)
            return None if state is None else {"name": state.name, "round": state.round}

    def clear(self) -> None:
        """Serve nothing any more."""
        with self._lock:
            for state in self._states.values():
                state.is_retired = True
                if not state.readers:
                    _close(state)
            self._states.clear()


def is_digest(text: str) -> bool:
    """Whether this may stand for a state, in a URL too."""
    return _DIGEST.fullmatch(text) is not None


def _opened(directory: Path) -> dict[str, OpenFile]:
    """Open what the manifest names, and nothing else that may lie there."""
    manifest = read_manifest(directory)
    wanted = {record.name: record.bytes for record in manifest.files}
    wanted |= {INDEX: manifest.index_bytes, MANIFEST: (directory / MANIFEST).stat().st_size}
    files: dict[str, OpenFile] = {}
    try:
        for name, size in wanted.items():
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            files[name] = OpenFile(descriptor=descriptor, bytes=size)
            if os.fstat(descriptor).st_size != size:
                raise CheckpointError(f"{directory / name} has not the {size:,} bytes of its manifest")
    except OSError as error:
        _close_all(files)
        raise CheckpointError(f"{directory} cannot be served: {error}") from error
    except CheckpointError:
        _close_all(files)
        raise
    return files


def _close(state: _State) -> None:
    _close_all(state.files)


def _close_all(files: Mapping[str, OpenFile]) -> None:
    for file in files.values():
        os.close(file.descriptor)


REQUEST_BYTES_AT_MOST = 16 << 10
PREFIX = "/state/"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


@dataclass(frozen=True, kw_only=True)
class StateRequest:
    """A state, or one of its files. file: "" for what there is to say of the state."""

    digest: str
    file: str = ""


def parse_path(path: str) -> StateRequest | None:
    """What a path asks for: /state/<digest>, /state/<digest>/<file>; None for any other path.

    Nothing is unquoted and nothing is joined to a directory: a name is looked up among those served.
    """
    digest, slash, file = path.removeprefix(PREFIX).partition("/")
    if not path.startswith(PREFIX) or not is_digest(digest):
        return None
    if slash and not (_FILE.fullmatch(file) or file in (MANIFEST, INDEX)):
        return None
    return StateRequest(digest=digest, file=file)


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

    As much of a file as http.server's handler uses. first_until: the moment by which the first request must
    be here, and its sender be known.
    """

    def __init__(
        self, connection: socket.socket, *, first_until: float, idle_s: float, request_s: float
    ) -> None:
        self._connection, self._idle_s, self._request_s = connection, idle_s, request_s
        self._held = b""
        self.closed = False
        self._left = REQUEST_BYTES_AT_MOST
        self._until: float | None = first_until

    def begin(self) -> None:
        """A request is over: the next one has its own bounds."""
        self._left = REQUEST_BYTES_AT_MOST
        self._until = None

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
