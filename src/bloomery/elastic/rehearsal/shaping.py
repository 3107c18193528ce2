"""When a byte arrives: rate, delay, loss and faults of one direction of a link, as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

SEGMENT_BYTES = 1448
"""What one lost packet takes with it: a TCP segment at MTU 1500."""
LEAST_RETRANSMISSION_S = 0.2
"""Linux's least retransmission timeout."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A link. rate: bytes a second, 0: no limit. delay: seconds one way. loss: share of packets, 0 to 1."""

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.rate < 0 or self.delay < 0 or not 0 <= self.loss < 1:
            raise ValueError(f"not a link: {self}")


class Pipe:
    """One direction of a host's link, shared by all connections through it. Bytes leave in order.

    A lost segment costs its connection's chunk a retransmission timeout, and delays what is behind it as
    TCP's ordered delivery does; congestion control is that of the real sockets at both ends.
    """

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        self.shape = shape
        self.bytes = 0
        self._random = Random(seed)
        self._free_at = 0.0
        self._blocked_until = 0.0
        self._extra_delay = 0.0
        self._extra_until = 0.0
        self._corruptions = 0

    def arrival(self, size: int, *, now: float) -> float:
        """When the last of `size` bytes, offered at `now`, is delivered."""
        shape = self.shape
        start = max(now, self._free_at, self._blocked_until)
        self._free_at = start + (size / shape.rate if shape.rate else 0.0)
        self.bytes += size
        delay = shape.delay + (self._extra_delay if now < self._extra_until else 0.0)
        return self._free_at + delay + self._lost_s(size)

    def cut(self, until: float) -> None:
        """Deliver nothing before `until`; nobody is told, as when a cable is out."""
        self._blocked_until = max(self._blocked_until, until)

    def slow(self, seconds: float, *, until: float) -> None:
        """Delay everything by `seconds` more until `until`."""
        self._extra_delay, self._extra_until = seconds, until

    def corrupt_next(self) -> None:
        """Flip a bit of what comes next."""
        self._corruptions += 1

    def spoil(self, chunk: bytes) -> bytes:
        """The chunk as it arrives."""
        if not self._corruptions or not chunk:
            return chunk
        self._corruptions -= 1
        spoilt = bytearray(chunk)
        spoilt[self._random.randrange(len(spoilt))] ^= 1 << self._random.randrange(8)
        return bytes(spoilt)

    def _lost_s(self, size: int) -> float:
        if not self.shape.loss:
            return 0.0
        segments = -(-size // SEGMENT_BYTES)
        if self._random.random() < (1 - self.shape.loss) ** segments:
            return 0.0
        # A segment lost among many is seen by the acknowledgements behind it; a last one by the timer.
        round_trip = 2 * self.shape.delay
        return round_trip if segments > 3 else max(LEAST_RETRANSMISSION_S, 2 * round_trip)
