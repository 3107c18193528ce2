"""Saving: the bytes of tensors, from where they are to durable files, without a second copy of the state."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from bloomery.checkpoint.commit import Part, begin_partial, commit, partial_directory
from bloomery.checkpoint.datafile import DataFile, HashingWriter, lay_out
from bloomery.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    FileRecord,
    checkpoint_name,
    now,
    read_manifest,
)
from bloomery.checkpoint.memory import pieces_of
from bloomery.checkpoint.state import Json, StateEntry
from bloomery.events.storage import free_bytes, no_space, storage_error

FILE_BYTES = 1 << 30
_MARGIN_BYTES = 1 << 20  # the index, the manifest and the directory's own blocks


def save_checkpoint(
    directory: Path,
    entries: Iterable[StateEntry],
    *,
    step: int,
    incarnation: int,
    values: Mapping[str, Mapping[str, Json]] | None = None,
    about: Mapping[str, Json] | None = None,
) -> Path:
    """Save `entries` and `values` below `directory`, and return the new checkpoint's directory.

    Alone: the caller has the whole state. Several ranks call `write_part` each, and one `commit`.
    Raises StorageError with the path, what is needed and what is free; nothing half-written is left then.
    """
    present = finished(directory, step=step, incarnation=incarnation)
    if present is not None:
        return present
    partial = partial_directory(directory, step=step, incarnation=incarnation)
    begin_partial(partial)
    try:
        part = write_part(partial, entries)
        return commit(
            partial,
            [part],
            step=step,
            incarnation=incarnation,
            time=now(),
            values=values or {},
            about=about or {},
        )
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # the first error counts; the next start sweeps the rest
        raise


def finished(directory: Path, *, step: int, incarnation: int) -> Path | None:
    """Return the checkpoint that this incarnation has already saved at this step; None when there is none."""
    final = directory / checkpoint_name(step, incarnation)
    if not (final / MANIFEST).exists():
        return None
    try:
        read_manifest(final)
    except DamagedCheckpoint:
        return None
    return final


def write_part(
    partial: Path,
    entries: Iterable[StateEntry],
    *,
    rank: int = 0,
    world: int = 1,
    file_bytes: int = FILE_BYTES,
) -> Part:
    """Write this rank's entries to durable files in `partial`, and return what was written.

    Refuses before the first byte when the space is not there. Raises StorageError.
    """
    files = lay_out(entries, rank=rank, world=world, file_bytes=file_bytes)
    needed = sum(file.bytes for file in files) + _MARGIN_BYTES
    try:
        if free_bytes(partial) < needed:
            raise no_space(partial, doing="Saving a checkpoint", bytes_needed=needed)
        records = tuple(_write(partial, file) for file in files)
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint", bytes_needed=needed) from error
    return Part(files=records, boxes=tuple(box for file in files for box in file.boxes))


def _write(partial: Path, file: DataFile) -> FileRecord:
    with HashingWriter(partial / file.name) as writer:
        writer.write(memoryview(file.header))
        for entry in file.entries:
            for piece in pieces_of(entry.tensor):
                writer.write(piece)
        return writer.finish()
