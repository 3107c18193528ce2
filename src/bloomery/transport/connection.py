"""One authenticated connection to a ring neighbour, and how both ends agree to use it for an attempt.

`Contact` says where a peer can be dialled.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from bloomery.transport.trust import PeerRefused, proof

_BEGIN = struct.Struct(">4sQ20s")
_WORD = b"blom"
_PROOF_BYTES = 20


@dataclass(frozen=True, kw_only=True)
class Contact:
    """The addresses at which a peer can be dialled."""

    peer: str
    incarnation: str
    addresses: tuple[str, ...]


class ConnectionPlace(NamedTuple):
    """Which of the ring's connections this is.

    peer, incarnation: the neighbour, and its life.
    rank: the rank within the peer.
    stream: the number of the connection among those of the same rank.
    sends: whether this peer sends on it and the neighbour receives; else the other way round.
    """

    peer: str
    incarnation: str
    rank: int
    stream: int
    sends: bool


@dataclass(eq=False)
class Connection:
    """A connection, and for which attempts both ends want to use it.

    key: authenticates its messages and frames.
    way: how it was made: dialled, accepted or relayed.
    since: when it was made, by the local monotonic clock, seconds.
    sent_epoch: the epoch of the newest attempt for which this end asked to use it; 0: none.
    sent_at: when this end asked, by the local monotonic clock, seconds.
    received_epoch: the epoch of the newest attempt for which the other end asked to use it; 0: none.
    used: the epoch of the attempt whose ring uses it now; 0: it is idle.
    """

    place: ConnectionPlace
    connection: socket.socket
    key: bytes
    way: str
    since: float = field(default_factory=time.monotonic)
    sent_epoch: int = 0
    sent_at: float = 0.0
    received_epoch: int = 0
    used: int = 0
    _received: bytearray = field(default_factory=bytearray)

    @property
    def is_agreed(self) -> bool:
        """Whether both ends asked to use it for the same attempt."""
        return self.sent_epoch == self.received_epoch and self.sent_epoch > 0

    def send_begin(self, epoch: int) -> None:
        """Ask the other end to use this connection for the attempt of `epoch`. OSError: it is broken."""
        code = proof(self.key, _role(sends=self.place.sends), epoch.to_bytes(8, "big"))[:_PROOF_BYTES]
        message = _BEGIN.pack(_WORD, epoch, code)
        if self.connection.send(message) != len(message):
            raise BrokenPipeError("an idle connection accepts no bytes")
        self.sent_epoch, self.sent_at = epoch, time.monotonic()

    def receive_begin(self) -> bool:
        """Read the other end's request for an epoch, and no byte beyond it, which is the ring's to read.

        Returns whether the whole request has come. PeerRefused, OSError: the connection must be closed.
        """
        try:
            piece = self.connection.recv(_BEGIN.size - len(self._received))
        except BlockingIOError:
            return False
        if not piece:
            raise PeerRefused("closed by the other end")
        self._received += piece
        if len(self._received) < _BEGIN.size:
            return False
        word, epoch, code = _BEGIN.unpack(self._received)
        self._received.clear()
        expected = proof(self.key, _role(sends=not self.place.sends), epoch.to_bytes(8, "big"))[:_PROOF_BYTES]
        if word != _WORD or not hmac.compare_digest(code, expected):
            raise PeerRefused("it sent bytes that no peer of this run wrote")
        if epoch < self.received_epoch:
            raise PeerRefused(f"it sent epoch {epoch} after epoch {self.received_epoch}: a replay")
        self.received_epoch = epoch
        return True

    def rest(self) -> None:
        """Mark the connection as idle, after a ring that succeeded. Later attempts have larger epochs."""
        self.used = 0


def _role(*, sends: bool) -> bytes:
    return b"begin, sender" if sends else b"begin, receiver"
