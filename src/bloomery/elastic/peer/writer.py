"""What a peer writes to the coordinator: one thing after the other, on a thread of its own.

The parent's loop never waits for the coordinator: while it is away, jobs wait here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bloomery.errors import CoordinatorAway, CoordinatorError

log = logging.getLogger(__name__)

_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class _Job:
    name: str
    run: Callable[[], None]
    repeats: bool


class Writer:
    """wake: called after each job. failed: called with what no waiting mends."""

    def __init__(self, *, wake: Callable[[], None], failed: Callable[[CoordinatorError], None]) -> None:
        self._wake, self._failed = wake, failed
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._running: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._thread.start()

    def write(self, name: str, run: Callable[[], None], *, repeats: bool = True, first: bool = False) -> None:
        """Do this after what waits already, or before. One of equal name that waits is forgotten.

        repeats: again and again while the coordinator is away; else once.
        """
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.name != name)
            job = _Job(name=name, run=run, repeats=repeats)
            if first:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            self._changed.notify_all()

    def is_at(self, name: str) -> bool:
        """Whether a job of this name waits or is being done."""
        with self._changed:
            return self._running == name or any(job.name == name for job in self._jobs)

    def forget(self, name: str) -> None:
        """Do not do it any more, if it has not begun."""
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.name != name)

    def close(self, *, within_s: float) -> None:
        """Finish what waits, as far as that is possible in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(within_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running = job.name
            is_away = self._do(job)
            self._wake()
            if is_away:
                self._changed_pause()

    def _do(self, job: _Job) -> bool:
        """Run it; True where the coordinator was away."""
        try:
            job.run()
        except CoordinatorAway as away:
            log.warning("%s waits for the coordinator: %s", job.name, away.message)
            with self._changed:
                if job.repeats and not self._closing and not any(one.name == job.name for one in self._jobs):
                    self._jobs.appendleft(job)
            return True
        except CoordinatorError as error:
            self._failed(error)
        return False

    def _changed_pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=_PAUSE_S)
