"""Whether ranks move: a deadline for each phase, by this machine's monotonic clock.

The lease says that the parent lives; this says that its ranks do what they say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from bloomery.elastic.peer.timeouts import Timeouts, step_deadline_s

_REMEMBERED = 32
_WORKING = ("start", "compile", "step", "evaluate", "offer", "save")
"""Phases with a deadline; in all others a rank waits for others, who have their own."""


@dataclass
class _Pace:
    """What one rank does. since: when it last said something new; seconds, copies: of its last steps, and
    copies for newcomers.

    asked: since when it has something to do though it waits for others; None: it has not.
    """

    phase: str
    step: int
    since: float
    begun: float
    asked: float | None = None
    copies: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class Progress:
    """Of all ranks of this peer."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._paces: dict[int, _Pace] = {}

    def note(self, rank: int, phase: str, *, step: int, now: float) -> None:
        """A rank said what it does."""
        pace = self._paces.get(rank)
        if pace is None:
            self._paces[rank] = _Pace(phase, step, now, now)
            return
        if phase == pace.phase == "step" and step == pace.step + 1:
            pace.seconds.append(now - pace.since)
        if pace.phase == "offer" != phase:
            pace.copies.append(now - pace.begun)
        if phase != pace.phase:
            pace.begun = now
        pace.phase, pace.step, pace.since = phase, step, now
        if pace.asked is not None:  # what it was told lies behind what it does before that
            pace.asked = now if phase in ("offer", "save", "wait") else None

    def touch(self, rank: int, *, now: float, answers: bool) -> None:
        """A rank said anything else: it moves. answers: what it was told to do is done."""
        pace = self._paces.get(rank)
        if pace is not None:
            pace.since = now
            pace.asked = None if answers or pace.asked is None else now

    def expect(self, *, now: float) -> None:
        """Whoever waits has something to do now: said once, and again it changes nothing."""
        for pace in self._paces.values():
            if pace.asked is None:
                pace.asked = now

    def satisfied(self) -> None:
        """What all were expected to do is done; they wait for others again."""
        for pace in self._paces.values():
            pace.asked = None

    def usual_step_s(self) -> float:
        """The slowest rank's median step; 0 while none is known."""
        return max((median(pace.seconds) for pace in self._paces.values() if pace.seconds), default=0.0)

    def forget(self, rank: int) -> None:
        """A rank is gone."""
        self._paces.pop(rank, None)

    def stuck(self, now: float) -> dict[int, str]:
        """Ranks past their deadline, and what they were doing."""
        return {
            rank: f"{pace.phase} {pace.step} for {now - pace.since:.0f} s"
            for rank, pace in sorted(self._paces.items())
            if now > self._due(pace)
        }

    def next_deadline(self) -> float | None:
        """When somebody would be stuck; None while all wait for others."""
        moments = [self._due(pace) for pace in self._paces.values()]
        return min((moment for moment in moments if moment != float("inf")), default=None)

    def _due(self, pace: _Pace) -> float:
        """When it will have been still for too long."""
        if pace.phase not in _WORKING:
            return float("inf") if pace.asked is None else pace.asked + self._timeouts.step_s
        return pace.since + self._allowed_s(pace)

    def _allowed_s(self, pace: _Pace) -> float:
        limits = self._timeouts
        match pace.phase:
            case "start":
                return limits.start_s
            case "compile":
                return limits.compile_s
            case "offer" if pace.copies:
                return step_deadline_s(limits, median(pace.copies))
            case "offer" | "save" | "evaluate":
                return limits.save_s
            case "step":
                # The first step of a run, and of a phase, may compile.
                usual = median(pace.seconds) if pace.seconds else 0.0
                return step_deadline_s(limits, usual) if usual else limits.compile_s
        raise AssertionError(f"{pace.phase} is no phase of work")
