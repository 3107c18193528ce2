"""One authenticated connection to a ring neighbour, which both ends agree to use in one attempt of a round.

Also learns from the losses of each exchange how fast a hop, which is all connections to a member, may send.

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
    """A peer, and where others can connect to it.

    incarnation: the random name of its process. addresses: each 'host:port'; () if it cannot be dialled.
    """

    peer: str
    incarnation: str
    addresses: tuple[str, ...]


class ConnectionPlace(NamedTuple):
    """Identifies one of a rank's connections to its neighbours in the ring.

    peer, incarnation: the neighbour's name, and which life of that peer it is.
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


_LOSSY = 0.005
"""An all_reduce was too fast if more than this share of the delivered bytes was retransmitted."""
_FIRST, _LOWER, _SLOWER = 1.1, 0.94, 0.8
"""_FIRST: the first limit, as a multiple of the best rate of its round. _LOWER: the limit after a loss, as a
share of the one before. _SLOWER: if the best rate of a round with losses is below this share of the limit,
the link has become slower, and learning starts again."""
_HIGHER, _DOUBLES, _NEAR = 0.03, 4, 0.8
"""_HIGHER: growth of the limit after a round without loss, doubled after each `_DOUBLES` such rounds. _NEAR:
share of the limit that the round's best rate must have reached for that."""
_BRIEF_S = 0.5
"""An all_reduce shorter than this is too short to measure a rate, seconds."""


@dataclass(frozen=True, kw_only=True)
class DeliveryStatistics:
    """TCP statistics of one all_reduce on the hop to the next member; all 0 if the kernel gives none.

    seconds: how long the all_reduce took.
    delivered_bytes: acknowledged segments times their mean size.
    lost_bytes: retransmitted.
    best_bytes_s: rate in the best quarter of a second.
    """

    seconds: float
    delivered_bytes: int
    lost_bytes: int
    best_bytes_s: float


class HopRateLimit:
    """The send rate limit of one hop. It is kept between rings, and learns from each all_reduce.

    Several TCP streams that probe a link together overshoot its rate and lose segments together, and each
    loss costs a round trip. A limit close to the rate of the link is faster (figures: docs/notes/ring.md).
    The limit goes down by a small step after a round with losses, and up after one without. A link without
    losses never gets a learnt limit. A limit never falls below the mean rate that was reached.
    """

    def __init__(self, most_bytes_s: float | None = None) -> None:
        """most_bytes_s: upper bound of the limit, bytes per second; None: no bound."""
        self._most = most_bytes_s
        self._learnt: float | None = None
        self._reached, self._clean = 0.0, 0

    @property
    def limit_bytes_s(self) -> float | None:
        """The limit for the next all_reduce, bytes per second; None: no limit."""
        limits = [limit for limit in (self._most, self._learnt) if limit is not None]
        return min(limits, default=None)

    def learn(self, delivery: DeliveryStatistics) -> None:
        """Adjust the limit. Call this after each all_reduce that succeeded."""
        if delivery.seconds < _BRIEF_S or delivery.best_bytes_s <= 0:
            return
        mean_bytes_s = delivery.delivered_bytes / delivery.seconds
        self._reached = max(self._reached, mean_bytes_s)
        is_lossy = delivery.lost_bytes > _LOSSY * delivery.delivered_bytes
        if is_lossy and (self._learnt is None or delivery.best_bytes_s < _SLOWER * self._learnt):
            self._learnt, self._reached, self._clean = _FIRST * delivery.best_bytes_s, mean_bytes_s, 0
        elif is_lossy:
            assert self._learnt is not None
            self._learnt, self._clean = max(_LOWER * self._learnt, self._reached), 0
        elif self._learnt is not None and delivery.best_bytes_s > _NEAR * self._learnt:
            self._learnt *= 1 + _HIGHER * 2 ** (self._clean // _DOUBLES)
            self._clean += 1
