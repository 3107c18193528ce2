"""The checkpoints and averages that a peer serves, with files held open; parses the HTTP requests for them.

A state is named by its digest. The newest two states are served, so that joining peers can finish fetching
one after the next has been put. A checkpoint that is served may be renamed or removed on disk: its files are
held open, so its readers go on reading the same bytes.

The parsers of a request's path and range refuse malformed requests, and `BoundedReader` limits their size.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, read_manifest
from bloomery.errors import CheckpointError, PeerError

KEPT = 2
"""The newest states that are served by default."""
READ_S = 60.0
"""The seconds after its last read for which a state counts as being fetched."""
_AVERAGE = "average-"
_DIGEST = re.compile(r"[A-Za-z0-9]{1,128}")


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """An open file, which any thread may read at any offset.

    bytes: its size.
    """

    descriptor: int
    bytes: int


@dataclass(kw_only=True)
class _State:
    name: str
    round: int
    files: Mapping[str, OpenFile]
    readers: int = 0
    read_s: float = float("-inf")
    is_retired: bool = False


class ServedStates:
    """The states that are served, by digest. Thread-safe.

    Beside the newest ones, one older state is served as long as somebody fetches it: a joining peer whose
    fetch takes longer than a round finishes it, and makes up for the rounds since then by their averages.

    kept: how many states are served in any case; the oldest is dropped first.
    clock: the monotonic clock, seconds.
    """

    def __init__(self, *, kept: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept, self._clock = kept, clock
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._averages: Mapping[str, Path] = {}

    def put(self, digest: str, directory: Path, *, round: int) -> None:
        """Serve this checkpoint as the state `digest`, unless that state is served already.

        round: the run's round in which the state was committed.
        Raises CheckpointError when the checkpoint is incomplete, and PeerError when `digest` is malformed.
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
            older = list(self._states)[: -self._kept]
            fetched = next((name for name in older if self._is_fetched(self._states[name])), None)
            retired += [self._states.pop(name) for name in older if name != fetched]
            for dropped in retired:
                self._retire(dropped)

    def keep(self, digests: Collection[str]) -> None:
        """Serve no other states than these any more; a request that is being answered is answered whole."""
        with self._lock:
            for digest in set(self._states) - set(digests):
                self._retire(self._states.pop(digest))

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a state nor an average."""
        with self._lock:
            return not self._states and not self._averages

    @contextmanager
    def reading(self, digest: str, file: str) -> Iterator[OpenFile | None]:
        """Yield a file of a state, open as long as the `with`; None: no such state or file is served.

        Raises OSError where an average cannot be opened.
        """
        if file.startswith(_AVERAGE):
            with _average_opened(self._averages.get(digest), digest, file) as average:
                yield average
            return
        with self._lock:
            state = self._states.get(digest)
            open_file = state.files.get(file) if state else None
            if state and open_file:
                state.readers += 1
                state.read_s = self._clock()
        try:
            yield open_file
        finally:
            if state and open_file:
                with self._lock:
                    state.readers -= 1
                    state.read_s = self._clock()
                    if state.is_retired and not state.readers:
                        _close(state)

    def serve_averages(self, directories: Mapping[str, Path]) -> None:
        """Serve the averages of these rounds, and no others; their files may still be to be written.

        directories: where the files of a round's average are, by the digest of the state that it leads to.
        """
        self._averages = dict(directories)

    def is_to_come(self, digest: str, file: str) -> bool:
        """Return whether this is the file of an average that is served once it is written."""
        return file.startswith(_AVERAGE) and digest in self._averages

    def _is_fetched(self, state: _State) -> bool:
        return state.readers > 0 or self._clock() < state.read_s + READ_S

    def about(self, digest: str) -> dict[str, object] | None:
        """Return the name and round of a state; None: the state is not served."""
        with self._lock:
            state = self._states.get(digest)
            if state is not None:
                state.read_s = self._clock()
            return None if state is None else {"name": state.name, "round": state.round}

    def clear(self) -> None:
        """Stop serving every state."""
        with self._lock:
            for state in self._states.values():
                self._retire(state)
            self._states.clear()

    @staticmethod
    def _retire(state: _State) -> None:
        """Close a state's files, now or when its last reader has ended. The caller holds the lock."""
        state.is_retired = True
        if not state.readers:
            _close(state)


def is_digest(text: str) -> bool:
    """Return whether the text is a valid digest of a state, which is also safe in a URL."""
    return _DIGEST.fullmatch(text) is not None


def average_file(rank: int) -> str:
    """Return the name under which a rank's elements of an average are served."""
    return f"{_AVERAGE}{rank}"


@contextmanager
def _average_opened(directory: Path | None, digest: str, file: str) -> Iterator[OpenFile | None]:
    """Yield the file of an average, which the ranks write as <digest>.<rank>; None if it is not there."""
    rank = file.removeprefix(_AVERAGE)
    if directory is None or not (rank.isascii() and rank.isdecimal()):
        yield None
        return
    try:
        descriptor = os.open(directory / f"{digest}.{rank}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    try:
        yield OpenFile(descriptor=descriptor, bytes=os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _opened(directory: Path) -> dict[str, OpenFile]:
    """Open the files that the manifest names, and no other file in the directory."""
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
    """A request for a state or for one of its files.

    file: the name of the file; "" asks for the state's name and round.
    """

    digest: str
    file: str = ""


def parse_path(path: str) -> StateRequest | None:
    """Parse /state/<digest> or /state/<digest>/<file>; returns None for any other path.

    The path is neither unquoted nor joined to a directory, so it cannot lead out of the state: the name is
    looked up among the names of the served files.
    """
    digest, slash, file = path.removeprefix(PREFIX).partition("/")
    if not path.startswith(PREFIX) or not is_digest(digest):
        return None
    if slash and not (_FILE.fullmatch(file) or file in (MANIFEST, INDEX)):
        return None
    return StateRequest(digest=digest, file=file)


def parse_range(header: str | None, size: int) -> range | None:
    """Return the bytes that a Range header asks for.

    header: None asks for the whole file.
    size: the bytes of the file. Returns None when the range is malformed or exceeds the file.
    """
    if header is None:
        return range(size)
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return None
    begin, last = int(match[1]), int(match[2])
    return range(begin, last + 1) if begin <= last < size else None


class BoundedReader:
    """Reads the lines of HTTP requests, with a limit on the bytes and the time of each request.

    It has the methods of a file that http.server's handler calls.

    first_until: the time.monotonic() by which the first request must have come and authenticated its sender.
    idle_s: seconds that a connection may wait between requests.
    request_s: seconds from the first byte of a later request to its last.
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
        """Begin the next request, which has limits of its own."""
        self._left = REQUEST_BYTES_AT_MOST
        self._until = None

    def readline(self, limit: int = -1) -> bytes:
        """Return the next line with its newline, or the rest when the connection ends.

        Raises OSError when the request exceeds its bytes or its time. limit: ignored.
        """
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
        """Mark the reader as closed, as http.server expects; the owner of the connection closes that."""
        self.closed = True
