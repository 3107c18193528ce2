"""Runs a task on rank 0 while all other ranks wait for it, for as long as it makes progress.

A collective times out after minutes, but preparing data may take hours. So the other ranks poll a key of the
rendezvous store, in which rank 0 writes its status every few seconds.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from bloomery.errors import RankLost, ReportedElsewhere
from bloomery.events.timeouts import RANK_ZERO_SILENCE_S, RANK_ZERO_STALL_S
from bloomery.parallel.rendezvous import ask_store
from bloomery.torch_private import Store

STATUS_EVERY_S = 2.0
_POLL_S, _SLOWEST_POLL_S = 0.02, 1.0
_STORE = "the store where the ranks meet"

_Result = TypeVar("_Result")
ReportProgress = Callable[[], None]
"""A function that a task calls whenever it has made progress."""


@dataclass(frozen=True, kw_only=True)
class TaskStatus:
    """What rank 0 writes about its task.

    count: number of the status; a new one shows that rank 0 lives. -1 once the task has ended.
    steps: how often the task has reported progress.
    processor_s: CPU seconds that rank 0 and its children have used, so that computing counts as progress.
    outcome: 'done' or 'failed' once the task has ended, else empty.
    """

    count: int
    steps: int
    processor_s: int
    outcome: str = ""


def run_as_rank_zero(store: Store, key: str, task: Callable[[ReportProgress], _Result]) -> _Result:
    """Run `task` and return what it returns, writing its status under `key` all the while.

    Raises what the task raises; the ranks that wait then raise ReportedElsewhere.
    """
    steps, ended, one_at_a_time = [0], threading.Event(), threading.Lock()

    def report_progress() -> None:
        steps[0] += 1

    def write_status(count: int, outcome: str = "") -> None:
        used = os.times()
        processor_s = int(used.user + used.system + used.children_user + used.children_system)
        status = TaskStatus(count=count, steps=steps[0], processor_s=processor_s, outcome=outcome)
        with one_at_a_time:
            # The outcome is the last status: another one written after it would hide it.
            if outcome or not ended.is_set():
                store.set(key, json.dumps(asdict(status)))

    def keep_writing() -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone, which the other ranks notice themselves
            while not ended.wait(STATUS_EVERY_S if count else 0.0):
                write_status(count := count + 1)

    threading.Thread(target=keep_writing, daemon=True, name=key).start()
    with _writing_outcome(lambda outcome: write_status(-1, outcome), ended):
        return task(report_progress)


def wait_for_rank_zero(
    store: Store,
    key: str,
    *,
    doing: str,
    silence_s: float = RANK_ZERO_SILENCE_S,
    stall_s: float = RANK_ZERO_STALL_S,
) -> None:
    """Wait until rank 0 has ended the task of `key`.

    doing: what the task does, for the messages: "rank 0, which was {doing}".
    silence_s: how long rank 0 may write no status. stall_s: how long it may make no progress.
    Raises ReportedElsewhere if the task failed, and RankLost after either time.
    """
    last, pause_s = TaskStatus(count=0, steps=0, processor_s=0), _POLL_S
    alive_at = progressed_at = time.monotonic()
    while not last.outcome:
        time.sleep(pause_s)
        pause_s = min(_SLOWEST_POLL_S, pause_s * 1.2)
        status, now = ask_store(lambda: _read(store, key), by=_STORE), time.monotonic()
        if status is not None:
            alive_at = now if status.count != last.count else alive_at
            has_progressed = (status.steps, status.processor_s) != (last.steps, last.processor_s)
            progressed_at = now if has_progressed else progressed_at
            last = status
        if now - alive_at > silence_s:
            raise RankLost(
                f"Rank 0, which was {doing}, has given no sign of life for {silence_s:.0f} s.",
                remedy="Look at its log and its machine. The same command goes on.",
            )
        if now - progressed_at > stall_s:
            raise RankLost(
                f"Rank 0, which was {doing}, is alive, but has made no progress for {stall_s:.0f} s.",
                remedy="Look what it waits for: a disk or a network that does not answer, perhaps.",
            )
    if last.outcome != "done":
        raise ReportedElsewhere


@contextmanager
def _writing_outcome(write: Callable[[str], None], ended: threading.Event) -> Iterator[None]:
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        ended.set()
        if outcome == "done":
            ask_store(lambda: write(outcome), by=_STORE)
        else:
            with suppress(RankLost):  # the task's own error must not be hidden by one of the store
                ask_store(lambda: write(outcome), by=_STORE)


def _read(store: Store, key: str) -> TaskStatus | None:
    return TaskStatus(**json.loads(store.get(key))) if store.check([key]) else None
