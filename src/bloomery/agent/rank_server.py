"""Unix socket server between an agent and its ranks: receives messages, sends commands and descriptors.

It is a Unix socket that keeps messages whole (SOCK_SEQPACKET), in a directory that only this user may enter.
When a rank dies the kernel closes its end, so the agent learns of it within a millisecond, without polling.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bloomery.durable import hold_directory, remove_abandoned
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import (
    MAX_BYTES,
    MAX_DESCRIPTORS,
    AgentMessage,
    Hello,
    RankMessage,
    decode_rank_message,
    descriptors_of,
    encode_local,
)

log = logging.getLogger(__name__)

PARENT = "BLOOMERY_PARENT"
"""The environment variable that tells ranks the path of their agent's socket."""

_LISTEN, _WAKE = "listen", "wake"
_MAX_UNSENT = 10_000
_MAX_RANKS = 1024
_PREFIX = "bloomery-peer-"
_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class RankSent:
    """A message that a rank sent. The first message of each rank is its `Hello`."""

    rank: int
    message: RankMessage


@dataclass(frozen=True, kw_only=True)
class RankGone:
    """The connection of a rank is closed: the rank ended, was killed, or sent something invalid."""

    rank: int
    why: str


@dataclass(eq=False)
class _RankEnd:
    """The agent's end of one rank's connection.

    rank: the rank's number; -1 until its Hello has arrived.
    unsent: messages that wait to be sent, each with descriptors, which are closed once they are sent.
    """

    socket: socket.socket
    rank: int = -1
    unsent: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)


class RankServer:
    """Accepts the ranks' connections and serves them on a thread of its own.

    Raises PeerError where the path of its socket cannot be used, as one that is too long.

    Args:
        on_event: called on that thread with each event, one at a time.
    """

    def __init__(self, on_event: Callable[[RankSent | RankGone], None]) -> None:
        self._on_event = on_event
        remove_abandoned(Path(tempfile.gettempdir()), _PREFIX)
        self._directory = tempfile.TemporaryDirectory(prefix=_PREFIX)  # mode 0700
        self.path = Path(self._directory.name) / "parent"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(str(self.path))
        except OSError as error:
            self._listener.close()
            self._directory.cleanup()
            raise PeerError(
                f"Nothing can listen at {self.path} for the ranks of this peer: {error.strerror or error}.",
                remedy="Point TMPDIR to a directory of a shorter path: a socket's has 107 bytes at most.",
            ) from error
        self._held = hold_directory(Path(self._directory.name))
        self._listener.listen(_MAX_RANKS)
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._dropped = threading.Condition(self._lock)
        self._ends: list[_RankEnd] = []
        self._closing = False
        # Whether the last connection found no descriptor left, and when to accept again after such a pause;
        # 0.0: the listener is watched.
        self._is_short, self._accept_again_s = False, 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, _LISTEN)
        self._selector.register(self._woken, selectors.EVENT_READ, _WAKE)
        self._thread = threading.Thread(target=self._serve, name="rank-server", daemon=True)
        self._thread.start()

    def send(self, message: AgentMessage, *, rank: int | None = None) -> None:
        """Queue a message to ranks that have sent their Hello. It never waits for them.

        Raises PeerError if the message has descriptors and no copies can be opened; then no rank gets it.

        message: what is sent. Its descriptors are copied and stay the caller's.
        rank: the one rank to which it is sent; None for all.
        """
        content, descriptors = encode_local(message), descriptors_of(message)
        with self._lock:
            receivers = [end for end in self._ends if end.rank >= 0 and rank in (None, end.rank)]
            for end, copies in zip(receivers, _duplicates(descriptors, times=len(receivers)), strict=True):
                end.unsent.append((content, copies))
        self._wake.send(b".")

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait until all ranks' connections are closed and their messages handled, at most `timeout_s`."""
        with self._dropped:
            self._dropped.wait_for(lambda: all(end.rank < 0 for end in self._ends), timeout_s)

    def close(self) -> None:
        """Close all connections, which tells the ranks that their agent is gone.

        Messages that wait are sent first, as far as the ranks read them.
        """
        with self._lock:
            self._closing = True
        with suppress(OSError):
            self._wake.send(b".")
        self._thread.join(10.0)
        self._directory.cleanup()
        if self._held is not None:
            os.close(self._held)

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._accept_when_due()):
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

    def _accept_when_due(self) -> float | None:
        """Accept again if the pause is over; return how long it still lasts, None if there is none."""
        left_s = self._accept_again_s - time.monotonic()
        if self._accept_again_s == 0.0 or left_s > 0:
            return left_s if left_s > 0 else None
        self._accept_again_s = 0.0
        self._selector.register(self._listener, selectors.EVENT_READ, _LISTEN)
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except ConnectionError:
            return  # the process closed its end before it was accepted
        except OSError as error:  # no descriptor is left: connected ranks are still served
            if not self._is_short:
                log.warning("a rank cannot connect (%s): trying again every %.1f s", error, _PAUSE_S)
            self._is_short = True
            self._selector.unregister(self._listener)
            self._accept_again_s = time.monotonic() + _PAUSE_S
            return
        self._is_short = False
        process, user, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if user != os.getuid():
            log.warning(
                "process %d of user %d connected as a rank of this peer and was refused", process, user
            )
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
            return  # a reset is reported once, if the rank left messages unread; its own messages come next
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
        self._on_event(RankSent(rank=end.rank, message=message))

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
                self._forget_unsent(end)  # the rank ended; its last messages are still to be read
                return
            with self._lock:
                end.unsent.popleft()
            close_all(descriptors)
        if len(end.unsent) > _MAX_UNSENT:
            self._drop(end, why=f"{len(end.unsent)} messages wait to be sent to it")
            return
        watched = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
        if end in self._living():
            self._selector.modify(end.socket, watched, end)

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
            self._on_event(RankGone(rank=end.rank, why=why))
        elif why:
            log.warning("a process that connected as a rank was refused: %s", why)
        with self._dropped:  # last, so that wait_until_gone returns after the event was handled
            self._ends.remove(end)
            self._dropped.notify_all()
        self._forget_unsent(end)


def _duplicates(descriptors: Sequence[int], *, times: int) -> list[tuple[int, ...]]:
    """Return `times` tuples of copies of the descriptors. Raises PeerError, with none left open."""
    duplicates: list[int] = []
    try:
        for fd in [*descriptors] * times:
            duplicates.append(os.dup(fd))
    except OSError as error:
        close_all(duplicates)
        raise PeerError(
            f"{len(descriptors)} connections cannot be handed to a rank: {error.strerror}.",
            remedy="Raise the limit of open files (ulimit -n) of whoever starts this peer.",
        ) from error
    count = len(descriptors)
    return [tuple(duplicates[index * count : (index + 1) * count]) for index in range(times)]


def _said(content: bytes, descriptors: list[int], *, is_first: bool) -> RankMessage:
    message = decode_rank_message(content, descriptors)
    if is_first != isinstance(message, Hello):
        raise PeerError(f"A rank that says {type(message).__name__}: out of turn.")
    return message


def receive_message(connection: socket.socket, *, wait: bool = False) -> tuple[bytes, list[int]]:
    """Return the next message and its descriptors; b"" when the other end is closed.

    Raises BlockingIOError if there is no message now and `wait` is False; PeerError for one that is too long.
    """
    # Not socket.recv_fds, because that ignores the flags that it is given.
    content, ancillary, flags, _ = connection.recvmsg(
        MAX_BYTES + 1,
        socket.CMSG_SPACE(4 * MAX_DESCRIPTORS),
        socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT),
    )
    received = array("i")
    for level, kind, carried in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(carried[: len(carried) - len(carried) % received.itemsize])
    descriptors = received.tolist()
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(content) > MAX_BYTES:
        close_all(descriptors)
        raise PeerError(f"A message longer than {MAX_BYTES} bytes between parent and rank.")
    return content, descriptors


def close_all(descriptors: Iterable[int]) -> None:
    """Close each of these descriptors."""
    for fd in descriptors:
        os.close(fd)
