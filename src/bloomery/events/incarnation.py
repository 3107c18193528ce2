"""Incarnations: the lives of a run, and which of the things they left behind still count.

Each start and each rewind begins a new incarnation that says from which checkpoint it goes on: its *base*.
What an earlier incarnation wrote beyond that base is no longer part of the run, whenever it was written.
So nobody has to stop an old trainer from committing: what it commits is invisible from the start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from bloomery.errors import CheckpointError
from bloomery.events.rundir import RunDir
from bloomery.events.storage import storage_error, sync_directory

Base: TypeAlias = tuple[int, int]
"""(step, incarnation): names a checkpoint."""


def begin(rundir: RunDir, *, base: Base | None, reason: str) -> int:
    """Begin the next incarnation, from the checkpoint `base` or from nothing, and return its number (from 1).

    Two processes that begin at once get different numbers. Raises StorageError.
    """
    record = {
        "format": 1,
        "base": None if base is None else {"step": base[0], "incarnation": base[1]},
        "reason": reason,
        "time": round(time.time(), 3),
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }
    text = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        rundir.incarnations.mkdir(parents=True, exist_ok=True)
        number = max((int(path.stem) for path in _records(rundir)), default=0) + 1
        while not _created(rundir.incarnation(number), text):
            number += 1
        sync_directory(rundir.incarnations)
    except OSError as error:
        raise storage_error(error, path=rundir.incarnations, doing="Beginning an incarnation") from error
    return number


def read_incarnations(rundir: RunDir) -> dict[int, Base | None]:
    """Return the base of each incarnation of the run, by number."""
    bases = {int(path.stem): _base(path) for path in _records(rundir)}
    return {number: base for number, base in bases.items() if not isinstance(base, _Unborn)}


def current(rundir: RunDir) -> int:
    """Return the number of the newest incarnation; 0 when the run was never begun."""
    return max(read_incarnations(rundir), default=0)


def visible(items: Iterable[Base], incarnations: Mapping[int, Base | None]) -> set[Base]:
    """Return those of `items` (checkpoints, or records of steps) that are part of the run.

    (step, incarnation) is hidden when it lies beyond the base of any later incarnation; of two with the same
    step, the later incarnation's lies beyond the earlier's. A later incarnation without a base hides all.
    """
    horizons: dict[int, Base | None] = {}
    shown = set()
    for step, incarnation in items:
        if incarnation not in horizons:
            horizons[incarnation] = _horizon(incarnation, incarnations)
        horizon = horizons[incarnation]
        if horizon is not None and (step, incarnation) <= horizon:
            shown.add((step, incarnation))
    return shown


def _records(rundir: RunDir) -> list[Path]:
    return sorted(path for path in rundir.incarnations.glob("*.json") if path.stem.isdecimal())


def _created(path: Path, text: str) -> bool:
    """Create the record with its text, and say whether the number was still free."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(file, text.encode())
        os.fsync(file)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)
    return True


class _Unborn:
    """A record that a crash left empty: its incarnation never did anything."""


def _base(path: Path) -> Base | _Unborn | None:
    text = path.read_text()
    if not text.strip():
        return _Unborn()
    try:
        base = json.loads(text)["base"]
        return None if base is None else (int(base["step"]), int(base["incarnation"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: it no longer says from which checkpoint this incarnation went on",
            remedy="Restore it from a backup. If its run wrote nothing worth keeping, delete it.",
        ) from error


def _horizon(incarnation: int, incarnations: Mapping[int, Base | None]) -> Base | None:
    """Return the last (step, incarnation) that all later incarnations share; None where there is none."""
    horizon: Base = (2**63, 0)
    for number, base in incarnations.items():
        if number > incarnation:
            if base is None:
                return None
            horizon = min(horizon, base)
    return horizon
