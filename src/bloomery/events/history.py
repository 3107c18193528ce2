"""Reads the history of a run from its first rank's journal, in one pass, and keeps only what is asked for.

A run of months makes millions of steps, so no function here holds a list of their reports.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields

from bloomery.events.incarnation import read_incarnations, visibility
from bloomery.events.journal import Event, kept_steps, read_journal
from bloomery.events.records import StepReport, as_float
from bloomery.events.run_directory import RunDirectory

_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a field of a damaged line raises."""
_REPORT = frozenset({"incarnation", *(item.name for item in fields(StepReport) if item.default is MISSING)})


@dataclass(frozen=True, kw_only=True)
class RecentSteps:
    """The newest steps of a run, and what its journal says beside them.

    alike: the newest steps in a row that as many ranks made, with as large a batch, as the last; at most as
        many of them as were asked for.
    ranks: the number of ranks that made the newest step; 1 where their incarnation did not record it.
    span_s: seconds from the journal's first event to its last.
    vocabulary: number of the tokenizer's ids, as the newest start recorded it; None if none did.
    are_ranks_recorded: whether their incarnation recorded the number of ranks.
    """

    alike: tuple[StepReport, ...]
    ranks: int
    span_s: float
    vocabulary: int | None = None
    are_ranks_recorded: bool = False


def recent_steps(rundir: RunDirectory, *, most: int) -> RecentSteps:
    """Return at most `most` of the newest steps; a run without a journal has none."""
    notes = _Notes()
    alike: deque[Event] = deque(maxlen=most)
    conditions = None
    for event in _kept_reports(rundir, notes.passed(read_journal(rundir.journal()))):
        before, conditions = conditions, (notes.ranks_of(event), event["global_batch"])
        if conditions != before:
            alike.clear()
        alike.append(event)
    return RecentSteps(
        alike=tuple(map(StepReport.from_json, alike)),
        ranks=notes.ranks_of(alike[-1]) if alike else 1,
        span_s=max(0.0, notes.last_s - notes.first_s),
        vocabulary=notes.vocabulary,
        are_ranks_recorded=bool(alike) and alike[-1]["incarnation"] in notes.ranks,
    )


@dataclass
class _Notes:
    """What the events beside the steps say."""

    ranks: dict[int, int] = field(default_factory=dict)
    vocabulary: int | None = None
    first_s: float = float("inf")
    last_s: float = float("-inf")

    def passed(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, once what they say is noted."""
        for event in events:
            with suppress(*_DAMAGE):
                self._note(event)
            yield event

    def _note(self, event: Event) -> None:
        if event["event"] == "start" and "incarnation" in event:
            if "ranks" in event:
                self.ranks[event["incarnation"]] = int(event["ranks"])
        elif event["event"] == "data" and isinstance(event.get("vocabulary"), int):
            self.vocabulary = event["vocabulary"]
        if "time" in event:
            self.first_s = min(self.first_s, float(event["time"]))
            self.last_s = max(self.last_s, float(event["time"]))

    def ranks_of(self, step: Event) -> int:
        """Return the number of ranks that made a step; 1 where their incarnation did not record it."""
        return self.ranks.get(step["incarnation"], 1)


@dataclass(frozen=True, kw_only=True)
class PastSteps:
    """What was asked about the steps that a run has made.

    newest: the newest step; None where none was made.
    kept: the newest step that going back would keep; None where it would keep none.
    undone, undone_s: the number of the steps after that, and the seconds that they took.
    reached: of each step that was asked for, the first step at or after it; those not yet made are left out.
    """

    newest: StepReport | None = None
    kept: StepReport | None = None
    undone: int = 0
    undone_s: float = 0.0
    reached: Mapping[int, StepReport] = field(default_factory=dict)


def past_steps(
    rundir: RunDirectory, *, back_to: int | None = None, reaching: Collection[int] = ()
) -> PastSteps:
    """Return what is asked about the steps that a run has made.

    back_to: the last step that going back would keep; None keeps all of them.
    reaching: the steps whose first step at or after them is wanted.
    """
    newest: Event | None = None
    kept: Event | None = None
    undone, undone_s = 0, 0.0
    wanted, reached = sorted(set(reaching), reverse=True), dict[int, StepReport]()
    for newest in _kept_reports(rundir, read_journal(rundir.journal())):
        while wanted and wanted[-1] <= newest["step"]:
            reached[wanted.pop()] = StepReport.from_json(newest)
        if back_to is None or newest["step"] <= back_to:
            kept = newest
        else:
            undone, undone_s = undone + 1, undone_s + as_float(newest["seconds"])
    return PastSteps(
        newest=StepReport.from_json(newest) if newest else None,
        kept=StepReport.from_json(kept) if kept else None,
        undone=undone,
        undone_s=undone_s,
        reached=reached,
    )


@dataclass(kw_only=True, slots=True)
class EvenSteps:
    """Steps in a row, each of which moved the cursor of the sample stream by as many indices.

    first, cursor: the first of the steps, and the cursor after it.
    """

    first: int
    cursor: int
    each: int = 0
    count: int = 1

    @property
    def end_cursor(self) -> int:
        """The cursor after the last of the steps."""
        return self.cursor + self.each * (self.count - 1)

    def step_at(self, index: int) -> int:
        """Return the first of the steps after which the cursor is at or beyond an index that they reach."""
        return self.first + (-(-max(0, index - self.cursor) // self.each) if self.each else 0)

    def takes(self, step: int, cursor: int) -> bool:
        """Whether a step goes on evenly; it belongs to these steps then."""
        moved = cursor - self.end_cursor
        if step != self.first + self.count or moved <= 0 or (self.count > 1 and moved != self.each):
            return False
        self.each, self.count = moved, self.count + 1
        return True


def even_steps(rundir: RunDirectory, *, until: int) -> tuple[EvenSteps, ...]:
    """Return how the cursor moved up to the step `until`, with steps that moved it alike as one record.

    A step that did not move it is left out.
    """
    rows: list[EvenSteps] = []
    for event in _kept_reports(rundir, read_journal(rundir.journal())):
        step, cursor = event["step"], event["cursor"]
        if step > until:
            break
        if not rows or (cursor > rows[-1].end_cursor and not rows[-1].takes(step, cursor)):
            rows.append(EvenSteps(first=step, cursor=cursor))
    return tuple(rows)


def step_reaching(index: int, rows: Sequence[EvenSteps]) -> int | None:
    """Return the first of the steps after which the cursor was at or beyond an index; None for none."""
    place = bisect_left(rows, index, key=lambda row: row.end_cursor)
    return rows[place].step_at(index) if place < len(rows) else None


def _kept_reports(rundir: RunDirectory, events: Iterable[Event]) -> Iterator[Event]:
    sound = (event for event in events if event["event"] != "step" or _is_sound(event))
    return kept_steps(sound, visibility(read_incarnations(rundir)), needed=_REPORT)


def _is_sound(step: Event) -> bool:
    """Return whether the values of a step are of their kinds, as in a line that is not damaged."""
    try:
        StepReport.from_json(step)
        hash((step["step"] + 0, step["incarnation"] + 0))
    except _DAMAGE:
        return False
    return True
