"""A rank's end of the socket to its parent: `connect_parent` gives what `seam.Parent` describes."""

from __future__ import annotations

import os
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
    """The parent as a rank sees it; `seam.Parent` has the contract. Any thread may say, and hear.

    A thread of its own takes in what the parent says, and answers an abort: a rank whose main thread computes
    for seconds (a step of a large model, its outer step) moves, and is not to be left out as one that hangs.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._unheard: deque[Told] = deque()
        self._failure: PeerError | None = None
        self._sending = threading.Lock()
        self._arrived = threading.Condition()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

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
        with self._arrived:
            self._arrived.wait_for(lambda: self._unheard or self._failure, max(0.0, timeout_s))
            if self._unheard:
                return self._unheard.popleft()
            self._raise_failure()
            return None

    def peek(self) -> Sequence[Told]:
        """What was said and not heard yet; `hear` gives it again."""
        with self._arrived:
            if not self._unheard:
                self._raise_failure()
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

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PeerError(self._failure.message, remedy=_REMEDY) from self._failure

    def _listen(self) -> None:
        try:
            while True:
                self._take()
        except PeerError as failure:
            with self._arrived:
                self._failure = failure
                self._arrived.notify_all()

    def _take(self) -> None:
        """Receive one message into `_unheard`. Raises PeerError."""
        try:
            content, descriptors = receive_message(self._socket, wait=True)
        except ConnectionResetError:
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
        if isinstance(told, Abort):  # so that the parent knows a rank that moves from one that does not
            self.say(Heeded(epoch=told.epoch))
        with self._arrived:
            self._unheard.append(told)
            self._arrived.notify_all()
