"""Limits a writer process to its share of the processors, so that the training keeps them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SHARE = 1 / 128
"""The fraction of a rank's processors that its writer uses. A step slows down by more than this fraction,
because it waits for the slowest of its threads."""
_LONGEST_PAUSE_S = 0.15
"""With a few megabytes between pauses, the rate stays well above `deadlines.SLOWEST_BYTES_PER_S`."""
_POLL_URGENT_S = 0.02


class CpuThrottle:
    """Limits this process to its share of the processors, by pauses, while its work is not urgent."""

    def __init__(self, is_urgent: Callable[[], bool]) -> None:
        self._is_urgent = is_urgent
        self._share = _SHARE * processors_of_a_rank()
        self._begun_s, self._used_s = time.monotonic(), time.process_time()

    def rest(self) -> None:
        """Pause until the processor time used since the last pause is within the share again."""
        due_s = (time.process_time() - self._used_s) / self._share
        end = min(self._begun_s + due_s, time.monotonic() + _LONGEST_PAUSE_S)
        while (left_s := end - time.monotonic()) > 0 and not self._is_urgent():
            time.sleep(min(left_s, _POLL_URGENT_S))
        self._begun_s, self._used_s = time.monotonic(), time.process_time()


def processors_of_a_rank() -> float:
    """Return how many of this machine's processors each of its ranks has."""
    return len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
