"""One authenticated connection to a ring neighbour, and how both ends agree to use it for another round."""

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


class Place(NamedTuple):
    """Where a connection belongs. sends: this peer sends on it, the other one receives."""

    peer: str
    incarnation: str
    lane: int
    stream: int
    sends: bool


@dataclass(eq=False)
class Connection:
    """A connection, and what was said on it since it was last used.

    dialled: by this peer. said, heard: epochs for which this end and the other want to use it; 0: none.
    used: the epoch whose ring has it now; 0: none, it is idle.
    """

    place: Place
    connection: socket.socket
    key: bytes
    way: str
    since: float = field(default_factory=time.monotonic)
    said: int = 0
    said_at: float = 0.0
    heard: int = 0
    used: int = 0
    _received: bytearray = field(default_factory=bytearray)

    @property
    def is_agreed(self) -> bool:
        """Whether both ends want it for the same attempt."""
        return self.said == self.heard and self.said > 0

    def say_begin(self, epoch: int) -> None:
        """Tell the other end that this connection is to serve `epoch`. OSError: it is broken."""
        code = proof(self.key, _role(sends=self.place.sends), epoch.to_bytes(8, "big"))[:_PROOF_BYTES]
        message = _BEGIN.pack(_WORD, epoch, code)
        if self.connection.send(message) != len(message):
            raise BrokenPipeError("a connection that was idle takes no bytes")
        self.said, self.said_at = epoch, time.monotonic()

    def hear_begin(self) -> bool:
        """Read what came and no byte of what follows; whether it is whole. Refused, OSError: it is broken."""
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
        known = proof(self.key, _role(sends=not self.place.sends), epoch.to_bytes(8, "big"))[:_PROOF_BYTES]
        if word != _WORD or not hmac.compare_digest(code, known):
            raise PeerRefused("bytes that nobody of this run wrote")
        if epoch < self.heard:
            raise PeerRefused(f"epoch {epoch} after epoch {self.heard}: replayed")
        self.heard = epoch
        return True

    def rest(self) -> None:
        """Its ring is over, and went well: idle again. Later attempts have larger epochs."""
        self.used = 0


def _role(*, sends: bool) -> bytes:
    return b"begin, sender" if sends else b"begin, receiver"
