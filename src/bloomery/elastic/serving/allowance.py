"""So many bytes a second, shared by all who send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_PIECE_BYTES = 1 << 20
_AHEAD_S = 0.1
"""What may be sent at once after a pause."""


class Allowance:
    """bytes_s: 0 for no limit. Thread-safe: who asks first sends first."""

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
        """What to send at a time, so that several who send come by turns without long pauses."""
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
