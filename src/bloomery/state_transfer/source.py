"""HTTP(S) client of one peer's state server: reads a served checkpoint's manifest, index and byte ranges."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse

from bloomery.checkpoint.format.manifest import parse_name
from bloomery.checkpoint.format.source import RangedFile
from bloomery.errors import PeerError
from bloomery.state_transfer.served_states import PREFIX
from bloomery.transport.name_lookup import connect_by_name
from bloomery.transport.trust import PeerRefused, Trust, check_names, is_loopback

CONNECT_S = 5.0
"""The seconds for connecting to a source."""
STALL_S = 10.0
"""The seconds without a byte after which a source has failed."""
HEAD_S = 30.0
"""The seconds within which the head of an answer must have come, however many of its bytes come before."""
THROUGH_RELAY = "relay:"
"""What a peer names in place of a URL if it cannot be dialled and keeps reverse connections at a relay."""
URLS_OF_PEER = 4
"""The most URLs of one peer that are tried; its entry may list thousands, each of which costs time."""
_NO_HOST = "through-a-relay.invalid"
_ABOUT_BYTES_AT_MOST = 4096
_READ_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class PeerSource:
    """A peer that serves a state.

    peer: its name.
    url: where it serves, http(s)://host:port; or THROUGH_RELAY.
    reach: makes a connection to it through a relay; None: there is no other way than the URL. Raises
        PeerRefused or OSError.
    """

    peer: str
    url: str
    reach: Callable[[], socket.socket] | None = field(default=None, compare=False, repr=False)


def few_of_each_peer(sources: Iterable[PeerSource]) -> list[PeerSource]:
    """Return the sources in their order, each once, without those beyond URLS_OF_PEER of one peer."""
    counts, few = Counter[str](), list[PeerSource]()
    for source in dict.fromkeys(sources):
        counts[source.peer] += 1
        if counts[source.peer] <= URLS_OF_PEER:
            few.append(source)
    return few


class SourceFailed(OSError):
    """A source did not send what was requested."""


class SourceLost(SourceFailed):
    """The connection to a source failed, as it does while the network is down: it may be there again."""


class NotYetServed(SourceFailed):
    """A source has no room now, or has not written the file yet."""


class ReceivedMetadata:
    """The manifest and the index of a peer's checkpoint as they were received, as a `Source` of the format.

    texts: the received files by name.
    """

    def __init__(self, origin: PeerSource, name: str, texts: Mapping[str, bytes]) -> None:
        self._origin, self._name, self._texts = origin, name, texts

    @property
    def name(self) -> str:
        """The checkpoint's own name."""
        return self._name

    def place(self, file: str = "") -> str:
        """The URL of a file, or of the checkpoint, for messages."""
        return f"{self._origin.url}/{self._name}{'/' if file else ''}{file}"

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return a received file, at most its first `at_most` bytes."""
        return self._texts[file][:at_most]

    def size(self, file: str) -> int:
        """Return the size of a received file in bytes."""
        return len(self._texts[file])

    def open(self, file: str) -> RangedFile:
        """Raise FileNotFoundError, for data files are fetched in blocks and from several peers."""
        raise FileNotFoundError(file)


class ServedState:
    """One state at one peer, read over HTTP(S). Thread-safe.

    digest: names the state.
    stall_s: seconds without a byte after which a request fails.
    """

    def __init__(self, origin: PeerSource, digest: str, trust: Trust, *, stall_s: float = STALL_S) -> None:
        self.origin, self._digest = origin, digest
        self._pool = _pool(origin, trust)
        timeout = urllib3.Timeout(connect=min(CONNECT_S, stall_s), read=stall_s)
        headers = {} if trust.has_certificates else {"Authorization": f"Bearer {trust.token.hex()}"}
        self._timeout, self._headers = timeout, headers
        self.name = ""

    def read_description(self) -> None:
        """Ask for the checkpoint's name. Raises SourceFailed when the peer fails or lacks this state, and
        NotYetServed when it has no room now.
        """
        content = self._read("", at_most=_ABOUT_BYTES_AT_MOST)
        try:
            name = json.loads(content)["name"]
        except (ValueError, KeyError, TypeError) as error:
            raise SourceFailed("it does not say what it serves") from error
        if not isinstance(name, str) or parse_name(name) is None:
            raise SourceFailed(f"{name!r} is no name of a checkpoint"[:200])
        self.name = name

    def content(self, file: str, *, at_most: int, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
        """Return a whole file. Raises SourceFailed, also when the file is longer than `at_most` bytes.

        is_wanted: called as bytes come; the reading fails when it returns False.
        """
        return self._read(file, at_most=at_most, is_wanted=is_wanted)

    def size(self, file: str) -> int:
        """Return a file's size in bytes, as the peer reports it. Raises SourceFailed and NotYetServed."""
        response = self._ask(file, {}, method="HEAD")
        length = response.headers.get("Content-Length", "")
        response.close()
        if response.status == 404:
            raise SourceFailed("it has not this file (any more)")
        if response.status == 503:
            raise NotYetServed("it has not written this file yet, or has no room")
        if response.status != 200 or not length.isdecimal() or len(length) > 18:
            raise SourceFailed(f"it answers {response.status}")
        return int(length)

    def fetch_range(
        self,
        file: str,
        view: memoryview,
        *,
        begin: int,
        until: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Fill the view with the bytes of the file from offset `begin` on. Raises SourceFailed, NotYetServed.

        Returns False if the bytes were no longer wanted before they had all come. Then the connection is
        closed, so that the peer sends no more of them.

        until: the time.monotonic() at which the request fails.
        is_wanted: called as bytes come, at most _READ_BYTES at a time.
        """
        last = begin + len(view) - 1
        response = self._ask(file, {"Range": f"bytes={begin}-{last}"})
        try:
            if response.status == 503:
                raise NotYetServed("it has no room now")
            if response.status != 206 or response.headers.get("Content-Length") != str(len(view)):
                raise SourceFailed(f"it answers {response.status} to a range")
            is_whole = _read_into(response, view, until=until, is_wanted=is_wanted)
        except BaseException:
            response.close()
            raise
        if not is_whole:
            response.close()
        response.release_conn()
        return is_whole

    def close(self) -> None:
        """Close the connections to the peer."""
        self._pool.close()

    def _read(self, file: str, *, at_most: int, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
        response = self._ask(file, {})
        try:
            if response.status == 404:
                raise SourceFailed("it has not this state (any more)")
            if response.status == 503:
                raise NotYetServed("it has no room now")
            length = response.headers.get("Content-Length", "")
            if response.status != 200 or not length.isdecimal() or len(length) > 18:
                raise SourceFailed(f"it answers {response.status}")
            if int(length) > at_most:
                raise SourceFailed(f"{file or 'its answer'} would have {int(length):,} bytes")
            content = bytearray(int(length))
            until = time.monotonic() + 600.0 * (1 + len(content) / (1 << 30))
            if not _read_into(response, memoryview(content), until=until, is_wanted=is_wanted):
                raise SourceFailed(f"{file or 'its answer'} came too slowly, or is not wanted any more")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return bytes(content)

    def _ask(self, file: str, headers: dict[str, str], *, method: str = "GET") -> urllib3.BaseHTTPResponse:
        path = f"{PREFIX}{self._digest}{'/' if file else ''}{file}"
        try:
            return self._pool.urlopen(
                method,
                path,
                headers={**self._headers, **headers},
                timeout=self._timeout,
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except (HTTPError, OSError) as error:
            raise SourceLost(_said(error)) from error


def _read_into(
    response: urllib3.BaseHTTPResponse,
    view: memoryview,
    *,
    until: float,
    is_wanted: Callable[[], bool] = lambda: True,
) -> bool:
    """Fill the view; returns False if its content was no longer wanted before. Raises SourceFailed."""
    filled = 0
    try:
        while filled < len(view):
            if not is_wanted():
                return False
            # `read` would wait for all these bytes, however slowly they come, and the deadline with it.
            piece = response.read1(min(_READ_BYTES, len(view) - filled))
            if not piece:
                raise SourceLost("it ended too early")
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
            if time.monotonic() > until:
                raise SourceFailed("it is too slow")
    except HTTPError as error:
        raise SourceLost(_said(error)) from error
    return True


def _pool(origin: PeerSource, trust: Trust) -> urllib3.HTTPConnectionPool:
    host, port = _place(origin, "https" if trust.has_certificates else "http")
    pool: urllib3.HTTPConnectionPool
    if trust.to_dial is None:
        pool = urllib3.HTTPConnectionPool(host, port, maxsize=8)
        pool.ConnectionCls = _plain_connection(origin, host, trust)
    else:
        pool = urllib3.HTTPSConnectionPool(
            host, port, maxsize=8, ssl_context=trust.to_dial, assert_hostname=False
        )
        pool.ConnectionCls = _known_connection(origin, host, trust)
    return pool


def _place(origin: PeerSource, scheme: str) -> tuple[str, int]:
    """Return the host and port to dial; names that nobody has for a peer that cannot be dialled."""
    if origin.url == THROUGH_RELAY:
        return _NO_HOST, 443
    try:
        url = urllib3.util.parse_url(origin.url)
    except HTTPError as error:
        raise PeerError(f"{origin.peer} says it serves at {origin.url!r}") from error
    if url.scheme != scheme or not url.host or not url.port or url.path not in (None, "", "/"):
        raise PeerError(f"{origin.peer} says it serves at {origin.url!r}, which is no {scheme}://HOST:PORT")
    return url.host.strip("[]"), url.port


class _Way:
    """How a peer is reached: at its address, or through a relay where it has none or that does not answer."""

    def __init__(self, origin: PeerSource, host: str, trust: Trust) -> None:
        self._reach = origin.reach
        self._has_address = origin.url != THROUGH_RELAY and (trust.dials_loopback or not is_loopback(host))
        self._is_direct = self._has_address

    def connect(self, dial: Callable[[], socket.socket]) -> socket.socket:
        """Return a connection to the peer. Raises OSError and what `dial` raises, which dials its address."""
        why = "it cannot be dialled"
        if self._is_direct:
            try:
                return dial()
            except HTTPError as error:
                if self._reach is None:
                    raise
                why = str(error)
        self._is_direct = self._has_address  # the address is tried again, unless there is another way
        try:
            if self._reach is None:
                raise OSError(why)
            connection = self._reach()
        except PeerRefused as error:
            raise OSError(f"{why}; {error}") from error
        self._is_direct = False
        connection.settimeout(STALL_S)
        return connection


@contextmanager
def _head_in_time(connection: socket.socket) -> Iterator[None]:
    """End the connection if the block takes longer than HEAD_S: a peer may send a head byte by byte."""

    def end() -> None:
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # of TLS, too, which others use meanwhile

    timer = threading.Timer(HEAD_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _plain_connection(origin: PeerSource, host: str, trust: Trust) -> type[HTTPConnection]:
    way = _Way(origin, host, trust)

    class OnLoopback(HTTPConnection):
        """A connection to this machine, for without certificates other machines are not trusted."""

        def _new_conn(self) -> socket.socket:
            connect = super()._new_conn
            return way.connect(lambda: connect_by_name(self, connect))

        def connect(self) -> None:
            super().connect()
            try:
                trust.check_address(str(self.sock.getpeername()[0]))
            except PeerRefused as error:
                self.close()
                raise OSError(str(error)) from error

        def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # as in urllib3
            with _head_in_time(self.sock):
                return super().getresponse()

    return OnLoopback


def _known_connection(origin: PeerSource, host: str, trust: Trust) -> type[HTTPSConnection]:
    way = _Way(origin, host, trust)

    class OfPeer(HTTPSConnection):
        """A connection that requires the certificate of the peer that was dialled."""

        def _new_conn(self) -> socket.socket:
            connect = super()._new_conn
            return way.connect(lambda: connect_by_name(self, connect))

        def connect(self) -> None:
            super().connect()
            assert isinstance(self.sock, ssl.SSLSocket | socket.socket)
            try:
                trust.check_certificate(self.sock)
                check_names(self.sock, origin.peer)  # type: ignore[arg-type]  # HTTPSConnection wraps with ssl
            except PeerRefused as error:
                self.close()
                raise OSError(str(error)) from error

        def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # as in urllib3
            with _head_in_time(self.sock):
                return super().getresponse()

    return OfPeer


def _said(error: Exception) -> str:
    cause = error.__cause__ or error.__context__ or error
    return str(cause)[:300] or type(error).__name__
