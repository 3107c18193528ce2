"""Jobs of one machine's queue that outlive the process of the queue: whether they run, and how they ended.

Only the parent of a process learns its exit status. A later process of the queue can watch such a job, signal
it and end it; whether it ended well is what the run's own journal says.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from bloomery.events.journal import read_tail
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.schedulers.interface import JobState

_SAME_S = 1.0
_TAIL_BYTES = 1 << 18


def began_at(pid: int) -> float:
    """Return when a process began, in seconds since 1970; 0.0 where it is gone."""
    with suppress(psutil.Error):
        return float(psutil.Process(pid).create_time())
    return 0.0


def runs_still(pid: int, *, began: float) -> bool:
    """Return whether the process that began at `began`, in seconds since 1970, has not ended."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return abs(process.create_time() - began) < _SAME_S and process.status() != psutil.STATUS_ZOMBIE
    return False


def outcome_without_status(run: Path, *, started: float) -> tuple[JobState, str]:
    """Return the state of a job whose exit status nobody has, and the reason to show.

    It ended well where the journal of the run's first rank has an `end` without a failure since the job
    started (seconds since 1970).
    """
    last = {}
    with suppress(OSError):
        for event in read_tail(RunDirectory(run).journal(), most_bytes=_TAIL_BYTES):
            if event["event"] in ("start", "end") and float(event["time"]) >= started:
                last = event
    if last.get("event") == "end" and not last.get("failed"):
        return JobState.ENDED, "its exit status is lost; the journal says that it ended well"
    return (
        JobState.FAILED,
        "its exit status is lost, and the journal has no good end",
    )
