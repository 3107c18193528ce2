"""Whether ranks move: a deadline for each phase, by this machine's monotonic clock.

The lease says that the parent lives; this says that its ranks do what they say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from bloomery.elastic.peer.timeouts import Timeouts, step_deadline_s

_REMEMBERED = 32


@dataclass
class _Pace:
    """What one rank does. since: when it last said something new; seconds: of its last steps."""

    phase: str
    step: int
    since: float
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
            self._paces[rank] = _Pace(phase, step, now)
            return
        if phase == pace.phase == "step" and step == pace.step + 1:
            pace.seconds.append(now - pace.since)
        pace.phase, pace.step, pace.since = phase, step, now

    def touch(self, rank: int, *, now: float) -> None:
        """A rank said anything else: it moves."""
        if rank in self._paces:
            self._paces[rank].since = now

    def forget(self, rank: int) -> None:
        """A rank is gone."""
        self._paces.pop(rank, None)

    def stuck(self, now: float) -> dict[int, str]:
        """Ranks past their deadline, and what they were doing."""
        return {
            rank: f"{pace.phase} {pace.step} for {now - pace.since:.0f} s"
            for rank, pace in sorted(self._paces.items())
            if now > pace.since + self._allowed_s(pace)
        }

    def next_deadline(self) -> float | None:
        """When somebody would be stuck; None while all wait for others."""
        moments = [pace.since + self._allowed_s(pace) for pace in self._paces.values()]
        return min((moment for moment in moments if moment != float("inf")), default=None)

    def _allowed_s(self, pace: _Pace) -> float:
        limits = self._timeouts
        match pace.phase:
            case "start":
                return limits.start_s
            case "compile":
                return limits.compile_s
            case "save":
                return limits.save_s
            case "step":
                # The first step of a run, and of a phase, may compile.
                usual = median(pace.seconds) if pace.seconds else 0.0
                return step_deadline_s(limits, usual) if usual else limits.compile_s
        return float("inf")  # it waits for others, who have their own deadlines
