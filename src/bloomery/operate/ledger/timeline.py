"""Turns the journal of one rank into spans that fill the time of the run, each with exactly one class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import NamedTuple

from bloomery.events.heartbeat import STARTING, RankActivity
from bloomery.events.incarnation import Base
from bloomery.operate.ledger.operations import Event, OperationMarks, Span, seconds_of, time_of
from bloomery.operate.ledger.time_class import OF_ACTIVITY, TimeClass

_STEPS_COMPARED = 5
"""The number of steps after a process's first, with whose median the first is compared."""
_MOST_OWED_S = 0.1
"""The most seconds of a process, in all, that are moved from one span to the next before they count as
unexplained: an event is written a moment after its times were taken."""


class LivingRank(NamedTuple):
    """A rank that runs now.

    activity: what its heartbeat says it does; "" before its first activity.
    time: when the heartbeat was written.
    began: when the attempt that started the rank began; None where that is not recorded.
    """

    activity: str
    time: float
    began: float | None = None


def rank_spans(
    events: Iterable[Event],
    *,
    marks: OperationMarks,
    is_visible: Callable[[Base], bool],
    begin: float,
    end: float,
    living: LivingRank | None = None,
) -> Iterator[Span]:
    """Yield spans that fill [begin, end] without gaps or overlaps, for any events.

    Times that go backwards, or lie outside the window, are moved to its nearest moment that is still free.
    Events without a usable time are left out.

    events: the rank's journal in the order written.
    is_visible: whether a (step, incarnation) is part of the run.
    living: what the rank does now; None where it does not run.
    """
    timeline = _RankTimeline(marks=marks, is_visible=is_visible, begin=begin, end=end)
    for event in events:
        yield from timeline.take(event)
    yield from timeline.close(living)


class _RankTimeline:
    """Fills the time of one rank from left to right.

    The spans of a process's first step wait until the steps after it say how long a step usually takes.
    """

    def __init__(
        self, *, marks: OperationMarks, is_visible: Callable[[Base], bool], begin: float, end: float
    ) -> None:
        self._marks, self._is_visible = marks, is_visible
        self._cursor, self._end = begin, max(begin, end)
        self._incarnation = 0
        self._has_written = False
        self._otherwise = TimeClass.STARTING  # nobody wrote anything yet
        self._owed_s = 0.0
        self._is_first_step = True
        self._waiting: list[Span] = []
        self._following: list[float] = []

    def take(self, event: Event) -> Iterator[Span]:
        """Yield the spans that end with an event."""
        name, time = event["event"], time_of(event)
        if time is None:
            return
        yield from self._take(name, time, event)
        self._has_written = True

    def _take(self, name: str, time: float, event: Event) -> Iterator[Span]:
        incarnation = event.get("incarnation", 0)
        is_new = isinstance(incarnation, int) and incarnation > self._incarnation
        if is_new:
            self._incarnation = incarnation
        is_rewind = name == "start" and event.get("reason") != "start"
        spent = seconds_of(event.get("spent"))
        if (is_new and not is_rewind) or (name == "start" and not is_rewind):
            yield from self._release()
            yield from self._process_began(time, spent)
        if name == "step":
            yield from self._step(event, time, spent or _seconds_of_old(event))
        elif name == "start":
            yield from self._release()
            yield from self._fill(time, spent or {RankActivity.LOADING: math.inf})
        elif name == "end":
            yield from self._release()
            yield from self._fill(time, spent or {RankActivity.ENDING: math.inf})
            failed, finished = bool(event.get("failed")), bool(event.get("finished"))
            self._otherwise = TimeClass.FINISHED if finished else TimeClass.STOPPED
            self._otherwise = TimeClass.DOWN if failed else self._otherwise

    def close(self, living: LivingRank | None) -> Iterator[Span]:
        """Yield the spans from the last event to the end of the window."""
        yield from self._release()
        if living is not None:
            began = living.began
            if began is None:
                until = min(max(living.time, self._cursor), self._end)
                began = self._marks.last_start(self._cursor, until)
            if began is not None:  # what was before it is not this process's time
                yield from self._carve(began)
            kind = OF_ACTIVITY.get(living.activity or STARTING, TimeClass.UNEXPLAINED)
            yield from self._cover(self._end, kind)
        yield from self._carve(self._end)

    def _process_began(self, time: float, spent: dict[str, float]) -> Iterator[Span]:
        """Yield the time in which the rank had no process, up to the beginning of the one that writes now."""
        began = time - sum(spent.values())
        if not spent:
            mark = self._marks.last_start(self._cursor, time)
            began = time if mark is None else mark
        yield from self._carve(began)
        self._otherwise = TimeClass.DOWN  # what follows the last event, where nobody recorded why
        self._is_first_step, self._owed_s = True, 0.0

    def _step(self, event: Event, time: float, spent: dict[str, float]) -> Iterator[Span]:
        spans = list(self._fill(time, spent))
        step, incarnation = event.get("step"), event.get("incarnation")
        is_kept = isinstance(step, int) and isinstance(incarnation, int)
        if not is_kept or not self._is_visible((step, incarnation)):  # type: ignore[arg-type]  # two ints
            yield from self._release()
            yield from (span._replace(kind=TimeClass.LOST) for span in spans)
            self._is_first_step = False
        elif self._is_first_step:
            self._waiting, self._is_first_step = spans, False
        elif self._waiting:
            self._waiting += spans
            self._following.append(_training_s(spans))
            if len(self._following) == _STEPS_COMPARED:
                yield from self._release()
        else:
            yield from spans

    def _release(self) -> Iterator[Span]:
        """Yield the spans that wait, with the first step's excess apart."""
        excess_s = 0.0
        if self._following:
            first_step_s = _training_s(self._waiting) - sum(self._following)
            excess_s = max(0.0, first_step_s - median(self._following))
        for span in self._waiting:
            if span.kind == TimeClass.TRAINING and excess_s > 0.0:
                cut = min(span.end, span.begin + excess_s)
                excess_s -= cut - span.begin
                yield Span(span.begin, cut, TimeClass.FIRST_STEP)
                span = span._replace(begin=cut)
            if span.end > span.begin:
                yield span
        self._waiting, self._following = [], []

    def _fill(self, time: float, spent: dict[str, float]) -> Iterator[Span]:
        """Yield spans up to `time` in proportion to what the rank measured; the rest is unexplained."""
        time = min(max(time, self._cursor), self._end)
        length = time - self._cursor
        if length <= 0.0:
            self._owed_s = min(_MOST_OWED_S, self._owed_s + _finite_sum(spent))
            return
        begin, measured_s = self._cursor, _finite_sum(spent)
        open_ended = next((activity for activity, seconds in spent.items() if math.isinf(seconds)), None)
        if open_ended is not None:
            spent = {**spent, open_ended: max(0.0, length - measured_s)}
            measured_s = max(measured_s, length)
        extra_s = length - measured_s
        if extra_s <= 0.0:
            self._owed_s = min(_MOST_OWED_S, self._owed_s - extra_s)
            scale = length / measured_s
        else:
            paid_s = min(extra_s, self._owed_s + _MOST_OWED_S)
            self._owed_s -= paid_s
            scale = (measured_s + paid_s) / measured_s if measured_s else 1.0
        for activity, seconds in spent.items():
            until = min(time, begin + seconds * scale)
            if until > begin:
                yield Span(begin, until, OF_ACTIVITY.get(activity, TimeClass.UNEXPLAINED))
                begin = until
        self._cursor = time
        if time > begin:
            is_rounding = time - begin < 1e-6
            last = OF_ACTIVITY.get(next(reversed(spent), ""), TimeClass.UNEXPLAINED)
            yield Span(begin, time, last if is_rounding else TimeClass.UNEXPLAINED)

    def _carve(self, end: float) -> Iterator[Span]:
        end = min(max(end, self._cursor), self._end)
        if end > self._cursor:
            # Where a rank has written nothing the cursor is when it joined the run, no sign of life.
            wrote = self._cursor if self._has_written else -math.inf
            spans = self._marks.carve(self._cursor, end, wrote=wrote, otherwise=self._otherwise)
            yield from (span for span in spans if span.end > span.begin)
            self._cursor = end

    def _cover(self, end: float, kind: TimeClass) -> Iterator[Span]:
        if end > self._cursor:
            yield Span(self._cursor, end, kind)
            self._cursor = end


def _training_s(spans: Iterable[Span]) -> float:
    return sum(span.end - span.begin for span in spans if span.kind == TimeClass.TRAINING)


def _seconds_of_old(step: Event) -> dict[str, float]:
    """Return the seconds by activity of a step in a journal that does not hold them."""
    old = {
        RankActivity.WAITING_FOR_SAMPLES: step.get("data_wait_s"),
        RankActivity.COMPUTING: step.get("seconds"),
    }
    return {**seconds_of(old), RankActivity.BETWEEN_STEPS: math.inf}


def _finite_sum(spent: dict[str, float]) -> float:
    return sum(seconds for seconds in spent.values() if math.isfinite(seconds))
