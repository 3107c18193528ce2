"""What is known of the copies of a run's checkpoints elsewhere: `backups/step-000123.i007.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bloomery.checkpoint.manifest import now
from bloomery.events.rundir import RunDir
from bloomery.events.storage import storage_error, sync_directory


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy that was read back and found the same. url: its own; what: "all", or "model" for the weights."""

    url: str
    what: str
    bytes: int
    time: float


def copies(rundir: RunDir) -> dict[str, tuple[Copy, ...]]:
    """Return the verified copies of each checkpoint that has any, by name."""
    found = {path.name.removesuffix(".json"): _read(path) for path in rundir.backups.glob("step-*.json")}
    return {name: listed for name, listed in found.items() if listed}


def is_copied(listed: Iterable[Copy], *, name: str, url: str, what: str) -> bool:
    """Say whether a checkpoint is at a run's place `url`, with all that `what` asks for."""
    place = f"{url.rstrip('/')}/checkpoints/{name}"
    return any(copy.url == place and copy.what in ("all", what) for copy in listed)


def note_copy(rundir: RunDir, name: str, *, url: str, what: str, bytes: int) -> None:
    """Note durably that a checkpoint was copied to `url` and verified there. Raises StorageError."""
    path = rundir.backups / f"{name}.json"
    others = [copy for copy in _read(path) if copy.url != url]
    listed = [*others, Copy(url=url, what=what, bytes=bytes, time=now())]
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"copies": [asdict(copy) for copy in listed]}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise storage_error(error, path=path, doing="Noting a backup") from error


def _read(path: Path) -> tuple[Copy, ...]:
    """Return what a record says; nothing where it says nothing: then it is copied again, and found there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed = content.get("copies", [content])  # before 0.1 it was one copy
        return tuple(
            Copy(**{field: one[field] for field in ("url", "what", "bytes", "time")}) for one in listed
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
