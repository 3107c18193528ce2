"""Computes the seconds of each phase of a recovery, as a pure function of what the run recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bloomery.operate.ledger.operations import Event, seconds_of, time_of


@dataclass(frozen=True, kw_only=True)
class RecoveryPhases:
    """Seconds of each phase after a fault, one after the other; None where a phase did not come.

    noticed: until the launcher spoke of it. ended: until all ranks had ended. restarted: until the next
    attempt began. started: until the first rank's process had imported and joined. loaded: until it had its
    state. stepped: until the first step was done.
    """

    noticed: float | None = None
    ended: float | None = None
    restarted: float | None = None
    started: float | None = None
    loaded: float | None = None
    stepped: float | None = None

    @property
    def total_s(self) -> float | None:
        """Seconds from the fault to the first step; None where no step came."""
        if self.stepped is None:
            return None
        phases = (self.noticed, self.ended, self.restarted, self.started, self.loaded, self.stepped)
        return sum(seconds for seconds in phases if seconds is not None)


def phases_of(
    struck: float, *, noticed: float | None, operations: Sequence[Event], events: Iterable[Event]
) -> RecoveryPhases:
    """Return the phases of the recovery from a fault. Times are seconds since 1970.

    struck: when the fault was injected.
    noticed: when the launcher spoke of it; None where it said nothing.
    operations: the events of operations.jsonl.
    events: the first rank's journal.
    """
    end = _first(operations, "attempt_end", struck)
    attempt = _first(operations, "attempt", struck)
    after = attempt or end or struck
    start = loading_s = None
    step = None
    for event in events:
        time = time_of(event)
        if time is None or time <= after:
            continue
        if event["event"] == "start" and start is None:
            start = time
            loading_s = seconds_of(event.get("spent")).get("loading a checkpoint", 0.0)
        elif event["event"] == "step" and (start is not None or attempt is None):
            step = time
            break
    began = None if start is None else start - (loading_s or 0.0)
    moments = [noticed, end, attempt, began, start, step]
    seconds: list[float | None] = []
    last = struck
    for moment in moments:
        seconds.append(None if moment is None else max(0.0, moment - last))
        last = last if moment is None else max(last, moment)
    return RecoveryPhases(
        noticed=seconds[0],
        ended=seconds[1],
        restarted=seconds[2],
        started=seconds[3],
        loaded=seconds[4],
        stepped=seconds[5],
    )


def _first(operations: Sequence[Event], name: str, after: float) -> float | None:
    times = [time for event in operations if event["event"] == name and (time := time_of(event)) is not None]
    return min((time for time in times if time > after), default=None)
