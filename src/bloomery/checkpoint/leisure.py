"""How a writer leaves the processors to what computes beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SHARE = 1 / 128
"""Of the processors that a rank has, for its writer. Steps beside it are slower by more than that: they wait
for the slowest of their threads."""
_LONGEST_S = 0.15
"""Of a pause: with the few megabytes between two, well above what is taken for a stuck disk (`deadlines`)."""
_LOOK_S = 0.02


class Leisure:
    """Keeps this process to its share of the processors, by pauses, until it is hurried."""

    def __init__(self, is_hurried: Callable[[], bool]) -> None:
        self._is_hurried = is_hurried
        self._share = _SHARE * processors_of_a_rank()
        self._begun_s, self._used_s = time.monotonic(), time.process_time()

    def rest(self) -> None:
        """Pause for what was computed beyond the share since the last pause."""
        due_s = (time.process_time() - self._used_s) / self._share
        end = min(self._begun_s + due_s, time.monotonic() + _LONGEST_S)
        while (left_s := end - time.monotonic()) > 0 and not self._is_hurried():
            time.sleep(min(left_s, _LOOK_S))
        self._begun_s, self._used_s = time.monotonic(), time.process_time()


def processors_of_a_rank() -> float:
    """Return how many processors of this machine fall to each of its ranks."""
    return len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
