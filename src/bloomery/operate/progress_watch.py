"""Looks again and again at the heartbeats of one attempt, and says when its ranks stand still."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace

from bloomery import durable
from bloomery.events.heartbeat import RankBeat, interval_of
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.standstill import (
    RankObservation,
    Standstill,
    StandstillLimits,
    judge_progress,
    longest_turns,
    observe_ranks,
)

_PROBE_BYTES = 8192
"""More than file systems keep beside a file's name, so that a full one refuses it."""


_COUNTED_SHARE = 1 / 3
"""Between two looks at most this share of an allowed silence counts."""


class WatchClock:
    """Counts the seconds during which a watcher really watched, at most so many between two looks.

    A watcher that stood still itself, in a machine that was frozen or for a file server that failed over,
    meets old signs of life, and must not take those for silent that stood still with it.
    """

    def __init__(self) -> None:
        self._looked, self._counted_s = time.monotonic(), 0.0

    def look(self, *, most_s: float) -> float:
        """Return the seconds counted so far. Call it after the signs of life were read."""
        now = time.monotonic()
        self._counted_s += min(now - self._looked, most_s)
        self._looked = now
        return self._counted_s


class ProgressWatch:
    """What a supervisor has seen of the ranks of one attempt."""

    def __init__(self, rundir: RunDirectory, limits: StandstillLimits) -> None:
        self._rundir, self._limits, self._clock = rundir, limits, WatchClock()
        self._seen: dict[int, RankObservation] = {}

    def look(self, beats: Mapping[int, RankBeat], measured_s: Mapping[str, float]) -> Standstill | None:
        """Take the heartbeats that were read just now; return why the ranks count as standing still, or None.

        Ranks are not silent where no heartbeat can be written: on a full disk they may train in memory.

        measured_s: the longest turn of each activity in earlier attempts, in seconds.
        """
        interval_s = max((interval_of(beat.world) for beat in beats.values()), default=0.0)
        now = self._clock.look(most_s=max(_COUNTED_SHARE * self._limits.silence_s, interval_s))
        self._seen = observe_ranks(self._seen, beats, now=now)
        if not self._seen:
            return self._without_word(now)
        standstill = judge_progress(self._seen, now=now, limits=self._limits, measured_s=measured_s)
        if standstill is None or not standstill.silent or takes_heartbeats(self._rundir):
            return standstill
        for rank in standstill.silent:
            self._seen[rank] = replace(self._seen[rank], written_s=now, moved_s=now)
        return None

    def _without_word(self, now: float) -> Standstill | None:
        """Return why ranks that have never written a heartbeat stand still, in their imports for instance."""
        allowed_s = self._limits.unmeasured_s
        if now <= allowed_s or not takes_heartbeats(self._rundir):
            return None
        return Standstill(kind="silent", silent=(), still_s=now, allowed_s=allowed_s)

    def longest_turns(self, measured_s: Mapping[str, float]) -> dict[str, float]:
        """Return the longest turn of each activity in this attempt and those before it, in seconds."""
        return longest_turns(self._seen, measured_s)


def takes_heartbeats(rundir: RunDirectory) -> bool:
    """Return whether this process can write a new file where the heartbeats are."""
    probe = rundir.heartbeat(rank=0).with_name(f".probe-{os.uname().nodename}-{os.getpid()}")
    try:
        durable.write_whole_unsynced(probe, "\n" * _PROBE_BYTES)
        probe.unlink()
    except OSError:
        return False
    return True
