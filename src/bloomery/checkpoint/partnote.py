"""What a rank leaves in a save's `.partial` directory for the one that commits: its part, or why not."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bloomery.checkpoint.commit import Part
from bloomery.errors import BloomeryError, StorageError

_POLL_S = 0.01


def note_of(partial: Path, rank: int) -> Path:
    """Return where a rank leaves its note."""
    return partial / f"part-r{rank:05d}.json"


def leave_part(partial: Path, rank: int, part: Part) -> None:
    """Say that a rank's files are durable. Raises OSError."""
    _leave(partial, rank, {"part": part.to_json()})


def part_left(partial: Path, rank: int) -> Part | None:
    """Return the part that a rank has left; None where it has not. Raises OSError."""
    try:
        content = json.loads(note_of(partial, rank).read_bytes())
    except FileNotFoundError:
        return None
    return Part.from_json(content["part"]) if "part" in content else None


def wait_for_part(partial: Path, rank: int, *, until: float) -> Part:
    """Wait until a rank has written its part, and return it. The note stays. Raises StorageError.

    until: on the monotonic clock.
    """
    path = note_of(partial, rank)
    while not path.exists():
        if not partial.exists():
            raise StorageError(f"{partial} has vanished", remedy="Is the disk still mounted?")
        if time.monotonic() > until:
            raise StorageError(
                f"Saving a checkpoint was given up: rank {rank} has not written its part of {partial.name} "
                "in time",
                remedy="Look at that rank's log and its disk; the next save is tried as usual.",
            )
        time.sleep(_POLL_S)
    content = json.loads(path.read_bytes())
    if "failure" in content:
        failure = content["failure"]
        raise StorageError(f"rank {rank}: {failure['message']}", remedy=failure["remedy"])
    return Part.from_json(content["part"])


def give_up(partial: Path, rank: int, *, files: Iterable[str], why: Mapping[str, str]) -> None:
    """Make room again after a save that failed, and let the rank that commits know at once.

    That one, the first, removes the directory; another its own files, unless its part was left: it may be
    committed at any moment. Only while nothing new is saved under that name: whoever saves begins no second
    time before the first is over.
    """
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        return
    with contextlib.suppress(OSError):  # the first rank has given up, or committed, before us
        if part_left(partial, rank) is not None:
            return
        _leave(partial, rank, {"failure": why})
        for name in files:
            (partial / name).unlink(missing_ok=True)


def told(error: BaseException) -> dict[str, str]:
    """Return an error as JSON."""
    if isinstance(error, BloomeryError):
        kind = "storage" if isinstance(error, StorageError) else "checkpoint"
        return {"kind": kind, "message": error.message, "remedy": error.remedy}
    if isinstance(error, OSError):
        return {"kind": "storage", "message": str(error), "remedy": "Look at the disk (dmesg, df)."}
    import traceback

    text = "".join(traceback.format_exception(error))
    return {"kind": "checkpoint", "message": f"the writer failed:\n{text}", "remedy": "Please report this."}


def _leave(partial: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Leave a note, all of it at once."""
    path = note_of(partial, rank)
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path)
