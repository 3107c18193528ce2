"""Reads a journal whose clock may have been set back, so that later lines have later times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bloomery.events.journal import read_numbered
from bloomery.operate.ledger.operations import Event, finite, seconds_of, time_of

_SET_BACK_S = 60.0
"""Times that fall by less are those of another node of the run, or of a clock that is being corrected."""
_TIME = re.compile(rb'"time": ?([0-9.]+)')


class _SetBack(NamedTuple):
    """A line before which the clock was set back, and by how many seconds."""

    line: int
    seconds: float


def read_steadily(path: Path) -> Iterator[Event]:
    """Yield the events of a journal as `read_journal` does, with times on the clock of its last lines.

    Where the clock was set back, the times of all lines before that are moved back by as much. How much that
    is follows from the order of the lines: the next one was written when the time that it measured was over.
    """
    later = _set_back(path)
    shift_s = sum(each.seconds for each in later)
    for number, event in read_numbered(path):
        while later and later[0].line <= number:
            shift_s -= later.pop(0).seconds
        time = time_of(event)
        yield event if time is None or not later else {**event, "time": time - shift_s}


def _set_back(path: Path) -> list[_SetBack]:
    """Return where the clock was set back, in the order of the lines.

    Only times are looked for, which takes a tenth of the time that parsing takes. One line whose time alone
    is too early or too late is damage; a clock that was set back by less than the time of two lines looks
    alike, and is left. Where times fall and jump ahead in turns, two machines whose clocks
    differ wrote the lines, and none was set back.
    """
    places: list[_SetBack] = []
    before: float | None = None  # the line before `last`
    last: float | None = None
    fallen: tuple[int, float, bytes] | None = None  # it waits for the line after it
    jumped_s = 0.0  # the longest time between two lines since the last place
    for number, time, line in _times(path):
        if fallen is not None and last is not None:
            if time < last:
                if places and jumped_s >= places[-1].seconds - _SET_BACK_S:
                    return []
                places.append(_SetBack(fallen[0], last - fallen[1] + _measured_s(fallen[2])))
                before, last, jumped_s = last, fallen[1], 0.0
            fallen = None
        if last is not None and last - time > _SET_BACK_S and (before is None or before > time):
            fallen = (number, time, line)
        else:
            jumped_s = max(jumped_s, time - last) if last is not None else 0.0
            before, last = last, time
    if fallen is not None and last is not None:
        places.append(_SetBack(fallen[0], last - fallen[1] + _measured_s(fallen[2])))
    return places


def _times(path: Path) -> Iterator[tuple[int, float, bytes]]:
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file):
                found = _TIME.search(line)
                time = time_of({"time": _number(found[1])}) if found else None
                if time is not None:
                    yield number, time, line


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _measured_s(line: bytes) -> float:
    """Return the seconds that an event measured since the one before it; 0.0 where it holds none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(event, dict):
        return 0.0
    return sum(seconds_of(event.get("spent")).values()) or max(0.0, finite(event.get("seconds")) or 0.0)
