"""Builds the tables of a run's page: checkpoints, goodput by class of time, and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, copies_of
from bloomery.checkpoint.format.manifest import parse_name
from bloomery.checkpoint.format.retention import prune_plan
from bloomery.config.recipe import Recipe
from bloomery.errors import BloomeryError
from bloomery.events.heartbeat import RankActivity
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.step_columns import SPENT
from bloomery.operate.ledger.figures import PlannedRun, ledger_figures
from bloomery.operate.ledger.run_ledger import read_ledger
from bloomery.operate.ledger.time_class import MEANINGS
from bloomery.plan.schedule import steps_of_peer

MOST_LEDGER_BYTES = 256 << 20
"""The most bytes of a journal for which a page shows the ledger; of larger ones `bloomery report` does."""
_WAIT_PER_COST = 200
"""The seconds to wait, for each second of a core that a table took, before it is computed again."""
_SHOWN_SAVES, _SHOWN_INCIDENTS = 60, 100

T = TypeVar("T")


class CachedValue(Generic[T]):
    """A value that is computed again at most every `least_s` seconds, less often the more of a core it takes.

    A wait for a disk or a scheduler does not count: after one of a minute the value would be hours old.

    wait_per_cost: seconds to wait for each second of a core that computing it took.
    """

    def __init__(
        self, compute: Callable[[], T], *, least_s: float, wait_per_cost: float = _WAIT_PER_COST
    ) -> None:
        self._compute, self._least_s, self._wait_per_cost = compute, least_s, wait_per_cost
        self._value: T | None = None
        self._due = 0.0

    def expire(self) -> None:
        """Have the value computed anew when it is asked for next."""
        self._due = 0.0

    def get(self) -> T:
        """Return the value, computing it where it is due."""
        began = time.monotonic()
        if self._value is None or began >= self._due:
            is_first = self._value is None  # which also pays for imports, and tells nothing of the next
            spent_s = time.thread_time()
            self._value = self._compute()
            cost_s = 0.0 if is_first else time.thread_time() - spent_s
            self._due = time.monotonic() + max(self._least_s, self._wait_per_cost * cost_s)
        return self._value


class SaveRow(msgspec.Struct, kw_only=True):
    """One checkpoint.

    blocked_s: the seconds for which it stopped the training.
    durable: whether it was committed. time: when, in seconds since 1970.
    kept: why it is kept; "" where it is no longer there.
    backed_up: whether a verified copy is elsewhere.
    """

    name: str
    step: int
    time: float | None
    blocked_s: float | None
    durable: bool
    backed_up: bool
    kept: str


def newest_first(names: Iterable[str]) -> list[str]:
    """Return the names of checkpoints by step and incarnation; what is no such name comes last."""
    return sorted(names, key=lambda name: (parse_name(name) or (0, 0), name), reverse=True)


def saves(reader: RunReader, recipe: Recipe | None) -> list[SaveRow]:
    """Return the newest checkpoints, newest first: those on the disk, and those in the journal."""
    kept_names = _kept_checkpoints(reader, recipe)
    with reader.lock:
        names = newest_first({*kept_names, *list(reader.news.saves)[-_SHOWN_SAVES:]})[:_SHOWN_SAVES]
    copies = copies_of(reader.rundir, filter(parse_name, names)) if kept_names else {}
    with reader.lock:
        rows = []
        for name in names:
            event = reader.news.saves.get(name, {})
            step = event.get("step", kept_names[name][0] if name in kept_names else 0)
            rows.append(
                SaveRow(
                    name=name[:80],
                    step=step if isinstance(step, int) else 0,
                    time=event.get("time"),
                    blocked_s=_blocked_s(reader, step),
                    durable=name in kept_names or bool(event),
                    backed_up=name in copies,
                    kept=kept_names[name][1] if name in kept_names else "",
                )
            )
    return rows


def _kept_checkpoints(reader: RunReader, recipe: Recipe | None) -> dict[str, tuple[int, str]]:
    """Return (step, why it is kept) of each checkpoint on the disk, by its name."""
    if recipe is None or not reader.rundir.checkpoints.is_dir():
        return {}
    length = steps_of_peer(recipe.train, recipe.elastic, sequence_length=recipe.data.sequence_length)

    def is_committed(checkpoint: CommittedCheckpoint) -> bool:
        return True  # whoever looks on does not read gigabytes to verify them

    try:
        decisions = prune_plan(
            reader.rundir, section=recipe.checkpoint, run_length_steps=length, is_intact=is_committed
        )
    except (BloomeryError, OSError):
        return {}  # the directory changed under the listing: the next call sees it
    return {
        item.checkpoint.name: (item.checkpoint.step, ", ".join(item.why) or "to be removed")
        for item in decisions
    }


def _blocked_s(reader: RunReader, step: object) -> float | None:
    """Return the seconds that the step after a save told to have spent in saving."""
    columns, name = reader.columns, f"{SPENT}{RankActivity.SAVING}"
    if not isinstance(step, int) or name not in columns.figures:
        return None
    steps = columns.numbers("step", columns.kept)
    row = int(np.searchsorted(steps, step, "right"))
    if not row or row >= len(steps) or steps[row - 1] != step:
        return None
    seconds = float(columns.numbers(name, columns.kept)[row])
    return seconds if np.isfinite(seconds) else None


def goodput(reader: RunReader, plan: PlannedRun | None = None) -> dict[str, Any]:
    """Return where the time went, by class and by cause, or under `problem` why that is not known.

    plan: what was forecast, which then stands beside what came.
    """
    try:
        size = sum(path.stat().st_size for path in reader.rundir.journals()[:1])
        if size > MOST_LEDGER_BYTES:
            command = f"bloomery report {reader.rundir.as_word()}"
            return {"problem": f"The journal has {size / 1e6:,.0f} MB: `{command}` counts it."}
        ledger = read_ledger(reader.rundir, ranks="first")
    except (BloomeryError, OSError) as damage:
        return {"problem": f"It cannot be counted: {damage}"}
    if ledger is None:
        return {"problem": "Nothing has trained here yet."}
    figures = ledger_figures(ledger, plan)
    wanted = ("seconds", "shares", "effective_time", "ettr", "token_goodput", "causes", "elapsed_s")
    shown = {name: figures[name] for name in wanted} | ({"plan": figures["plan"]} if plan else {})
    shown["meanings"] = {
        str(kind): text for kind, text in MEANINGS.items() if str(kind) in figures["seconds"]
    }
    shown["incidents"] = [
        {
            name: incident[name]
            for name in ("time", "cause", "culprit", "action", "remedy", "steps_lost", "seconds")
        }
        for incident in figures["incidents"][-_SHOWN_INCIDENTS:]
    ]
    return shown


def events_with_places(reader: RunReader) -> list[dict[str, Any]]:
    """Return what happened, oldest first, each with its place on every axis."""
    with reader.lock:
        events = sorted(reader.news.events, key=lambda event: event.time)
        places = list(reader.axes_of_events(events))
    return [{**asdict(event), "at": place} for event, place in zip(events, places, strict=True)]
