"""Incarnations of a run: each start and rewind writes a file that says which earlier checkpoints count.

A new incarnation names the checkpoint it continues from, its *base*. What earlier incarnations wrote beyond
that base is no longer part of the run, even if it is written later. An old trainer that still runs therefore
need not be stopped before its checkpoints are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from bloomery import durable
from bloomery.errors import CheckpointError, StorageError, storage_error
from bloomery.events.run_directory import RunDirectory

Base: TypeAlias = tuple[int, int]
"""(step, incarnation): names a checkpoint."""


def begin(
    rundir: RunDirectory,
    *,
    base: Base | None,
    reason: str,
    claim: Callable[[int, str], bool] = lambda number, record: True,
) -> int:
    """Begin the next incarnation, from the checkpoint `base` or from nothing, and return its number (from 1).

    Two processes that begin at once get different numbers. Raises StorageError.

    claim: creates the record where other machines look for it too; says whether the number was still free
        there. What it raises is raised.
    """
    record = {
        "format": 1,
        "base": None if base is None else {"step": base[0], "incarnation": base[1]},
        "reason": reason,
        "time": round(time.time(), 3),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "token": secrets.token_hex(
            8
        ),  # no two records are equal: whose an exclusive creation was is read back
    }
    text = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        durable.make_directory(rundir.incarnations)
        number = max((int(path.stem) for path in _records(rundir)), default=0) + 1
    except OSError as error:
        raise _not_begun(rundir, error) from error
    while not claim(number, text) or not _created(rundir, number, text):
        number += 1
    return number


def read_incarnations(rundir: RunDirectory) -> dict[int, Base | None]:
    """Return the base of each incarnation of the run, by number."""
    return bases_of({str(path): path.read_bytes() for path in _records(rundir)})


def bases_of(records: Mapping[str, bytes]) -> dict[int, Base | None]:
    """Return the base of each incarnation by number.

    records: the content of each record by its path or URL, which ends in `/NUMBER.json`.
    Raises CheckpointError when a record is damaged.
    """
    bases = {_number(place): _base(place, content) for place, content in records.items()}
    return {number: base for number, base in bases.items() if not isinstance(base, _EmptyRecord)}


def identity(rundir: RunDirectory) -> str:
    """Return a text that differs between runs, also at the same path; "" before the first incarnation."""
    for path in _records(rundir):
        content = path.read_bytes()
        if content.strip():
            return hashlib.sha256(content).hexdigest()[:16]
    return ""


def merge_records(rundir: RunDirectory, records: Mapping[str, bytes]) -> None:
    """Add the incarnations that a copy of this run has and this directory lacks.

    When the directory had none, it has all or none of them afterwards, even if the process is killed.

    records: the content of each record of the copy by its path or URL.
    Raises CheckpointError when the records belong to another run, or when both the copy and this directory
    have continued the run; and StorageError.
    """
    theirs = {_number(place): (place, content) for place, content in records.items() if content.strip()}
    ours = {int(path.stem): path.read_bytes() for path in _records(rundir)}
    for number, content in sorted(ours.items()):
        if content.strip() and number in theirs and theirs[number][1] != content:
            if is_same_run(rundir, records):
                raise _parted(rundir, number, theirs[number][0])
            raise CheckpointError(
                f"{theirs[number][0]} belongs to another run than {rundir.path}",
                remedy="Choose another run.name or backup.url, or another --run.",
            )
    missing = {number: theirs[number][1] for number in theirs if not ours.get(number, b"").strip()}
    try:
        if missing and not ours:
            _adopt_all(rundir, missing)
        for number, content in sorted(missing.items()) if ours else ():
            durable.write_whole(rundir.incarnation(number), content)
    except OSError as error:
        raise storage_error(error, path=rundir.incarnations, doing="Fetching the incarnations") from error


def is_same_run(rundir: RunDirectory, records: Mapping[str, bytes]) -> bool:
    """Return whether the first incarnation that a copy and this directory both have is the same.

    A power cut may have left a record empty, here or there: it counts as missing.
    """
    theirs = {_number(place): content for place, content in records.items() if content.strip()}
    ours = {
        _number(path.name): content for path in _records(rundir) if (content := path.read_bytes()).strip()
    }
    first = min(theirs.keys() & ours.keys(), default=None)
    return first is not None and theirs[first] == ours[first]


def current(rundir: RunDirectory) -> int:
    """Return the number of the newest incarnation; 0 when the run was never begun."""
    return max(read_incarnations(rundir), default=0)


def visible(items: Iterable[Base], incarnations: Mapping[int, Base | None]) -> set[Base]:
    """Return those of `items` (checkpoints, or records of steps) that are part of the run.

    An item (step, incarnation) is hidden when it lies beyond the base of a later incarnation. Of two items
    with the same step, that of the later incarnation lies beyond the other. A later incarnation without a
    base hides all items of earlier ones.
    """
    is_visible = visibility(incarnations)
    return {item for item in items if is_visible(item)}


def visibility(incarnations: Mapping[int, Base | None]) -> Callable[[Base], bool]:
    """Return a function that says of one (step, incarnation) whether `visible` keeps it."""
    horizons: dict[int, Base | None] = {}

    def is_visible(item: Base) -> bool:
        incarnation = item[1]
        if incarnation not in horizons:
            horizons[incarnation] = _horizon(incarnation, incarnations)
        horizon = horizons[incarnation]
        return horizon is not None and item <= horizon

    return is_visible


def _records(rundir: RunDirectory) -> list[Path]:
    return sorted(path for path in rundir.incarnations.glob("*.json") if path.stem.isdecimal())


def _number(place: str) -> int:
    return int(place.rpartition("/")[2].removesuffix(".json"))


def _parted(rundir: RunDirectory, number: int, place: str) -> CheckpointError:
    return CheckpointError(
        f"{rundir.path} and the copy with {place} were both continued as incarnation {number}: "
        "neither has what the other has learnt since",
        remedy=f"To keep what the copy holds, move {rundir.path} away and start again: the run continues "
        "from the backup. To keep what is here, choose another run.name or backup.url.",
    )


def _adopt_all(rundir: RunDirectory, records: Mapping[int, bytes]) -> None:
    new = rundir.incarnations.with_suffix(".partial")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for number, content in records.items():
        durable.write_new(new / rundir.incarnation(number).name, content)
    durable.sync_directory(new)
    durable.replace(new, rundir.incarnations)  # which is empty or does not exist


def _created(rundir: RunDirectory, number: int, text: str) -> bool:
    """Create the record, and return whether its number was still free. Raises StorageError."""
    try:
        durable.create(rundir.incarnation(number), text)
    except FileExistsError:
        return False
    except OSError as error:
        raise _not_begun(rundir, error) from error
    return True


def _not_begun(rundir: RunDirectory, error: OSError) -> StorageError:
    return storage_error(error, path=rundir.incarnations, doing="Beginning an incarnation")


class _EmptyRecord:
    """Marks a record that a crash left empty: its incarnation never did anything."""


def _base(place: str, content: bytes) -> Base | _EmptyRecord | None:
    if not content.strip():
        return _EmptyRecord()
    try:
        base = json.loads(content)["base"]
        return None if base is None else (int(base["step"]), int(base["incarnation"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place} is damaged: it no longer says from which checkpoint this incarnation went on",
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
