"""A rank's end of the socket to its parent: `connect_parent` gives what `seam.Parent` describes."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from bloomery.elastic.peer.handoff import PARENT, close_all, receive_message
from bloomery.elastic.peer.messages import (
    Heeded,
    Hello,
    Holding,
    Leave,
    Moving,
    RingDone,
    RingFailed,
    Said,
    decode,
    encode,
)
from bloomery.elastic.records import Ready
from bloomery.elastic.seam import Abort, Told
from bloomery.errors import PeerError

_SEND_S = 60
"""A parent that takes nothing for so long is as good as dead."""

_REMEDY = "See the parent's last lines; the same command starts the peer again, and it joins the others."


def connect_parent(*, rank: int, world: int, path: Path | None = None) -> ParentLink:
    """Connect to the parent that started this rank. rank, world: within this peer.

    path: of its socket; by default what BLOOMERY_PARENT says. PeerError: there is none, or it is not ours.
    """
    place = path or Path(os.environ.get(PARENT, ""))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(place))
    except OSError as error:
        connection.close()
        raise PeerError(
            f"No parent listens at {PARENT}={place}: {error.strerror}.", remedy=_REMEDY
        ) from error
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user not in (os.getuid(), 0):
        connection.close()
        raise PeerError(f"The process at {PARENT}={place} belongs to another user.", remedy=_REMEDY)
    link = ParentLink(connection)
    link.say(Hello(rank=rank, world=world, process=os.getpid()))
    return link


class ParentLink:
    """The parent as a rank sees it; `seam.Parent` has the contract. Any thread may say; one hears."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._unheard: deque[Told] = deque()
        self._sending = threading.Lock()
        self._hearing = threading.Lock()

    def moving(self, phase: str, *, step: int) -> None:
        """Say what this rank is doing."""
        self.say(Moving(phase=phase, step=step))

    def holding(self, *, round: int, digest: str, step: int, directory: Path | None, samples: int) -> None:
        """Say which state is held now."""
        self.say(Holding(round=round, digest=digest, step=step, directory=directory, samples=samples))

    def ready(self, ready: Ready) -> None:
        """Offer this peer's part of a round."""
        self.say(ready)

    def done(self, *, epoch: int, digest: str) -> None:
        """The ring of this epoch completed."""
        self.say(RingDone(epoch=epoch, digest=digest))

    def failed(self, *, epoch: int, kind: str, culprit: str | None, why: str) -> None:
        """The ring of this epoch failed."""
        self.say(RingFailed(epoch=epoch, kind=kind, culprit=culprit, why=why))

    def leave(self, why: str) -> None:
        """Go, by intention."""
        self.say(Leave(why=why))

    def hear(self, timeout_s: float) -> Told | None:
        """The next thing the parent says; None when there was none in time."""
        with self._hearing:
            if not self._unheard and self._poll.poll(max(0.0, timeout_s) * 1000.0):
                self._take()
            return self._unheard.popleft() if self._unheard else None

    def peek(self) -> Sequence[Told]:
        """What was said and not heard yet; `hear` gives it again."""
        with self._hearing:
            while self._poll.poll(0):
                self._take()
            return tuple(self._unheard)

    def say(self, message: Said) -> None:
        """Send one message. PeerError: the parent is gone."""
        try:
            with self._sending:
                self._socket.send(encode(message))
        except OSError as error:
            raise PeerError(f"The parent of this rank is gone ({error.strerror}).", remedy=_REMEDY) from error

    def close(self) -> None:
        """End the connection: to the parent, this rank is gone."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self) -> None:
        """Receive one message into `_unheard`, if there is one."""
        try:
            content, descriptors = receive_message(self._socket)
        except (BlockingIOError, ConnectionResetError):
            return  # told once, when the parent closed with messages unread; what it said before comes next
        except OSError as error:
            raise PeerError(f"The parent of this rank is gone ({error.strerror}).", remedy=_REMEDY) from error
        if not content:
            raise PeerError("The parent of this rank is gone.", remedy=_REMEDY)
        try:
            told = cast(Told, decode(content, descriptors))
        except PeerError:
            close_all(descriptors)
            raise
        self._unheard.append(told)
        if isinstance(told, Abort):  # so that the parent knows a rank that moves from one that does not
            self.say(Heeded(epoch=told.epoch))
