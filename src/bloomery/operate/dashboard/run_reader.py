"""Follows the journals of one run: its steps as columns, its events and saves, and unreadable files.

It reads files and nothing else, so that whoever looks on costs the training nothing.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bloomery import __version__
from bloomery.errors import BloomeryError
from bloomery.events.incarnation import Base, read_incarnations
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.dashboard.growing_file import SLICE_BYTES, GrowingFile
from bloomery.operate.dashboard.run_events import Event, ShownEvent, shown_event
from bloomery.operate.dashboard.step_columns import StepColumns, StepLine
from bloomery.operate.ledger.operations import finite

_MOST_EVENTS, _MOST_ROUNDS, _MOST_SAVES = 3000, 2000, 2000
_LONG = ("recipe", "spent")
_STUCK_POLLS = 3
"""The number of polls that see an unfinished last line unchanged before it counts as torn."""


@dataclass
class JournalNews:
    """The events of a run's journals other than its steps, by kind. Each list has a bounded length.

    saves: the newest event of each checkpoint, by its name.
    rounds: the events of a peer's rounds.
    start: the newest start; {} where there was none. last: the newest start or end, or {}.
    versions: those that wrote the journal.
    """

    events: deque[ShownEvent] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    rounds: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST_ROUNDS))
    saves: dict[str, Event] = field(default_factory=dict)
    start: Event = field(default_factory=dict)
    last: Event = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    failed_save: str = ""
    number: int = 0
    unread_lines: int = 0
    is_refusing: bool = False


class RunReader:
    """Follows the journals of a run. Every method takes the lock, so that a poller and viewers share it.

    version: grows with each change, so that callers can tell that what they made of an earlier one is old.
    """

    def __init__(self, path: Path) -> None:
        self.rundir = RunDirectory(path)
        self.name = self.rundir.name
        self.lock = threading.RLock()
        self.version = 0
        self.columns = StepColumns()
        self.news = JournalNews()
        self._decoder = msgspec.json.Decoder(StepLine)
        self._names: tuple[str, ...] | None = None
        self._damage, self._was_there, self._is_there = "", False, False
        self.fork_of = ""
        self._torn_polls = 0
        self._last_torn = (-1, -1)
        self._open()

    def _open(self) -> None:
        self._steps = GrowingFile(first_journal(self.rundir))
        self._operations = GrowingFile(self.rundir.operations)
        self._rounds = GrowingFile(self.rundir.rounds)

    def poll(self) -> bool:
        """Read the next part of each journal, at most a few megabytes; returns whether anything changed."""
        with self.lock:
            before = (self._facts(), self.problems())
            self._look_at_directory()
            if self._steps.is_missing:
                self._steps.path = first_journal(self.rundir)
            generations = self._generations()
            steps = self._steps.lines(most_bytes=SLICE_BYTES)
            others = [*self._operations.lines(), *self._rounds.lines()]
            if self._generations() != generations:
                self._begin_again()
                return True
            self._take_steps(steps)
            for line in others:
                self._take_other(line)
            self._watch_torn_line()
            is_changed = bool(steps or others) or before != (self._facts(), self.problems())
            self.version += is_changed
            return is_changed

    @property
    def is_behind(self) -> bool:
        """Whether the journals hold more than was read."""
        return any(tail.is_behind for tail in self._tails())

    @property
    def read_share(self) -> float:
        """How much of the journals was read."""
        size = sum(tail.size for tail in self._tails())
        return sum(tail.read_bytes for tail in self._tails()) / size if size else 1.0

    def read_all(self) -> RunReader:
        """Read to the ends of the journals and return self; for callers that read them once."""
        self.poll()
        while self.is_behind:
            self.poll()
        return self

    def problems(self) -> list[str]:
        """Return what is wrong with the run's files, one sentence each; [] where they can be read."""
        path = self.rundir.path
        if not self._is_there:
            if self._was_there:
                return [f"{path} has vanished. What was read of it before is shown."]
            what = "is no run directory" if path.exists() else "does not exist"
            return [f"{path} {what}. Give the directory that `bloomery train` names."]
        problems = [self._damage] if self._damage else []
        problems += [f"{tail.path} cannot be read: {tail.error}." for tail in self._tails() if tail.error]
        if self.is_behind:
            problems.append(f"The journal is being read: {self.read_share:.0%} so far.")
        elif self._steps.is_missing:
            problems.append(
                f"{self._steps.path} does not exist: nothing has trained here yet, or it was removed."
            )
        if self._torn_polls >= _STUCK_POLLS:
            problems.append(
                "The last line of the journal is unfinished: its writer ended in the middle of it."
            )
        if self.news.unread_lines:
            problems.append(f"{self.news.unread_lines:,} lines of the journals are damaged, and left out.")
        newer = [version for version in sorted(self.news.versions) if _is_newer(version)]
        if newer:
            problems.append(
                f"bloomery {newer[-1][:40]} wrote this journal, and this is {__version__}: "
                "what only the newer one knows is shown by its fields, or not at all."
            )
        return problems

    def _tails(self) -> tuple[GrowingFile, ...]:
        return self._steps, self._operations, self._rounds

    def _generations(self) -> tuple[int, ...]:
        return tuple(tail.generation for tail in self._tails())

    def _facts(self) -> tuple[object, ...]:
        return self._is_there, self._damage, self._names, self._steps.size

    def _begin_again(self) -> None:
        """Forget everything: a journal was replaced or cut."""
        self.columns, self.news = StepColumns(), JournalNews()
        self._names = None
        self._open()
        self.version += 1

    def _look_at_directory(self) -> None:
        self._is_there = self.rundir.exists() or self.rundir.operations.exists()
        self._was_there = self._was_there or self._is_there
        try:
            names = tuple(sorted(path.name for path in self.rundir.incarnations.glob("*.json")))
            if names != self._names:
                bases = read_incarnations(self.rundir)
                self.columns.set_incarnations(bases)
                self.fork_of = _origin(self.rundir, bases)
                self._names, self._damage = names, ""
        except BloomeryError as damage:
            self._damage, self._names = damage.message, names
        except OSError as refused:
            self._damage = f"{self.rundir.incarnations} cannot be read: {refused.strerror}."

    def _watch_torn_line(self) -> None:
        torn = (self._steps.read_bytes, self._steps.torn)
        self._torn_polls = self._torn_polls + 1 if torn[1] and torn == self._last_torn else 0
        self._last_torn = torn

    def _take_steps(self, lines: Sequence[bytes]) -> None:
        steps: list[StepLine] = []
        for line in lines:
            if not line.strip():
                continue
            try:
                record = self._decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.news.unread_lines += 1
                continue
            if record.event == "step" and record.step >= 0:
                steps.append(record)
                self._watch_step(record)
            elif record.event != "step":
                self.columns.extend(steps)  # so that the event finds the steps before it
                steps = []
                self._take_other(line)
        self.columns.extend(steps)

    def _watch_step(self, line: StepLine) -> None:
        """Note the first of steps in a row whose loss is not finite, or whose update was refused."""
        is_finite = isinstance(line.loss, int | float) and math.isfinite(line.loss)
        if (line.update_applied and is_finite) or self.news.is_refusing:
            self.news.is_refusing = not (line.update_applied and is_finite)
            return
        self.news.is_refusing = True
        kind = "update_refused" if is_finite else "loss_not_finite"
        text = f"loss {line.loss}, gradient norm {line.gradient_norm}; the update was " + (
            "made" if line.update_applied else "refused"
        )
        self._show(
            {"event": kind, "time": line.time, "step": line.step, "incarnation": line.incarnation, "": text}
        )

    def _take_other(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            name = event["event"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self.news.unread_lines += bool(line.strip())
            return
        if name in ("start", "end"):
            self.news.last = {key: value for key, value in event.items() if key not in _LONG}
        if name == "checkpoint":
            self.news.saves[str(event.get("path"))] = event
            while len(self.news.saves) > _MOST_SAVES:
                self.news.saves.pop(next(iter(self.news.saves)))
            self.news.failed_save = ""
        elif name == "checkpoint_failed":
            self.news.failed_save = f"no checkpoint at step {event.get('step')}: {event.get('why', '')}"
        elif name == "evaluation":
            self._take_evaluation(event)
        elif name == "start":
            self.news.start = self.news.last
            self._note_version(event)
        if "round" in event:
            self.news.rounds.append(event)
        self._show(event)

    def _show(self, event: Event) -> None:
        shown = shown_event(event, number=self.news.number)
        if shown is not None:
            self.news.events.append(shown)
            self.news.number += 1

    def _take_evaluation(self, event: Mapping[str, Any]) -> None:
        loss = finite(event.get("held_out_loss"))
        if loss is not None and len(self.columns):
            by_dataset = event.get("held_out_by_dataset")
            self.columns.add_held_out(loss, by_dataset if isinstance(by_dataset, dict) else {})

    def _note_version(self, event: Mapping[str, Any]) -> None:
        versions = event.get("versions")
        if isinstance(versions, dict) and len(self.news.versions) < _MOST_SAVES:
            self.news.versions.add(str(versions.get("bloomery", "")))

    def axes_of_events(self, events: Sequence[ShownEvent]) -> Iterator[dict[str, float]]:
        """Yield where each event stands on every axis: at the last step that was written before it."""
        times = self.columns.axes["time"].values
        if not len(times):
            yield from ({"time": event.time} for event in events)
            return
        rows = np.searchsorted(times, [event.time for event in events], "right") - 1
        for event, row in zip(events, np.maximum(rows, 0), strict=True):
            place = {name: float(axis.values[row]) for name, axis in self.columns.axes.items()}
            yield (
                place | {"time": event.time} | ({"step": float(event.step)} if event.step is not None else {})
            )


def _origin(rundir: RunDirectory, bases: Mapping[int, Base | None]) -> str:
    """Return which run a run was forked from, and at which step; "" for one that began by itself.

    A fork keeps the records of the incarnations that led to it, each of which names the run of before.
    """
    inherited = ""
    for number in sorted(bases):
        base = bases[number]
        origin = json.loads(rundir.incarnation(number).read_bytes()).get("fork_of")
        if not isinstance(origin, str):
            return f"{inherited}, at step {base[0]:,}" if inherited and base else inherited
        inherited = origin
    return inherited


def first_journal(rundir: RunDirectory) -> Path:
    """Return the journal of the first rank; where there is none by that name, the first journal that is."""
    path = rundir.journal()
    if not path.exists():
        return next(iter(rundir.journals()), path)
    return path


def _is_newer(version: str) -> bool:
    """Return whether a version of bloomery is later than this one; False for a text that is no version."""
    try:
        theirs = [int(part) for part in version.split(".")[:3]]
        ours = [int(part) for part in __version__.split("+")[0].split(".")[:3]]
    except ValueError:
        return False
    return theirs > ours
