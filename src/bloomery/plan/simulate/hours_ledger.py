"""The hours of one simulated run by cause; every hour has exactly one cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

TRAINING = "training"
"""The cause of the hours that count; their share is the goodput."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One simulated life of a run.

    hours: hours by cause; they sum to the simulated time.
    events: how often each thing happened.
    spans: (begin, end, cause) in order of time, in hours, without gaps. Lost work appears only in `hours`,
    because its hours looked like training until they were lost.
    """

    hours: Mapping[str, float]
    events: Mapping[str, int]
    spans: tuple[tuple[float, float, str], ...]

    @property
    def goodput(self) -> float:
        """The share of the time whose work was kept."""
        return self.hours.get(TRAINING, 0.0) / sum(self.hours.values())


@dataclass
class HoursLedger:
    """Counts the hours of a run while it is simulated.

    end: hours after which the simulation stops.
    """

    end: float
    now: float = 0.0
    hours: dict[str, float] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the simulated time is used up."""
        return self.now >= self.end

    def spend(self, hours: float, cause: str) -> float:
        """Let time pass, at most until the end, and return the hours that passed."""
        return self.spend_until(self.now + hours, cause)

    def spend_until(self, when: float, cause: str) -> float:
        """Let time pass until `when` exactly, so that a wait for that moment ends."""
        begin, self.now = self.now, max(self.now, min(when, self.end))
        passed = self.now - begin
        if passed > 0.0:
            self.hours[cause] = self.hours.get(cause, 0.0) + passed
            if self.spans and self.spans[-1][2] == cause:
                begin = self.spans.pop()[0]
            self.spans.append((begin, self.now, cause))
        return passed

    def count(self, event: str) -> None:
        """Count one event."""
        self.events[event] = self.events.get(event, 0) + 1

    def move(self, hours: float, *, cause: str, to: str) -> None:
        """Move hours that were counted under one cause to another cause."""
        self.hours[cause] = self.hours.get(cause, 0.0) - hours
        self.hours[to] = self.hours.get(to, 0.0) + hours

    def close(self) -> Life:
        """Return the finished ledger."""
        return Life(
            hours=MappingProxyType(self.hours),
            events=MappingProxyType(self.events),
            spans=tuple(self.spans),
        )
