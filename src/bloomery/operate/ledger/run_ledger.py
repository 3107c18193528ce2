"""The goodput ledger of a run: sums the seconds of all ranks by class and by incident."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bloomery.events.heartbeat import RankActivity, interval_of, read_beat
from bloomery.events.incarnation import read_incarnations, visibility
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.diagnosis import Cause
from bloomery.operate.ledger.clock import read_steadily
from bloomery.operate.ledger.operations import (
    MOST_RANKS,
    Event,
    Mark,
    OperationMarks,
    Span,
    read_marks,
    time_of,
)
from bloomery.operate.ledger.run_history import SAVE_REFUSED, Incident, RunHistory, read_run_history
from bloomery.operate.ledger.time_class import NOT_WANTED, TimeClass
from bloomery.operate.ledger.timeline import LivingRank, rank_spans

_FRESH_S = 30.0
_NOTICED = (TimeClass.HANG, TimeClass.FAILURE, TimeClass.LOST)
"""Classes of time before the incident that they belong to was noticed; all others come after it."""
_OF_INCIDENTS = frozenset(
    {
        *_NOTICED,
        TimeClass.RESTART,
        TimeClass.DOWN,
        TimeClass.QUEUE,
        TimeClass.STARTING,
        TimeClass.PREPARING,
        TimeClass.LOADING,
        TimeClass.FIRST_STEP,
    }
)


@dataclass(frozen=True, kw_only=True)
class RunLedger:
    """Where the time of a run went.

    begin, end: the window, in seconds since 1970.
    ranks: the seconds by class of each rank, by its name `PEER-RANK`.
    incident_s: the seconds that each incident of the history cost, as the mean over the ranks.
    goodput_at_incident: the effective time of the run up to each incident.
    bins: the seconds by class over all ranks of each part of the window, of equal length; () where none
        were asked for.
    """

    begin: float
    end: float
    ranks: Mapping[str, Mapping[TimeClass, float]]
    history: RunHistory
    incident_s: Sequence[float] = ()
    goodput_at_incident: Sequence[float] = ()
    bins: Sequence[Mapping[TimeClass, float]] = ()

    @property
    def seconds(self) -> dict[TimeClass, float]:
        """The seconds of each class over all ranks, in the order of TimeClass."""
        totals = dict.fromkeys(TimeClass, 0.0)
        for spent in self.ranks.values():
            for kind, seconds in spent.items():
                totals[kind] += seconds
        return {kind: seconds for kind, seconds in totals.items() if seconds > 0.0}

    @property
    def total_s(self) -> float:
        """The seconds of all ranks together."""
        return sum(self.seconds.values())

    @property
    def effective_time(self) -> float:
        """The share of all time that went into steps which are part of the run (MegaScale, §6)."""
        return self.seconds.get(TimeClass.TRAINING, 0.0) / self.total_s if self.total_s else 0.0

    @property
    def ettr(self) -> float:
        """The effective training time ratio: as above, of the time in which the run was wanted to train.

        That leaves out what people stopped and counts the queue (Kokolis et al., 2024, §III).
        """
        wanted_s = self.total_s - sum(self.seconds.get(kind, 0.0) for kind in NOT_WANTED)
        return self.seconds.get(TimeClass.TRAINING, 0.0) / wanted_s if wanted_s else 0.0

    @property
    def best_tokens_per_s(self) -> float:
        """The speed that nine of ten kept steps do not exceed; 0.0 where no step was kept."""
        return self.history.best_tokens_per_s

    def token_goodput(self, tokens_per_s: float | None = None) -> float:
        """Return the kept tokens as a share of those that the whole time would have brought.

        tokens_per_s: the speed without disturbances, of a plan for instance; None takes `best_tokens_per_s`.
        """
        speed = self.best_tokens_per_s if tokens_per_s is None else tokens_per_s
        possible = speed * (self.end - self.begin)
        return self.history.kept_tokens / possible if possible else 0.0

    def by_cause(self) -> dict[str, tuple[int, float, int]]:
        """Return (incidents, seconds, steps lost) of each cause, the dearest first."""
        sums: dict[str, tuple[int, float, int]] = defaultdict(lambda: (0, 0.0, 0))
        for incident, seconds in zip(self.history.incidents, self.incident_s, strict=True):
            number, spent, steps = sums[incident.cause]
            sums[incident.cause] = (number + incident.times, spent + seconds, steps + incident.steps_lost)
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def read_ledger(
    rundir: RunDirectory,
    *,
    now: float | None = None,
    until: float | None = None,
    bins: int = 0,
    ranks: Literal["all", "first"] = "all",
) -> RunLedger | None:
    """Return the ledger of a run from its first start until now; None where it was never started.

    A run that is over (finished or stopped) is counted up to its last event. Reads each journal once, and
    the first rank's twice, line by line; before that it looks through the times of each (`read_steadily`).

    now: the present time, in seconds since 1970; None takes the clock.
    until: the end of the window in place of the present, and not after it; None leaves it.
    bins: the number of parts of the window whose sums are kept.
    ranks: the ranks that are counted; only the first is quicker by as many times as there are ranks.
    """
    now = time.time() if now is None else now
    operations = list(read_steadily(rundir.operations))
    is_visible = visibility(read_incarnations(rundir))
    journals = {path.stem: path for path in rundir.journals()}
    first = min(journals, key=_rank_of, default=None)
    events: Iterable[Event] = read_steadily(journals[first]) if first is not None else ()
    history = read_run_history(
        events, operations, is_visible=is_visible, until=math.inf if until is None else until
    )
    if history.began_s is None:
        return None
    world = max([_ranks(operations), *(ranks for _, ranks in history.members[-1:])], default=0)
    names = sorted({*journals, *(f"0-{rank}" for rank in range(world))}, key=_rank_of)
    running = _running_attempt(operations)
    names = names[:1] if ranks == "first" else names
    living = {name: rank for name in names if (rank := _living(rundir, name, running, now=now)) is not None}
    end = history.last_s if history.is_over and not living else now
    end = max(history.began_s, end if until is None else min(until, max(now, end)))
    sums = _Sums(history.incidents, begin=history.began_s, end=end, bins=bins)
    marks_of_all = read_marks(operations, was_finished=history.is_finished)
    for name in names:
        marks = _with_members(marks_of_all, history, _rank_of(name)[1])
        sums.add(
            name,
            rank_spans(
                read_steadily(journals[name]) if name in journals else (),
                marks=marks,
                is_visible=is_visible,
                begin=_joined(history, _rank_of(name)[1]),
                end=end,
                living=living.get(name),
            ),
        )
    return RunLedger(
        begin=history.began_s,
        end=end,
        ranks=sums.ranks,
        history=history,
        incident_s=[seconds / max(1, len(names)) for seconds in sums.incident_s],
        goodput_at_incident=sums.goodput_at_incidents(),
        bins=sums.bins,
    )


@dataclass
class _Sums:
    """Sums spans by rank and class, by incident, and by parts of the window."""

    incidents: Sequence[Incident]
    begin: float
    end: float
    bins: Any = 0
    ranks: dict[str, dict[TimeClass, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.costly = [
            number for number, incident in enumerate(self.incidents) if incident.cause != SAVE_REFUSED
        ]
        self.times = [self.incidents[number].time for number in self.costly]
        self.incident_s = [0.0] * len(self.incidents)
        self.all_times = [incident.time for incident in self.incidents]
        self.trained_before = [0.0] * (len(self.incidents) + 1)
        self.bins = [defaultdict(float) for _ in range(self.bins)]

    def add(self, name: str, spans: Iterable[Span]) -> None:
        """Add the spans of one rank."""
        sums: dict[TimeClass, float] = defaultdict(float)
        for span in spans:
            if span.kind == TimeClass.ABSENT:
                continue
            sums[span.kind] += span.end - span.begin
            if span.kind == TimeClass.TRAINING:
                self.trained_before[bisect_left(self.all_times, span.end)] += span.end - span.begin
            if span.kind in _OF_INCIDENTS:
                self._charge(span)
            if self.bins:
                self._bin(span)
        self.ranks[name] = dict(sums)

    def goodput_at_incidents(self) -> list[float]:
        """Return the effective time of the added ranks up to each incident."""
        shares, trained_s = [], 0.0
        for moment, more_s in zip(self.all_times, self.trained_before, strict=False):
            trained_s += more_s
            all_s = (moment - self.begin) * len(self.ranks)
            shares.append(min(1.0, trained_s / all_s) if all_s > 0.0 else 0.0)
        return shares

    def _charge(self, span: Span) -> None:
        if span.kind in _NOTICED:
            place = bisect_left(self.times, span.end - 0.01)
        else:
            place = bisect_right(self.times, span.begin + 0.01) - 1
        if 0 <= place < len(self.times):
            self.incident_s[self.costly[place]] += span.end - span.begin

    def _bin(self, span: Span) -> None:
        width = (self.end - self.begin) / len(self.bins)
        if width <= 0.0:
            return
        place = max(0, min(len(self.bins) - 1, int((span.begin - self.begin) / width)))
        begin = span.begin
        while begin < span.end:
            is_last = place >= len(self.bins) - 1
            until = span.end if is_last else min(span.end, self.begin + (place + 1) * width)
            self.bins[place][span.kind] += max(0.0, until - begin)
            begin, place = until, place + 1
            if is_last:
                break


def _running_attempt(operations: Sequence[Event]) -> tuple[str, float | None]:
    """Return the newest attempt and when it began; ("", None) where it has ended, or where there is none.

    A start that was refused because another process trains the run is no attempt.
    """
    newest: tuple[str, float | None] = ("", None)
    refused = {str(event.get("attempt", "")) for event in operations if event.get("cause") == Cause.RUN_BUSY}
    for event in operations:
        if str(event.get("attempt", "")) in refused:
            continue
        if event["event"] == "attempt":
            newest = (str(event.get("attempt", "")), time_of(event))
        elif event["event"] == "attempt_end" and str(event.get("attempt", "")) == newest[0]:
            newest = ("", None)
    return newest


def _living(
    rundir: RunDirectory, name: str, running: tuple[str, float | None], *, now: float
) -> LivingRank | None:
    (peer, rank), (attempt, began) = _rank_of(name), running
    beat = read_beat(rundir.heartbeat(peer=peer, rank=rank))
    if beat is None or beat.activity == RankActivity.ENDED or beat.error or beat.attempt not in ("", attempt):
        return None
    is_fresh = abs(now - beat.time) <= _FRESH_S + 3 * interval_of(beat.world)
    return LivingRank(beat.activity, beat.time, began if beat.attempt else None) if is_fresh else None


def _with_members(marks: OperationMarks, history: RunHistory, rank: int) -> OperationMarks:
    """Return the marks for one rank: from a start with fewer ranks on it is absent."""
    absent = [
        Mark(time=time, before=None, after=TimeClass.ABSENT)
        for time, ranks in history.members
        if ranks <= rank
    ]
    return OperationMarks([*marks.marks, *absent]) if absent else marks


def _joined(history: RunHistory, rank: int) -> float:
    """Return when a rank first belonged to the run."""
    assert history.began_s is not None
    if history.members and history.members[0][1] > rank:
        return history.began_s
    return next((time for time, ranks in history.members if ranks > rank), history.began_s)


def _ranks(operations: Sequence[Event]) -> int:
    attempts = [event for event in operations if event["event"] == "attempt" and time_of(event)]
    counts = [event["ranks"] for event in attempts if isinstance(event.get("ranks"), int)]
    counts = [count for count in counts if count <= MOST_RANKS]
    return counts[-1] if counts else 0


def _rank_of(name: str) -> tuple[str, int]:
    peer, _, rank = name.rpartition("-")
    return peer, int(rank) if rank.isdecimal() else 0
