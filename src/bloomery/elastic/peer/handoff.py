"""The socket between a peer's parent and its ranks: messages, and connected descriptors along with them.

A Unix socket of whole messages (SOCK_SEQPACKET) in a directory that only this user may enter. When a rank
dies the kernel closes its end, so the parent knows within a millisecond, without asking.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.elastic.peer.messages import (
    MAX_BYTES,
    MAX_DESCRIPTORS,
    Hello,
    Said,
    decode,
    descriptors_of,
    encode,
)
from bloomery.elastic.seam import Told
from bloomery.errors import PeerError

log = logging.getLogger(__name__)

PARENT = "BLOOMERY_PARENT"
"""Environment variable: path of the parent's socket."""

_LISTEN, _WAKE = "listen", "wake"
_MAX_UNSENT = 10_000
_MAX_RANKS = 1024
_PREFIX = "bloomery-peer-"
_YOUNG_S = 60.0
"""A directory so young may not be held yet by who made it."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What a rank said. The first of each is its `Hello`."""

    rank: int
    message: Said


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A rank's end of the socket is closed: it ended, was killed, or talked nonsense."""

    rank: int
    why: str


@dataclass(eq=False)
class _RankEnd:
    """The parent's end of one rank's connection. rank: -1 until its Hello."""

    socket: socket.socket
    rank: int = -1
    unsent: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)


class Handoff:
    """The parent's side. `hear` is called on a thread of this object, one event at a time."""

    def __init__(self, hear: Callable[[Heard | Gone], None]) -> None:
        self._hear = hear
        remove_abandoned(Path(tempfile.gettempdir()))
        self._directory = tempfile.TemporaryDirectory(prefix=_PREFIX)  # mode 0700
        self._held: int | None = None
        with suppress(OSError):  # a file system without locks; there nothing is removed, either
            self._held = _lock(self._directory.name)
        self.path = Path(self._directory.name) / "parent"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(_MAX_RANKS)
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._dropped = threading.Condition(self._lock)
        self._ends: list[_RankEnd] = []
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, _LISTEN)
        self._selector.register(self._woken, selectors.EVENT_READ, _WAKE)
        self._thread = threading.Thread(target=self._serve, name="handoff", daemon=True)
        self._thread.start()

    def tell(self, message: Told, *, rank: int | None = None) -> None:
        """Send to one rank, or to all that said Hello. Never waits; descriptors stay the caller's."""
        content, descriptors = encode(message), descriptors_of(message)
        with self._lock:
            for end in self._ends:
                if end.rank >= 0 and rank in (None, end.rank):
                    end.unsent.append((content, tuple(os.dup(fd) for fd in descriptors)))
        self._wake.send(b".")

    def until_gone(self, timeout_s: float) -> None:
        """Wait until every rank's end is closed, and all that it said is heard; at most so long."""
        with self._dropped:
            self._dropped.wait_for(lambda: all(end.rank < 0 for end in self._ends), timeout_s)

    def close(self) -> None:
        """Close all ends; what was told is sent first, where ranks read. They then see their parent gone."""
        with self._lock:
            self._closing = True
        with suppress(OSError):
            self._wake.send(b".")
        self._thread.join(10.0)
        self._directory.cleanup()
        if self._held is not None:
            os.close(self._held)

    def __enter__(self) -> Handoff:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.data == _LISTEN:
                    self._accept()
                elif key.data == _WAKE:
                    self._woken.recv(4096)
                else:
                    if events & selectors.EVENT_READ:
                        self._receive(key.data)
                    if events & selectors.EVENT_WRITE:
                        self._send(key.data)
            for end in self._living():
                self._send(end)
            if self._closing:
                break
        for end in self._living():
            self._drop(end)
        for opened in (self._listener, self._woken, self._wake, self._selector):
            opened.close()

    def _living(self) -> list[_RankEnd]:
        with self._lock:
            return list(self._ends)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        process, user, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if user != os.getuid():
            log.warning("process %d of user %d wanted to be a rank of this peer: refused", process, user)
            connection.close()
            return
        connection.settimeout(0.0)
        end = _RankEnd(connection)
        with self._lock:
            self._ends.append(end)
        self._selector.register(connection, selectors.EVENT_READ, end)

    def _receive(self, end: _RankEnd) -> None:
        try:
            content, descriptors = receive_message(end.socket)
        except (BlockingIOError, ConnectionResetError):
            return  # told once, when it closed with messages unread; what it said before comes next
        except (OSError, PeerError) as error:
            self._drop(end, why=str(error))
            return
        if not content:
            self._drop(end, why="it ended")
            return
        try:
            message = _said(content, descriptors, is_first=end.rank < 0)
        except PeerError as error:
            close_all(descriptors)
            self._drop(end, why=str(error))
            return
        if isinstance(message, Hello):
            with self._lock:
                end.rank = message.rank
        self._hear(Heard(rank=end.rank, message=message))

    def _send(self, end: _RankEnd) -> None:
        blocked = False
        while end.unsent and not blocked:
            content, descriptors = end.unsent[0]
            try:
                socket.send_fds(end.socket, [content], list(descriptors))
            except BlockingIOError:
                blocked = True
                continue
            except OSError:
                self._forget_unsent(end)  # it ended; what it said before is still to be read
                return
            with self._lock:
                end.unsent.popleft()
            close_all(descriptors)
        if len(end.unsent) > _MAX_UNSENT:
            self._drop(end, why=f"{len(end.unsent)} messages wait for it")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
        if end in self._living():
            self._selector.modify(end.socket, wanted, end)

    def _forget_unsent(self, end: _RankEnd) -> None:
        with self._lock:
            unsent = list(end.unsent)
            end.unsent.clear()
        for _, descriptors in unsent:
            close_all(descriptors)

    def _drop(self, end: _RankEnd, *, why: str = "") -> None:
        if end not in self._living():
            return
        self._selector.unregister(end.socket)
        end.socket.close()
        if why and end.rank >= 0:
            self._hear(Gone(rank=end.rank, why=why))
        elif why:
            log.warning("a process that wanted to be a rank was sent away: %s", why)
        with self._dropped:  # last, so that who finds it gone has been told
            self._ends.remove(end)
            self._dropped.notify_all()
        self._forget_unsent(end)


def remove_abandoned(directory: Path) -> None:
    """Remove what parents left that were killed: directories of this user that nobody holds any more."""
    for left in directory.glob(f"{_PREFIX}*"):
        try:
            about = left.lstat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < _YOUNG_S:
                continue
            held = _lock(str(left))
        except OSError:  # somebody holds it, or removed it meanwhile
            continue
        shutil.rmtree(left, ignore_errors=True)
        os.close(held)


def _lock(directory: str) -> int:
    """Hold a directory as long as the descriptor is open. Raises OSError where another process does."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def _said(content: bytes, descriptors: list[int], *, is_first: bool) -> Said:
    message = decode(content, descriptors)
    if not isinstance(message, Said) or is_first != isinstance(message, Hello):
        raise PeerError(f"A rank that says {type(message).__name__}: out of turn.")
    return message


def receive_message(connection: socket.socket, *, wait: bool = False) -> tuple[bytes, list[int]]:
    """One message and its descriptors; b"" at the end. BlockingIOError: there is none now, and no waiting."""
    # Not socket.recv_fds: it forgets the flags it is given.
    content, ancillary, flags, _ = connection.recvmsg(
        MAX_BYTES + 1,
        socket.CMSG_SPACE(4 * MAX_DESCRIPTORS),
        socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT),
    )
    found = array("i")
    for level, kind, carried in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(carried[: len(carried) - len(carried) % found.itemsize])
    descriptors = found.tolist()
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(content) > MAX_BYTES:
        close_all(descriptors)
        raise PeerError(f"A message longer than {MAX_BYTES} bytes between parent and rank.")
    return content, descriptors


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that nobody wants any more."""
    for fd in descriptors:
        os.close(fd)
