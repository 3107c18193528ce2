"""Limits how fast a peer sends: to the next member of a ring, by losses, and to all that fetch its state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_LOSSY = 0.005
"""An all_reduce was too fast if more than this share of the delivered bytes was retransmitted."""
_BEGIN, _LOWER, _SLOWER = 1.1, 0.94, 0.8
"""_BEGIN: the first limit, as a multiple of the best rate of its round. _LOWER: the limit after a loss, as a
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
            self._learnt, self._reached, self._clean = _BEGIN * delivery.best_bytes_s, mean_bytes_s, 0
        elif is_lossy:
            assert self._learnt is not None
            self._learnt, self._clean = max(_LOWER * self._learnt, self._reached), 0
        elif self._learnt is not None and delivery.best_bytes_s > _NEAR * self._learnt:
            self._learnt *= 1 + _HIGHER * 2 ** (self._clean // _DOUBLES)
            self._clean += 1


_PIECE_BYTES = 1 << 20
_AHEAD_S = 0.1
"""After a pause, what the limit allows in so many seconds may be sent at once."""


class RateLimiter:
    """Limits the bytes sent in a second by all threads together. Thread-safe; callers are served in order.

    bytes_s: the limit in bytes a second; 0: no limit.
    clock, sleep: replaced by tests.
    """

    def __init__(
        self,
        bytes_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s, self._clock, self._sleep = bytes_s, clock, sleep
        self._lock = threading.Lock()
        self._paid_until = clock() - _AHEAD_S

    @property
    def piece_bytes(self) -> int:
        """The bytes to send at a time, so few that several senders take turns without long pauses."""
        return (
            int(min(_PIECE_BYTES, max(_PIECE_BYTES / 16, self._bytes_s / 4)))
            if self._bytes_s
            else _PIECE_BYTES
        )

    def take(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        if not self._bytes_s:
            return
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - _AHEAD_S) + count / self._bytes_s
            wait_s = self._paid_until - now
        if wait_s > 0:
            self._sleep(wait_s)
