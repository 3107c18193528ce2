"""The heartbeat file of a rank: its newest step and the time, for processes that watch the run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.errors import storage_error


class Heartbeat:
    """Writes step and clock of one rank, whole or not at all, at most once per `interval_s`."""

    def __init__(self, path: Path, *, incarnation: int = 0, interval_s: float = 1.0) -> None:
        self.path = path
        self.incarnation = incarnation
        self._interval_s = interval_s
        self._last = -float("inf")

    def beat(self, step: int, *, at_once: bool = False) -> None:
        """Say that `step` is done; `at_once` does not wait for the interval. Raises StorageError."""
        now = time.monotonic()
        if not at_once and now - self._last < self._interval_s:
            return
        self._last = now
        record = {
            "step": step,
            "time": round(time.time(), 3),
            "incarnation": self.incarnation,
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
        write_unsynced(self.path, json.dumps(record) + "\n")


def read_heartbeat(path: Path) -> dict[str, Any] | None:  # Any: parsed JSON
    """Return the last heartbeat, or None when there never was one."""
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def write_unsynced(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old text or the new one. Raises StorageError.

    Not synced: it tells of the living, and after a power cut nobody is.
    """
    try:
        durable.write_whole_unsynced(path, text)
    except OSError as error:
        raise storage_error(error, path=path, doing="Writing") from error
