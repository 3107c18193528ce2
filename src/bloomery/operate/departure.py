"""Decides when a job must save and exit: before its time limit, and ahead of maintenance of its nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from bloomery.errors import BloomeryError
from bloomery.events.journal import read_tail
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import switch_places
from bloomery.operate.ledger.operations import AGREED, time_of
from bloomery.operate.maintenance import MaintenanceNotice, earliest

log = logging.getLogger(__name__)

LEAST_S = 10.0
"""The least seconds before its end at which a job stops, however quick its saves are."""
TIMES = 3.0
"""Times the longest measured save, and the longest step, that are left for the last ones."""
EXIT_TIMES, EXIT_UNMEASURED_S = 2.0, 15.0
"""Times the longest measured exit that are left for the exit; the seconds where none was measured."""
_UNMEASURED_SHARE, _MOST_SHARE = 0.25, 0.5
"""A job keeps at most these shares of its time for its last save: before it has measured one, and after."""
_TAIL_BYTES, _FIRST_TAIL_BYTES = 1 << 18, 1 << 23
_POLL_S = 1.0
_END_EVERY_S = 60.0
_NOTICES_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """What a run measured lately: the longest time from a step to its checkpoint, and the longest step.

    save_s: None where no save was measured.
    exit_s: from the end in the journal until all ranks were gone, the longest; None where none was measured.
    """

    save_s: float | None
    step_s: float
    exit_s: float | None = None


def measured_save(rundir: RunDirectory, *, most_bytes: int = _TAIL_BYTES) -> SaveTimes:
    """Return what the first rank's journal says of saves and steps, from its last `most_bytes`.

    A journal that cannot be read counts as one without saves, for the job's end comes all the same.
    """
    steps: dict[tuple[str, str], float] = {}
    saves: list[float] = []
    ends: list[float] = []
    longest = 0.0
    with suppress(OSError):
        for event in read_tail(rundir.journal(), most_bytes=most_bytes):
            time, seconds = time_of(event), event.get("seconds")
            key = (str(event.get("step")), str(event.get("incarnation", 0)))
            if time is None:
                continue
            if event["event"] == "step":
                steps[key] = time
                longest = max(longest, float(seconds) if isinstance(seconds, int | float) else 0.0)
            elif event["event"] == "checkpoint" and steps.get(key, inf) <= time:  # no clock was set back
                saves.append(time - steps[key])
            elif event["event"] == "end":
                ends.append(time)
    exits = [
        gone - max(before)
        for began, gone in _attempts_that_stopped(rundir)
        if (before := [end for end in ends if began <= end <= gone])
    ]
    return SaveTimes(save_s=max(saves, default=None), step_s=longest, exit_s=max(exits, default=None))


def _attempts_that_stopped(rundir: RunDirectory) -> list[tuple[float, float]]:
    """Return when each of the last attempts that saved and stopped began and ended, in seconds since 1970.

    One that ended before it had trained has no `end` of its own, and must not take that of another for it.
    """
    began: dict[str, float] = {}
    stopped: list[tuple[float, float]] = []
    with suppress(OSError):
        for event in read_tail(rundir.operations, most_bytes=_TAIL_BYTES, named=("attempt", "attempt_end")):
            time, name = time_of(event), str(event.get("attempt"))
            if time is None:
                continue
            if event["event"] == "attempt":
                began[name] = time
            elif event.get("status") in AGREED:
                stopped.append((began.get(name, 0.0), time))
    return stopped


def time_to_leave_s(times: SaveTimes, *, unmeasured_s: float) -> float:
    """Return how many seconds before its end a job must stop, so that the last save is done in time.

    unmeasured_s: the seconds where no save was measured yet.
    """
    if times.save_s is None:
        return max(LEAST_S, unmeasured_s)
    exit_s = EXIT_UNMEASURED_S if times.exit_s is None else EXIT_TIMES * times.exit_s
    return max(LEAST_S, TIMES * (times.save_s + times.step_s)) + exit_s


class Departure:
    """Watches the clock and the notices, until it is closed.

    One thread asks the scheduler and the sources of notices, another judges by their last answers: a
    scheduler that takes a minute to say nothing must not let the end of the job pass.

    reason: why the run must save and stop now; "" while it need not.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        *,
        end_of_job: Callable[[], float | None],
        notices: Sequence[Callable[[], list[MaintenanceNotice]]],
        ahead_s: float,
        unmeasured_s: float,
        poll_s: float = _POLL_S,
    ) -> None:
        """Prepare to watch.

        end_of_job: asks the scheduler when the job ends, in seconds since 1970; it may raise BloomeryError.
        notices: each asks a source of notices; it may raise BloomeryError.
        ahead_s: how long before maintenance the run stops.
        unmeasured_s: how long before its end a job stops at most that has not measured a save yet.
        """
        self.reason = ""
        self._rundir, self._end_of_job, self._notices = rundir, end_of_job, tuple(notices)
        self._ahead_s, self._unmeasured_s, self._poll_s = ahead_s, unmeasured_s, poll_s
        self._end: float | None = None
        self._notice: MaintenanceNotice | None = None
        self._asked_end = self._asked_notices = float("-inf")
        self._is_warned = self._is_answered = False
        self._length_s: float | None = None
        self._measured: SaveTimes | None = None
        self._told: dict[Callable[[], Any], str] = {}
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(self.ask,), name="departure: asks", daemon=True),
            threading.Thread(target=self._repeat, args=(self._decide,), name="departure", daemon=True),
        ]

    def start(self) -> Departure:
        """Begin to watch; returns self."""
        for thread in self._threads:
            thread.start()
        return self

    def warned(self) -> None:
        """Record the scheduler's signal; where the scheduler does not say when the job ends, that is now."""
        self._is_warned = True
        self._asked_end = float("-inf")  # the end may have changed since it was asked

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * self._poll_s)  # one that waits for an answer ends with the process

    def __enter__(self) -> Departure:
        return self.start()

    def __exit__(self, *error: Any) -> None:  # Any: an exception's kind, value and trace
        self.close()

    def check(self) -> str:
        """Ask what is due, and return why the run must save and stop now; "" while it need not."""
        self.ask()
        return self.judge()

    def ask(self) -> None:
        """Ask the scheduler and the sources of notices what is due."""
        now = time.monotonic()
        if now - self._asked_end >= _END_EVERY_S:
            self._asked_end = now
            try:
                end = self._asked(self._end_of_job, self._end)
            finally:
                self._is_answered = True
            if end is not None and self._length_s is None:
                # A short job must not leave before it has trained, whatever its saves took.
                self._length_s = max(0.0, end - time.time())
                self._unmeasured_s = min(self._unmeasured_s, _UNMEASURED_SHARE * self._length_s)
            self._end = end
        if now - self._asked_notices >= min(_NOTICES_EVERY_S, 5 * self._poll_s):
            self._asked_notices = now
            notices = [notice for source in self._notices for notice in self._asked(source, [])]
            self._notice = earliest(notices)

    def judge(self) -> str:
        """Return why the run must save and stop now, by the last answers; "" while it need not."""
        if self._end is not None:
            left_s = self._end - time.time()
            needed_s = min(
                time_to_leave_s(self._times(), unmeasured_s=self._unmeasured_s),
                max(LEAST_S, _MOST_SHARE * (self._length_s or 0.0)),
            )
            if left_s <= needed_s:
                return (
                    f"the job ends in {max(0.0, left_s):.0f} s, and the last save is given {needed_s:.0f} s"
                )
        elif self._is_warned and self._is_answered:
            return "the scheduler has signalled that the job will end"
        if self._notice is not None and self._notice.at - time.time() <= self._ahead_s:
            return f"maintenance: {self._notice.what}"
        return ""

    def _times(self) -> SaveTimes:
        """Return what was measured lately. A save that the journal's end no longer shows counts still."""
        before = self._measured
        if before is None:
            self._measured = measured_save(self._rundir, most_bytes=_FIRST_TAIL_BYTES)
            return self._measured
        now = measured_save(self._rundir)
        save_s = before.save_s if now.save_s is None else now.save_s
        self._measured = replace(
            now, save_s=save_s, exit_s=before.exit_s if now.exit_s is None else now.exit_s
        )
        return self._measured

    def _asked(self, ask: Callable[[], Any], otherwise: Any) -> Any:  # Any: what the question returns
        try:
            answer = ask()
        except BloomeryError as silent:
            if self._told.get(ask) != str(silent):  # it is asked every few seconds, perhaps for days
                log.warning("%s", silent)
            self._told[ask] = str(silent)
            return otherwise
        self._told.pop(ask, None)
        return answer

    def _decide(self) -> None:
        self.reason = self.judge()

    def _repeat(self, do: Callable[[], None]) -> None:
        logged_error = ""
        while not self.reason and not self._closed.wait(self._poll_s):
            try:
                do()
            except Exception as error:  # noqa: BLE001 - without this thread the job is killed at its limit
                before, logged_error = logged_error, f"{type(error).__name__}: {error}"
                if logged_error != before:
                    log.warning("it could not be judged whether the job must leave: %s", logged_error)


def maintenance_files(rundir: RunDirectory, directory: str) -> list[Path]:
    """Return the files that announce maintenance: in the run's control directory, and beside its switches."""
    places = [rundir.control_dir, *switch_places(directory)]
    return [place / "maintenance" for place in places]
