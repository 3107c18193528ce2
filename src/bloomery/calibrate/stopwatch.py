"""How long something takes at best."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

LEAST_REPEATS = 5
BUDGET_S = 0.4
ROW_S = 5e-3
"""Work of at least so long lies between two events of a GPU, whose clock ticks in half microseconds."""


def best_s(work: Callable[[], object], device: torch.device) -> float:
    """The quickest of many runs on a device, in seconds: what other work on the machine can only lengthen.

    On a CPU with one thread it is processor time, which waiting for the processor does not count in. On a GPU
    it is the device's own clock, over runs that follow each other without the host waiting in between.
    """
    work()
    return _on_gpu_s(work, device) if device.type == "cuda" else _on_cpu_s(work)


def _on_cpu_s(work: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best, runs, deadline = float("inf"), 0, time.perf_counter() + BUDGET_S
    while runs < LEAST_REPEATS or time.perf_counter() < deadline:
        started = clock()
        work()
        best, runs = min(best, clock() - started), runs + 1
    return max(best, 1e-9)


def _on_gpu_s(work: Callable[[], object], device: torch.device) -> float:
    def row_s(runs: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        for _ in range(runs):
            work()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return max(begin.elapsed_time(end) * 1e-3, 1e-9)  # it tells milliseconds

    torch.cuda.synchronize(device)
    runs = max(1, round(ROW_S / row_s(3) * 3))
    best, rows, deadline = float("inf"), 0, time.perf_counter() + BUDGET_S
    while rows < LEAST_REPEATS or time.perf_counter() < deadline:
        best, rows = min(best, row_s(runs) / runs), rows + 1
    return best
