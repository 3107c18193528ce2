"""Reads the history of a run from its journals: its first start, each incident in order, and its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bloomery.events.incarnation import Base
from bloomery.events.records import Json
from bloomery.operate.ledger.operations import AGREED, MOST_RANKS, Event, finite, seconds_of, time_of

SAVE_REFUSED = "save refused"
NO_WORD = "ended without a word"
_BEST_SHARE = 0.9
_SIZES_PER_E = 10_000
"""Speeds of one size differ by less than a ten-thousandth."""
_WORDS_OF_PEOPLE = frozenset({"note", "alert", "request"})
"""Events of operations.jsonl that say nothing about whether the run goes on."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Something that cost the run time or steps.

    time: when it was noticed, in seconds since 1970.
    cause: a Cause of `operate.diagnosis`, "rewind: …", SAVE_REFUSED, or NO_WORD where nobody recorded one.
    culprit: host, GPU and rank; "" where they are unknown.
    summary: one sentence.
    evidence: the lines that show the cause.
    action: what was done about it.
    remedy: what helps against it.
    step: the newest step of the run when it was noticed.
    steps_lost: steps that were made and are not part of the run.
    times: how often it came in a row; more than 1 only where each costs nothing.
    """

    time: float
    cause: str
    culprit: str = ""
    summary: str = ""
    evidence: tuple[str, ...] = ()
    action: str = ""
    remedy: str = ""
    sure: bool = True
    step: int = 0
    steps_lost: int = 0
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What the first rank's journal and the supervisors' records tell of a run.

    began_s: when the first process began, in seconds since 1970; None where nothing was recorded.
    last_s: the time of the newest event that says whether the run goes on.
    is_over: whether the newest thing recorded is that the run finished or was stopped.
    is_finished: whether its samples are done.
    kept_steps, kept_tokens: those that are part of the run, less those of the run that it was forked from.
    step: the newest step that is part of the run.
    best_tokens_per_s: the speed that nine of ten kept steps do not exceed, to a ten-thousandth; 0.0 where no
        step was kept.
    members: (time, number of ranks) of each start.
    """

    began_s: float | None = None
    last_s: float = 0.0
    is_over: bool = False
    is_finished: bool = False
    kept_steps: int = 0
    kept_tokens: int = 0
    step: int = 0
    best_tokens_per_s: float = 0.0
    members: Sequence[tuple[float, int]] = ()
    incidents: Sequence[Incident] = ()
    changes: Sequence[tuple[float, str]] = ()


class _SpeedCounts:
    """Counts speeds by their size: a run of months has millions of steps, and few sizes."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._largest: dict[int, float] = {}

    def add(self, speed: float) -> None:
        """Count a speed above 0."""
        size = math.floor(math.log(speed) * _SIZES_PER_E)
        self._counts[size] = self._counts.get(size, 0) + 1
        self._largest[size] = max(speed, self._largest.get(size, 0.0))

    def quantile(self, share: float) -> float:
        """Return a speed that a share of all do not exceed, the largest of its size; 0.0 for none."""
        left = int(sum(self._counts.values()) * share)
        for size in sorted(self._counts):
            left -= self._counts[size]
            if left < 0:
                return self._largest[size]
        return max(self._largest.values(), default=0.0)


@dataclass
class _Reading:
    until: float
    incidents: list[Incident] = field(default_factory=list)
    changes: list[tuple[float, str]] = field(default_factory=list)
    members: list[tuple[float, int]] = field(default_factory=list)
    speeds: _SpeedCounts = field(default_factory=lambda: _SpeedCounts())
    lost_at: list[float] = field(default_factory=list)
    began_s: float | None = None
    last_s: float = 0.0
    ended: bool = True
    finished: bool = False
    kept_steps: int = 0
    kept_tokens: int = 0
    step: int = 0
    tokens: int = 0
    is_inherited: bool = False


def read_run_history(
    events: Iterable[Event],
    operations: Sequence[Event],
    *,
    is_visible: Callable[[Base], bool],
    until: float = math.inf,
) -> RunHistory:
    """Return the history of a run.

    events: the first rank's journal in the order written.
    operations: the events of operations.jsonl.
    is_visible: whether a (step, incarnation) is part of the run.
    until: steps, incidents and changes after this time, in seconds since 1970, are left out.
    """
    reading = _Reading(until=until)
    ends_s = [time for event in operations if event["event"] == "attempt_end" and (time := time_of(event))]
    for event in events:
        time = time_of(event)
        if time is not None:
            _take(reading, event, time, is_visible, ends_s)
    incidents = [each for each in (*_failures(operations), *reading.incidents) if each.time <= until]
    incidents = _with_lost_steps(sorted(incidents, key=lambda incident: incident.time), reading.lost_at)
    attempts = [time for event in operations if event["event"] == "attempt" and (time := time_of(event))]
    began = [time for time in (reading.began_s, *attempts[:1]) if time is not None]
    return RunHistory(
        began_s=min(began, default=None),
        last_s=max([reading.last_s, *(time_of(event) or 0.0 for event in _of_the_run(operations))]),
        is_over=_is_over(operations, reading),
        is_finished=reading.finished,
        kept_steps=reading.kept_steps,
        kept_tokens=reading.kept_tokens,
        step=reading.step,
        best_tokens_per_s=reading.speeds.quantile(_BEST_SHARE),
        members=tuple(reading.members),
        incidents=tuple(incidents),
        changes=tuple(change for change in reading.changes if change[0] <= until),
    )


def _take(
    reading: _Reading, event: Event, time: float, is_visible: Callable[[Base], bool], ends_s: Sequence[float]
) -> None:
    name = event["event"]
    if name == "step":
        _take_step(reading, event, time, is_visible)
    elif name == "start":
        _take_start(reading, event, time, ends_s)
    elif name == "end":
        reading.ended, reading.finished = not event.get("failed"), bool(event.get("finished"))
        if not event.get("finished"):
            word = "failed" if event.get("failed") else "stopped"
            reading.changes.append((time, f"{word}: {event.get('reason')}"))
    elif name == "rewind":
        cause = "rewind"
        action = rewind_words(event)
        reading.incidents.append(
            Incident(
                time=time, cause=cause, summary=str(event.get("reason", "")), action=action, step=reading.step
            )
        )
    elif name == "checkpoint_failed" and time <= reading.until:
        _take_refused_save(reading, event, time)
    elif name in ("setting", "skip", "restraint", "setting_refused"):
        reading.changes.append((time, _change(name, event)))
    reading.last_s = max(reading.last_s, time)


def _take_step(reading: _Reading, event: Event, time: float, is_visible: Callable[[Base], bool]) -> None:
    step, incarnation, tokens = event.get("step"), event.get("incarnation"), event.get("consumed_tokens")
    reading.ended = reading.finished = False
    if not isinstance(step, int) or not isinstance(incarnation, int) or time > reading.until:
        return
    if not is_visible((step, incarnation)):
        reading.lost_at.append(time)
        return
    reading.kept_steps += 1
    reading.step = step
    if isinstance(tokens, int) and finite(tokens) is not None:
        if reading.is_inherited:
            reading.tokens, reading.is_inherited = max(0, tokens - _tokens_of_step(event, tokens)), False
        reading.kept_tokens += max(0, tokens - reading.tokens)
        reading.tokens = max(tokens, reading.tokens)
    speed = finite(event.get("tokens_per_s"))
    if speed is not None and speed > 0.0:
        reading.speeds.add(speed)


def _tokens_of_step(step: Event, tokens: int) -> int:
    """Return a step's own tokens, by its share of all samples so far; 0 where that is not recorded."""
    batch, samples = finite(step.get("global_batch")), finite(step.get("consumed_samples"))
    return int(tokens * min(1.0, batch / samples)) if batch and samples and batch > 0.0 < samples else 0


def _take_start(reading: _Reading, event: Event, time: float, ends_s: Sequence[float]) -> None:
    began = time - sum(seconds_of(event.get("spent")).values())
    if reading.began_s is None:
        reading.began_s = began
    step, ranks = event.get("step"), event.get("ranks")
    if not reading.kept_steps:  # a fork begins with the tokens of the run that it was made from
        reading.is_inherited = isinstance(step, int) and step > 0
    if isinstance(ranks, int) and 0 < ranks <= MOST_RANKS:
        reading.members.append((began, ranks))
    is_new_process = event.get("reason") == "start"
    is_recorded = any(reading.last_s <= end <= time for end in ends_s)
    if is_new_process and not reading.ended and reading.last_s and not is_recorded:
        summary = "the process wrote nothing more, and no supervisor recorded why"
        reading.incidents.append(
            Incident(
                time=reading.last_s,
                cause=NO_WORD,
                summary=summary,
                action="somebody started it again",
                remedy="Start it with `bloomery launch --supervise`, which finds the cause.",
                sure=False,
                step=reading.step,
            )
        )
    if is_new_process:
        reading.ended = reading.finished = False


def _take_refused_save(reading: _Reading, event: Event, time: float) -> None:
    why = str(event.get("why", ""))
    last = reading.incidents[-1] if reading.incidents else None
    if last is not None and last.cause == SAVE_REFUSED and last.summary == why:
        reading.incidents[-1] = replace(last, times=last.times + 1)
        return
    reading.incidents.append(
        Incident(
            time=time,
            cause=SAVE_REFUSED,
            summary=why,
            action="the training went on and tries again",
            remedy="Free space or inodes where the message says.",
            step=reading.step,
        )
    )


def _failures(operations: Sequence[Event]) -> list[Incident]:
    ends = {str(event.get("attempt")): event for event in operations if event["event"] == "attempt_end"}
    incidents = []
    for event in operations:
        time = time_of(ends.get(str(event.get("attempt")), event)) or time_of(event)
        if event["event"] != "diagnosis" or time is None:
            continue
        gives_up, evidence = event.get("gives_up"), event.get("evidence")
        incidents.append(
            Incident(
                time=time,
                cause=str(event.get("cause", "unknown")),
                culprit=_culprit(event.get("culprit")),
                summary=str(event.get("summary", "")),
                evidence=tuple(map(str, evidence)) if isinstance(evidence, list) else (),
                action=f"not started again: {gives_up}" if gives_up else "started again by the supervisor",
                remedy=str(event.get("remedy", "")),
                sure=bool(event.get("sure")),
                step=event["step"] if isinstance(event.get("step"), int) else 0,
            )
        )
    return incidents


def _with_lost_steps(incidents: list[Incident], lost_at: Sequence[float]) -> list[Incident]:
    """Return the incidents, each with the number of steps that were lost between the one before and it.

    lost_at: the times of the lost steps, in seconds since 1970.
    """
    result, place, lost = [], 0, sorted(lost_at)
    for incident in incidents:
        begin = place
        if incident.cause != SAVE_REFUSED:
            while place < len(lost) and lost[place] <= incident.time:
                place += 1
        result.append(replace(incident, steps_lost=place - begin))
    return result


def _is_over(operations: Sequence[Event], reading: _Reading) -> bool:
    """Return whether the newest thing recorded is that the run finished, or that somebody stopped it."""
    later = [event for event in _of_the_run(operations) if (time_of(event) or 0.0) > reading.last_s]
    if not later:
        return reading.ended
    if later[-1]["event"] == "job":
        return str(later[-1].get("state")).lower() == "cancelled"
    return later[-1]["event"] == "attempt_end" and later[-1].get("status") in AGREED


def _of_the_run(operations: Sequence[Event]) -> list[Event]:
    """Return the events that say whether the run goes on. A note of next year does not make it longer."""
    return [event for event in operations if event["event"] not in _WORDS_OF_PEOPLE]


def _culprit(record: object) -> str:
    if not isinstance(record, dict):
        return ""
    parts: list[Any] = [record.get("host")]
    parts += [f"GPU {record['gpu']}"] if record.get("gpu") else []
    parts += [f"rank {record['rank']}"] if record.get("rank") is not None else []
    return ", ".join(str(part) for part in parts if part)


def _change(name: str, event: Event) -> str:
    shown: dict[str, Json] = {
        key: value for key, value in event.items() if key not in ("event", "time", "incarnation", "step")
    }
    words = ", ".join(f"{key} {value}" for key, value in shown.items())
    return f"step {event.get('step')}: {name.replace('_', ' ')}: {words}"


def rewind_words(event: Event) -> str:
    """Return what a `rewind` event did. Its step is the latest allowed; the checkpoint may be earlier."""
    skip = event.get("skip")
    is_skipping = isinstance(skip, list | tuple) and len(skip) == 2 and skip[0] != skip[1]
    without = f" without samples {_range(skip)}" if is_skipping else ""
    return f"went back to step {event.get('to_step')} or the checkpoint before it{without}"


def _range(samples: object) -> str:
    return f"{samples[0]}–{samples[1]}" if isinstance(samples, list | tuple) and len(samples) == 2 else "none"
