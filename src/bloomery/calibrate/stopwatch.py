"""How long something takes at best."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

LEAST_REPEATS = 5
BUDGET_S = 0.4


def best_s(work: Callable[[], object]) -> float:
    """The quickest of many runs, in seconds: what other work on the machine can only lengthen.

    With one thread it is processor time, which waiting for the processor does not count in.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    work()
    _settle()
    best, runs, deadline = float("inf"), 0, time.perf_counter() + BUDGET_S
    while runs < LEAST_REPEATS or time.perf_counter() < deadline:
        started = clock()
        work()
        _settle()
        best, runs = min(best, clock() - started), runs + 1
    return max(best, 1e-9)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
