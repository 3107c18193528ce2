"""Classifies the time without a running rank, from what supervisors and schedulers recorded."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bloomery.operate.diagnosis import Cause
from bloomery.operate.ledger.time_class import TimeClass

Event = Mapping[str, Any]  # Any: a parsed line of a journal

AGREED = (0, 130, 143)  # exit statuses of attempts that ended as asked
_LARGEST = sys.float_info.max
MOST_RANKS = 1 << 17
"""A larger number of ranks in a record is damage: each of them would be counted."""
LATEST_TIME = 1e11
"""Seconds since 1970 up to which a time is one: the year 5138."""
_LONGEST_START_S = 1800.0
"""The seconds after which an attempt counts as down if its end is not recorded and no rank wrote anything."""
_OF_JOB = {
    "pending": TimeClass.QUEUE,
    "held": TimeClass.QUEUE,
    "requeued": TimeClass.QUEUE,
    "running": TimeClass.STARTING,
    "failed": TimeClass.DOWN,
    "cancelled": TimeClass.STOPPED,
}
"""The class of the time that follows an event `job` of operations.jsonl, by its state."""


class Span(NamedTuple):
    """Seconds of one class, from `begin` to `end`, in seconds since 1970."""

    begin: float
    end: float
    kind: TimeClass


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment at which the class of time without a running rank changes.

    before: the class of the time from a rank's last sign of life to this moment; None leaves it open.
    after: the class of the time that follows, until a rank's process begins.
    since: the mark holds only for a rank that has written nothing since this moment, and where no other mark
        lies between; None for a mark that always holds.
    """

    time: float
    before: TimeClass | None
    after: TimeClass
    since: float | None = None


class OperationMarks:
    """The marks of a run in order of time."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self.marks: Sequence[Mark] = sorted(marks, key=lambda mark: mark.time)
        self._times = [mark.time for mark in self.marks]
        self._sure_times = [mark.time for mark in self.marks if mark.since is None]
        self._starts = [mark.time for mark in self.marks if mark.after == TimeClass.STARTING]

    def last_start(self, begin: float, end: float) -> float | None:
        """Return when the last attempt in (begin, end) began; None where there is none."""
        place = bisect_left(self._starts, end)
        return self._starts[place - 1] if place and self._starts[place - 1] > begin else None

    def carve(self, begin: float, end: float, *, wrote: float, otherwise: TimeClass) -> Iterator[Span]:
        """Yield spans that fill [begin, end], in which a rank had no process.

        wrote: when the rank last wrote something; minus infinity for a rank that never has.
        otherwise: the class of the time before the first mark, where that mark does not say it.
        """
        place = bisect_right(self._times, begin)
        kind = otherwise
        inside = self.marks[place : bisect_right(self._times, end)]
        inside = [mark for mark in inside if self._holds(mark, wrote)]
        if inside and inside[0].before is not None:
            kind = inside[0].before
        for mark in inside:
            yield Span(begin, mark.time, kind)
            begin, kind = mark.time, mark.after
        yield Span(begin, end, kind)

    def _holds(self, mark: Mark, wrote: float) -> bool:
        """Return whether a mark counts for a rank that has written nothing since `wrote`."""
        if mark.since is None:
            return True
        place = bisect_left(self._sure_times, mark.time)
        return wrote <= mark.since and (place == 0 or self._sure_times[place - 1] <= mark.since)


def read_marks(operations: Sequence[Event], *, was_finished: bool) -> OperationMarks:
    """Return the marks that the events of operations.jsonl make.

    was_finished: whether the run has recorded that its samples are done; an attempt with status 0 that did
        not finish the run was stopped.
    """
    diagnoses = {str(event.get("attempt")): event for event in operations if event["event"] == "diagnosis"}
    last_end = max((place for place, event in enumerate(operations) if _is_end(event)), default=-1)
    ended = {str(event.get("attempt")) for event in operations if _is_end(event)}
    marks = []
    is_start = False
    for place, event in enumerate(operations):
        time = time_of(event)
        if time is None:
            continue
        if event["event"] == "attempt":
            is_start = True
            marks.append(Mark(time=time, before=None, after=TimeClass.STARTING))
            if str(event.get("attempt")) not in ended:
                late = time + _LONGEST_START_S
                marks.append(Mark(time=late, before=None, after=TimeClass.DOWN, since=time))
        elif _is_end(event):
            is_start, is_last = False, place == last_end
            marks.append(_end_mark(time, event, diagnoses, is_finish=is_last and was_finished))
        elif event["event"] == "job" and str(event.get("state", "")).lower() in _OF_JOB:
            after = _OF_JOB[str(event["state"]).lower()]
            if is_start and after == TimeClass.STARTING:
                continue  # a watcher saw the job run only after its launcher had written `attempt`
            is_start = False
            marks.append(Mark(time=time, before=None, after=after))
    return OperationMarks(marks)


def time_of(event: Event) -> float | None:
    """Return when an event was written, in seconds since 1970; None where it does not say so.

    A time that no clock shows is damage, and no calendar has a date for it.
    """
    time = finite(event.get("time"))
    return time if time is not None and 0.0 <= time < LATEST_TIME else None


def finite(value: object) -> float | None:
    """Return a number of a journal; None for anything that is no finite number, also in a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        return None
    return float(value)


def seconds_of(spent: object) -> dict[str, float]:
    """Return the seconds by activity that an event holds; {} where it holds none that can be used."""
    if not isinstance(spent, dict):
        return {}
    return {
        str(activity): number
        for activity, seconds in spent.items()
        if (number := finite(seconds)) is not None and number > 0.0
    }


def _is_end(event: Event) -> bool:
    return bool(event["event"] == "attempt_end")


def _end_mark(time: float, end: Event, diagnoses: Mapping[Any, Event], *, is_finish: bool) -> Mark:
    if end.get("status") in AGREED:
        after = TimeClass.FINISHED if is_finish and end.get("status") == 0 else TimeClass.STOPPED
        return Mark(time=time, before=TimeClass.ENDING, after=after)
    diagnosis = diagnoses.get(str(end.get("attempt")), {})
    before = TimeClass.HANG if diagnosis.get("cause") == Cause.HANG else TimeClass.FAILURE
    is_retried = bool(diagnosis) and not diagnosis.get("gives_up")
    return Mark(time=time, before=before, after=TimeClass.RESTART if is_retried else TimeClass.DOWN)
