"""Commits a checkpoint: ranks write into a `.partial` directory, then come index, manifest and a rename.

Each rank that has written its part leaves a record of it in the directory: `part-r00001.json` holds its files
and boxes, or says why it failed. The first rank waits for all records, and commits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import time as clock
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import xxhash

from bloomery import durable
from bloomery.checkpoint.format.coverage import check_coverage
from bloomery.checkpoint.format.deadlines import StallWatch, noted_progress, progress_files
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    PARTIAL,
    FileRecord,
    IndexedBox,
    Manifest,
    checkpoint_name,
    index_bytes,
    manifest_text,
    without_garbage_collection,
)
from bloomery.checkpoint.format.state import Json
from bloomery.errors import BloomeryError, RunBusy, StorageError, storage_error

log = logging.getLogger(__name__)

_KEPT_BY_NFS = ".nfs"
_POLL_S = 0.01
_PROGRESS_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank wrote of a checkpoint: data files, and the boxes in them. Ranks exchange it as JSON."""

    files: tuple[FileRecord, ...]
    boxes: tuple[IndexedBox, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the part as JSON."""
        return cast("dict[str, Json]", msgspec.to_builtins(self))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Part:  # Any: JSON of `to_json`
        """Return what `to_json` wrote."""
        with without_garbage_collection():
            return msgspec.convert(content, cls)


@dataclass(frozen=True, kw_only=True)
class _PartRecord:
    """What a rank records in the directory: its part, or why it failed, from `error_to_json`."""

    part: Part | None = None
    failure: dict[str, str] | None = None


def partial_directory(directory: Path, *, step: int, incarnation: int) -> Path:
    """Return the directory into which all ranks write during one save."""
    return directory / (checkpoint_name(step, incarnation) + PARTIAL)


def begin_partial(partial: Path) -> None:
    """Make an empty directory for a save, removing what an interrupted one left. Raises StorageError."""
    try:
        if os.path.lexists(partial):
            _remove_tree(partial)
        durable.make_directory(partial.parent)
        partial.mkdir(exist_ok=True)  # it is still there where NFS keeps a file in it
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint") from error


def commit(
    partial: Path,
    parts: Sequence[Part],
    *,
    step: int,
    incarnation: int,
    time: float,
    values: Mapping[str, Mapping[str, Json]],
    about: Mapping[str, Json],
    records: Sequence[Path] = (),
) -> Path:
    """Turn what all ranks wrote (and synced) into a checkpoint, and return its directory.

    Called by one rank, after all have finished. Before the rename there is no checkpoint; after it there is a
    whole one.

    parts: what each rank wrote, in the order of the ranks.
    time: seconds since 1970. values: the small JSON values of each part of the run. about: facts for people.
    records: files in `partial` that do not belong to the checkpoint. They are removed only once the manifest
        is durable: if this process dies, its successor finds either the records, or a directory to `publish`.

    Raises CheckpointError when the boxes do not fill their tensors exactly, and StorageError.
    """
    index, text = commit_texts(
        parts, step=step, incarnation=incarnation, time=time, values=values, about=about
    )
    try:
        durable.write_new(partial / INDEX, index)
        durable.write_new(partial / MANIFEST, text)
        durable.sync_directory(partial)
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint") from error
    return publish(partial, records=records)


def commit_texts(
    parts: Sequence[Part],
    *,
    step: int,
    incarnation: int,
    time: float,
    values: Mapping[str, Mapping[str, Json]],
    about: Mapping[str, Json],
) -> tuple[bytes, bytes]:
    """Return the contents of the index and of the manifest of what all ranks wrote: see `commit`.

    Raises CheckpointError when the boxes do not fill their tensors exactly.
    """
    files = [item for part in parts for item in part.files]
    boxes = [item for part in parts for item in part.boxes]
    with without_garbage_collection():
        check_coverage(boxes)
        index = index_bytes(boxes, files)
    manifest = Manifest(
        step=step,
        incarnation=incarnation,
        time=time,
        world=len(parts),
        about=about,
        values=values,
        files=tuple(replace(item, blocks="") for item in files),
        index_bytes=len(index),
        index_xxh3_128=xxhash.xxh3_128_hexdigest(index),
    )
    return index, manifest_text(manifest).encode()


def publish(partial: Path, *, records: Sequence[Path] = ()) -> Path:
    """Rename a `.partial` directory whose manifest is durable: the last step of a commit.

    Raises StorageError.
    """
    final = final_directory(partial)
    try:
        for record in (*records, *progress_files(partial)):
            record.unlink(missing_ok=True)
        if final.exists():
            shutil.rmtree(final)  # the caller saw that it was damaged
        durable.remove_drafts(partial)
        durable.replace(partial, final)
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint") from error
    return final


def part_record_path(partial: Path, rank: int) -> Path:
    """Return the path of the record that a rank leaves about its part."""
    return partial / f"part-r{rank:05d}.json"


def write_part_record(partial: Path, rank: int, part: Part) -> None:
    """Record that a rank's files are durable. Raises OSError."""
    _write_record(partial, rank, part_record(part))


def read_part_record(partial: Path, rank: int) -> Part | None:
    """Return the part that a rank has recorded; None while it has recorded none. Raises OSError."""
    try:
        return recorded_part(part_record_path(partial, rank).read_bytes())
    except FileNotFoundError:
        return None


def wait_for_part_record(
    partial: Path, rank: int, *, until: float, stall_s: float, progressed: Callable[[int], None]
) -> Part:
    """Wait until a rank has recorded its part, and return it. The record stays.

    until: the deadline, in seconds on the monotonic clock. stall_s: a rank that writes nothing for so long is
    stuck. progressed: called with the bytes that the rank has written since the last call, while it writes.
    Raises StorageError where the rank is stuck or late, and with its own error where it recorded one.
    """
    path, watch = part_record_path(partial, rank), StallWatch(stall_s)
    written, poll_s = 0, clock.monotonic()
    while not path.exists():
        if not partial.exists():
            raise StorageError(
                f"{partial} was removed while it was written", remedy="Is the disk still mounted?"
            )
        if clock.monotonic() > until:
            raise late_part(rank, partial.name)
        if clock.monotonic() >= poll_s:
            poll_s = clock.monotonic() + _PROGRESS_POLL_S
            before, written = written, noted_progress(partial, rank)
            if written != before:
                progressed(written - before)
            if watch.is_stalled(written):
                raise stalled_part(rank, partial.name, stall_s=stall_s, after=f"{written:,} bytes")
        clock.sleep(_POLL_S)
    return part_or_failure(path.read_bytes(), rank=rank, place=str(path))


def late_part(rank: int, name: str) -> StorageError:
    """Return the error for a rank that did not write its part of a save before the deadline."""
    return StorageError(
        f"Saving a checkpoint was abandoned: rank {rank} did not write its part of {name} in time",
        remedy="Look at that rank's log and its disk; the next save is tried as usual.",
    )


def stalled_part(rank: int, name: str, *, stall_s: float, after: str) -> StorageError:
    """Return the error for a rank that has written nothing for `stall_s` seconds. after: what it wrote."""
    return StorageError(
        f"Saving a checkpoint was abandoned: rank {rank} has written nothing of its part of "
        f"{name} for {stall_s:,.0f} s, after {after}",
        remedy="Look at that rank's log and its disk (dmesg); the next save is tried as usual.",
    )


def part_or_failure(content: bytes | str, *, rank: int, place: str) -> Part:
    """Return the part that a rank recorded. Raises StorageError with its own error where it failed."""
    record = _decoded(content)
    if record.part is None:
        failure = record.failure or {"message": f"{place} is empty", "remedy": "Please report this."}
        raise StorageError(f"rank {rank}: {failure['message']}", remedy=failure["remedy"])
    return record.part


def part_record(part: Part | None = None, *, failure: Mapping[str, str] | None = None) -> bytes:
    """Return the record of a part that is durable, or of why it failed (from `error_to_json`)."""
    return msgspec.json.encode(_PartRecord(part=part, failure=None if failure is None else dict(failure)))


def recorded_part(content: bytes) -> Part | None:
    """Return the part of a record; None for the record of a failure."""
    return _decoded(content).part


def abandon_part(partial: Path, rank: int, *, files: Iterable[str], why: Mapping[str, str]) -> None:
    """Remove what a rank wrote for a save that failed, and report that at once to the first rank, which
    commits.

    The first rank removes the directory. Another rank removes its own files, unless it has recorded its part:
    then the first rank may commit at any moment. Nobody may begin to save under the same name meanwhile.

    files: names of the rank's data files. why: the error, from `error_to_json`.
    """
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        return
    with contextlib.suppress(OSError):  # the first rank has removed the directory, or committed, before us
        if read_part_record(partial, rank) is not None:
            return
        _write_record(partial, rank, part_record(failure=why))
        for name in files:
            (partial / name).unlink(missing_ok=True)


def error_to_json(error: BaseException) -> dict[str, str]:
    """Return an error as JSON: its kind, message and remedy; for an unexpected one, its traceback."""
    if isinstance(error, BloomeryError):
        kinds = {StorageError: "storage", RunBusy: "busy"}
        kind = kinds.get(type(error), "checkpoint")
        return {"kind": kind, "message": error.message, "remedy": error.remedy}
    if isinstance(error, OSError):
        return {"kind": "storage", "message": str(error), "remedy": "Look at the disk (dmesg, df)."}
    import traceback

    text = "".join(traceback.format_exception(error))
    return {"kind": "checkpoint", "message": f"the writer failed:\n{text}", "remedy": "Please report this."}


def _decoded(record: bytes | str) -> _PartRecord:
    with without_garbage_collection():
        return msgspec.json.decode(record, type=_PartRecord)


def _write_record(partial: Path, rank: int, record: bytes) -> None:
    """Write a record, all of it at once.

    The record need not outlive the machine: the next start removes what was not committed. Raises OSError,
    also where the directory is gone: made again, it would stay beside the checkpoint until the next start.
    """
    if not partial.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(partial))
    durable.write_whole_unsynced(part_record_path(partial, rank), record.decode())


def final_directory(partial: Path) -> Path:
    """Return the path that a `.partial` directory gets when it is committed."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint. A crash meanwhile leaves a `.partial` directory, never a damaged checkpoint."""
    doomed = directory.with_name(directory.name + PARTIAL)
    try:
        if os.path.lexists(doomed):
            _remove_tree(doomed)
        durable.replace(directory, doomed)
        _remove_tree(doomed)
    except OSError as error:
        raise storage_error(error, path=directory, doing="Removing an old checkpoint") from error


def sweep(directory: Path) -> list[Path]:
    """Remove what interrupted saves and removals left. Only the process that holds the run lock calls it."""
    leftovers = sorted(directory.glob(f"step-*{PARTIAL}"))
    for path in leftovers:
        try:
            _remove_tree(path)
        except OSError as error:
            raise storage_error(error, path=path, doing="Sweeping an unfinished checkpoint") from error
    return leftovers


def _remove_tree(directory: Path) -> None:
    """Remove a directory, but for files that an NFS server keeps because some process has them open.

    The server renames such a file `.nfs…`, refuses to remove it, and removes it itself once it is closed. The
    function then logs a warning and leaves the directory.
    """
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
        return
    refused: list[OSError] = []

    def kept(function: object, path: str, failure: BaseException) -> None:
        if not isinstance(failure, OSError):
            raise failure
        refused.append(failure)

    _rmtree(directory, kept)
    if not directory.exists():
        return
    left = [path.name for path in directory.rglob("*") if not path.is_dir()]
    if not left or not all(name.startswith(_KEPT_BY_NFS) for name in left):
        raise refused[0]
    log.warning("%s stays until whoever has %s open closes it: the next start removes it", directory, left)


def _rmtree(directory: Path, on_error: Callable[[object, str, BaseException], None]) -> None:
    if sys.version_info >= (3, 12):
        shutil.rmtree(directory, onexc=on_error)
    else:
        shutil.rmtree(directory, onerror=lambda function, path, failure: on_error(function, path, failure[1]))
