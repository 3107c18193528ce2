"""The time-outs of a run on one cluster that its ranks and its launcher share, in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

COLLECTIVE_TIMEOUT_S = 600
"""A collective of torch.distributed that one rank does not come to ends with an error after this."""
WATCHDOG_MARGIN_S = 60
"""How much longer NCCL's watchdog waits before it ends a process, so that the rank itself can say why."""
JOIN_TIMEOUT_S = 300.0
"""How long a rank may take to introduce itself: torch loads slowly from a cold disk."""
STORE_TIMEOUT_S = 60.0
"""How long a store may take to answer, on a machine where much else happens."""
RANK_ZERO_SILENCE_S = 600.0
"""The seconds without a status of rank 0's task, such as preparing the data, after which rank 0 is lost."""
RANK_ZERO_STALL_S = 3600.0
"""The seconds without progress or computation after which rank 0 hangs, though it still writes its status."""
GRACE_S = 60.0
"""The seconds that the other ranks may take to save and end once one rank has ended; then they are killed."""
GRACE_AFTER_FAILURE_S = 20.0
"""The same once a rank has failed: the others can no longer save together."""
GRACE_AFTER_SIGNAL_S = 3.0
"""The same once a signal has ended a rank: the others can only notice that it is gone."""


def wait_until(
    is_done: Callable[[], bool], *, within_s: float, pause_s: float = 5e-5, longest_pause_s: float = 2e-3
) -> bool:
    """Ask again and again until `is_done`, for at most `within_s` seconds; return whether it was.

    pause_s: the first pause. It grows to `longest_pause_s`, so that a short wait is noticed at once and a
        long one costs little.
    """
    deadline = time.monotonic() + within_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(longest_pause_s, 1.1 * pause_s)
    return True
