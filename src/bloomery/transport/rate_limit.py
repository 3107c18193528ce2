"""Shares one limit, in bytes a second, among all connections on which a peer serves its state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
