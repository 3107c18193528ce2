"""Yields the new events of a run directory, or of a mirror of one, as lines of text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from bloomery.events.run_directory import RunDirectory
from bloomery.operate.dashboard.growing_file import GrowingFile
from bloomery.operate.dashboard.run_events import shown_event
from bloomery.operate.dashboard.run_reader import first_journal
from bloomery.operate.ledger.operations import LATEST_TIME, finite

Event = Mapping[str, Any]  # Any: a parsed line of a journal


class RunTail:
    """Follows the first rank's journal and the operations of a run.

    every_steps: of the steps, only multiples of this are shown.
    """

    def __init__(self, rundir: RunDirectory, *, every_steps: int) -> None:
        self._rundir, self._every_steps = rundir, every_steps
        self._journals = [GrowingFile(first_journal(rundir)), GrowingFile(rundir.operations)]

    def new_lines(self) -> Iterator[str]:
        """Yield a line for each event since the last call, in the order of their times within one read."""
        if self._journals[0].is_missing:
            self._journals[0].path = first_journal(self._rundir)
        while True:
            events = [event for journal in self._journals for event in _parsed(journal.lines())]
            for event in sorted(events, key=lambda event: finite(event.get("time")) or 0.0):
                line = self._line(event)
                if line:
                    yield f"{_clock(finite(event.get('time')))} {line}"
            if not any(journal.is_behind for journal in self._journals):
                return

    def _line(self, event: Event) -> str:
        """Return an event in words; "" for one that is not shown."""
        step, name = event.get("step"), event.get("event")
        if name == "step":
            is_due = isinstance(step, int) and step % self._every_steps == 0
            return _step_words(event) if is_due else ""
        if name == "checkpoint":
            return _plain(f"step {step}: saved {event.get('path')}")
        if name == "evaluation":
            loss = finite(event.get("held_out_loss"))
            return "" if loss is None else _plain(f"step {step}: held-out loss {loss:.4f}")
        shown = shown_event(event, number=0)
        if shown is None:
            return ""
        where = f"step {shown.step}: " if shown.step else ""
        return _plain(f"{where}{shown.kind}: {shown.text}")


def _parsed(lines: list[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # lists in lists without end
            continue
        if isinstance(event, dict):
            yield event


def _step_words(event: Event) -> str:
    words = [f"step {event['step']}"]
    for name, text in (
        ("loss", "loss {:.4f}"),
        ("gradient_norm", "norm {:.2f}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
    ):
        value = finite(event.get(name))
        words += [text.format(value)] if value is not None else []
    return " | ".join([*words, *([] if event.get("update_applied", True) else ["UPDATE REFUSED"])])


def _plain(text: str) -> str:
    """Return a text in one line without control characters, which a journal from elsewhere may hold."""
    return "".join(character if character.isprintable() else " " for character in text)


def _clock(moment: float | None) -> str:
    if moment is None or not 0 <= moment < LATEST_TIME:
        return "--:--:--"
    return time.strftime("%m-%d %H:%M:%S", time.localtime(moment))
