"""Caches the dashboard's answers about one run, so that all its viewers share them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bloomery.events.heartbeat import has_died_here, read_beat
from bloomery.operate.dashboard import panels
from bloomery.operate.dashboard.curves import Axis, curves
from bloomery.operate.dashboard.mesh_panel import mesh_panel
from bloomery.operate.dashboard.panels import CachedValue
from bloomery.operate.dashboard.peer_panel import rounds
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.run_summary import RunSummarizer, RunSummary
from bloomery.operate.ledger.figures import PlannedRun

INTERVAL_S = 2.5
"""How often a viewer gets something new, in seconds."""
_TABLES_EVERY_S, _RANKS_EVERY_S, _GOODPUT_EVERY_S = 10.0, 10.0, 60.0
_MOST_RANKS_LOOKED_AT = 64
_MOST_ANSWERS, _MOST_ANSWER_BYTES = 32, 8 << 20

CurveQuery = tuple[tuple[str, ...], Axis, float | None, float | None, int]
"""Names, axis, begin, end and number of points."""


class ViewedRun:
    """Caches the answers about one run. Each is kept until the run changes, or for some seconds; thread-safe.

    died: ranks whose processes were of this machine and are gone without a last word.
    """

    def __init__(self, path: Path, *, interval_s: float = INTERVAL_S, plan: PlannedRun | None = None) -> None:
        self.reader = RunReader(path)
        self._summarizer = RunSummarizer(self.reader)
        self._lock, self._interval_s = threading.Lock(), interval_s
        self._summary = CachedValue(self._summarizer.summary, least_s=interval_s)
        self._saves = CachedValue(
            lambda: panels.saves(self.reader, self._summarizer.recipe), least_s=_TABLES_EVERY_S
        )
        self._goodput = CachedValue(lambda: panels.goodput(self.reader, plan), least_s=_GOODPUT_EVERY_S)
        self._ranks = CachedValue(
            lambda: mesh_panel(self.reader, self._summarizer.recipe), least_s=_RANKS_EVERY_S
        )
        self._answers: OrderedDict[CurveQuery, tuple[int, bytes]] = OrderedDict()
        self.died: tuple[int, ...] = ()
        self._panels = b""
        self._panels_made, self._panels_version = -1.0, -1

    def check_ranks(self) -> None:
        """Notice at once a rank whose process is gone; viewers then get an update, as of a grown journal."""
        now = time.time()
        first = read_beat(self.reader.rundir.heartbeat())
        others = range(1, min(first.world, _MOST_RANKS_LOOKED_AT) if first is not None else 0)
        beats = [first, *(read_beat(self.reader.rundir.heartbeat(rank=rank)) for rank in others)]
        died = tuple(
            rank for rank, beat in enumerate(beats) if beat is not None and has_died_here(beat, now=now)
        )
        if died == self.died:
            return
        with self._lock:
            self.died = died
            self._summary.expire()
            self._ranks.expire()
            self.reader.version += 1

    def summary(self) -> RunSummary:
        """Return the head of the run's page, at most `interval_s` old."""
        with self._lock:
            return self._summary.get()

    def curves(
        self, names: Sequence[str], *, axis: Axis, begin: float | None, end: float | None, points: int
    ) -> bytes:
        """Return curves as JSON; the same question about an unchanged run gets the bytes of before."""
        query = (tuple(names), axis, begin, end, points)
        version = self.reader.version
        with self._lock:
            known = self._answers.get(query)
            if known is not None and known[0] == version:
                return known[1]
        drawn = curves(self.reader, names, axis=axis, begin=begin, end=end, points=points)
        answer = msgspec.json.encode(drawn)
        with self._lock:
            self._answers[query] = (version, answer)
            self._answers.move_to_end(query)
            kept_bytes = sum(len(stored) for _, stored in self._answers.values())
            while len(self._answers) > _MOST_ANSWERS or (
                kept_bytes > _MOST_ANSWER_BYTES and len(self._answers) > 1
            ):
                kept_bytes -= len(self._answers.popitem(last=False)[1][1])
        return answer

    def tables(self) -> bytes:
        """Return events, checkpoints, where the time went, ranks and rounds as JSON.

        Events and rounds are as new as what was read, the other tables some seconds old at most.
        """
        with self._lock:
            now = time.monotonic()
            version = self.reader.version
            is_old = now - self._panels_made >= self._interval_s
            if is_old or version != self._panels_version:
                panels_by_name = {
                    "events": panels.events_with_places(self.reader),
                    "saves": self._saves.get(),
                    "goodput": self._goodput.get(),
                    "ranks": self._ranks.get(),
                    "rounds": rounds(self.reader),
                }
                self._panels, self._panels_made = msgspec.json.encode(panels_by_name), now
                self._panels_version = version
            return self._panels
