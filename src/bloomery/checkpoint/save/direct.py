"""Saves synchronously: writes tensors to files in the run directory or object storage, without a copy.

No second copy of the state is made.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

import torch

from bloomery.checkpoint.format.commit import Part, begin_partial, commit, partial_directory
from bloomery.checkpoint.format.data_file import DataFile, HashingWriter, lay_out
from bloomery.checkpoint.format.deadlines import STALL_S
from bloomery.checkpoint.format.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    FileRecord,
    IndexedBox,
    checkpoint_name,
    now,
    read_manifest,
)
from bloomery.checkpoint.format.state import Json, StateEntry, StateSnapshot
from bloomery.checkpoint.format.verified_reader import read_back, read_back_index
from bloomery.checkpoint.writer.part_place import MARGIN_BYTES
from bloomery.checkpoint.writer.store_place import ObjectPartWriter
from bloomery.errors import StorageError, require_space, storage_error
from bloomery.objects import storage_failure

PIECE_BYTES = 32 << 20
"""The bytes of a tensor that are copied at a time where they cannot be written from where they lie."""


def element_type(name: str) -> torch.dtype:
    """Return torch's element type for a key of ITEM_BYTES."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory, as a view that writes to the tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@torch.no_grad()
def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order: a view of a contiguous CPU tensor, else copies in pieces."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield memory_of(tensor)
        return
    rows = max(1, PIECE_BYTES // (tensor[0].numel() * tensor.element_size()))
    for start in range(0, len(tensor), rows):
        yield memory_of(tensor[start : start + rows].cpu().contiguous())


FILE_BYTES = 1 << 30
"""The most bytes of one data file, unless a box is larger."""
STREAM_BYTES = 128 << 20
"""The bytes of entries after which a streamed save writes a file."""


def save_checkpoint(
    directory: Path,
    entries: Iterable[StateEntry],
    *,
    step: int,
    incarnation: int,
    values: Mapping[str, Mapping[str, Json]] | None = None,
    about: Mapping[str, Json] | None = None,
) -> Path:
    """Save a state that one process holds in full below `directory`; return the checkpoint's directory.

    Returns the existing checkpoint where this incarnation has saved the step already. Several ranks call
    `write_part` each and one of them `commit` instead. Raises StorageError, leaving nothing half-written.
    """
    present = already_saved(directory, step=step, incarnation=incarnation)
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


def save_streamed(
    directory: Path,
    entries: Iterable[StateEntry],
    *,
    step: int,
    incarnation: int,
    time: float | None = None,
    values: Mapping[str, Mapping[str, Json]] | None = None,
    about: Mapping[str, Json] | None = None,
) -> Path:
    """Save a state that is too large to be held, from an iterator; return the checkpoint's directory.

    It holds one entry, and at most STREAM_BYTES before it. time: seconds since 1970; None for now.
    Raises StorageError, leaving nothing half-written.
    """
    partial = partial_directory(directory, step=step, incarnation=incarnation)
    begin_partial(partial)
    files, boxes = list[FileRecord](), list[IndexedBox]()
    batch, batch_bytes = list[StateEntry](), 0

    def write() -> None:
        part = write_part(partial, batch, first=len(files))
        files.extend(part.files)
        boxes.extend(part.boxes)
        batch.clear()

    try:
        for entry in entries:
            batch.append(entry)
            batch_bytes += entry.nbytes
            if batch_bytes >= STREAM_BYTES:
                write()
                batch_bytes = 0
            del entry  # or it would be held while the next one is read
        write()
        return commit(
            partial,
            [Part(files=tuple(files), boxes=tuple(boxes))],
            step=step,
            incarnation=incarnation,
            time=now() if time is None else time,
            values=values or {},
            about=about or {},
        )
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # the first error counts; the next start sweeps the rest
        raise


def already_saved(directory: Path, *, step: int, incarnation: int) -> Path | None:
    """Return the checkpoint that this incarnation has already saved at this step; None where there is none.

    One with a damaged manifest counts as none: it is saved again. Raises StorageError.
    """
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
    first: int = 0,
    wrote: Callable[[int], None] = lambda count: None,
) -> Part:
    """Write this rank's entries to durable files in `partial`, and return the part.

    file_bytes: the most bytes of a file into which entries are gathered; a larger entry makes a larger file.
    first: the number of the first file, where other files of this rank are there already.
    wrote: called with the bytes of each piece that is written.
    Raises StorageError, before the first byte is written where the disk has not enough space.
    """
    files = lay_out(entries, rank=rank, world=world, file_bytes=file_bytes, first=first)
    needed = sum(file.bytes for file in files) + MARGIN_BYTES
    try:
        require_space(partial, doing="Saving a checkpoint", bytes_needed=needed)
        records = tuple(_write(partial, file, wrote) for file in files)
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint", bytes_needed=needed) from error
    return Part(files=records, boxes=tuple(box for file in files for box in file.boxes))


def send_part(place: ObjectPartWriter, entries: Iterable[StateEntry], *, rank: int, world: int) -> Part:
    """Send this rank's entries as data files to object storage, and return the part. Raises StorageError."""
    files = lay_out(entries, rank=rank, world=world, file_bytes=FILE_BYTES)
    records = tuple(
        place.send(file.name, size=file.bytes, pieces=partial(_file_bytes, file)) for file in files
    )
    return Part(files=records, boxes=tuple(box for file in files for box in file.boxes))


def _file_bytes(file: DataFile) -> Iterator[memoryview]:
    yield memoryview(file.header)
    for entry in file.entries:
        yield from tensor_bytes(entry.tensor)


def _write(directory: Path, file: DataFile, wrote: Callable[[int], None]) -> FileRecord:
    with HashingWriter(directory / file.name) as writer:
        for whole in _file_bytes(file):
            for start in range(0, len(whole), PIECE_BYTES):
                piece = whole[start : start + PIECE_BYTES]
                writer.write(piece)
                wrote(len(piece))
        return writer.finish()


class SaveBackend(Protocol):
    """Where a synchronous save goes, as a set of steps; `partial` is the directory of a save in the run
    directory.

    store: the run's URL in object storage; "" for a run that saves into its directory.
    stall_s: the seconds without a written byte after which a rank is stuck; inf: `write` sees that itself.
    """

    store: str
    stall_s: float

    def begin(self, partial: Path, *, bytes: int) -> None:
        """Make room for a save of so many bytes. Called by the first rank. Raises StorageError."""

    def clear(self, partial: Path) -> None:
        """Remove what a failed save left. Called by the first rank, once no rank writes there any more."""

    def write(
        self,
        partial: Path,
        entries: Sequence[StateEntry],
        *,
        rank: int,
        world: int,
        wrote: Callable[[int], None],
    ) -> Part:
        """Write this rank's entries durably, and return the part. Raises StorageError.

        wrote: called with the bytes of each piece that is written, where `stall_s` is finite.
        """

    def commit(self, partial: Path, parts: Sequence[Part], snapshot: StateSnapshot) -> None:
        """Turn what all ranks wrote into a checkpoint. Called by the first rank. Raises as `commit`."""

    def read_back(self, partial: Path, written: Sequence[FileRecord], *, is_first: bool) -> str:
        """Return what is wrong with what this rank wrote; "" for nothing."""


class DirectoryBackend:
    """Saves into the run directory, which all ranks share: see `SaveBackend`."""

    store, stall_s = "", STALL_S

    def begin(self, partial: Path, *, bytes: int) -> None:
        """See `SaveBackend`."""
        run = partial.parent.parent
        if not run.is_dir():  # made anew, it would hold checkpoints that belong to no run
            raise StorageError(
                f"Saving a checkpoint was refused: {run} is not there any more. Was it moved or removed?",
                remedy="Move it back: the training goes on, and saves there again.",
            )
        require_space(partial, doing="Saving a checkpoint", bytes_needed=bytes + MARGIN_BYTES)
        begin_partial(partial)

    def clear(self, partial: Path) -> None:
        """See `SaveBackend`."""
        shutil.rmtree(partial, ignore_errors=True)

    def write(
        self,
        partial: Path,
        entries: Sequence[StateEntry],
        *,
        rank: int,
        world: int,
        wrote: Callable[[int], None],
    ) -> Part:
        """See `SaveBackend`."""
        return write_part(partial, entries, rank=rank, world=world, wrote=wrote)

    def commit(self, partial: Path, parts: Sequence[Part], snapshot: StateSnapshot) -> None:
        """See `SaveBackend`."""
        commit(
            partial,
            parts,
            step=snapshot.step,
            incarnation=snapshot.incarnation,
            time=now(),
            values=snapshot.values,
            about=snapshot.about,
        )

    def read_back(self, partial: Path, written: Sequence[FileRecord], *, is_first: bool) -> str:
        """See `SaveBackend`."""
        return (read_back_index(partial) if is_first else "") or read_back(partial, written)


class ObjectStoreBackend:
    """Saves to object storage, from every rank: see `SaveBackend` and `ObjectPartWriter`."""

    stall_s = inf

    def __init__(self, url: str) -> None:
        self.store = url

    def begin(self, partial: Path, *, bytes: int) -> None:
        """See `SaveBackend`. What an earlier try sent is removed."""
        try:
            ObjectPartWriter(partial, self.store).clear()
        except OSError as error:
            raise storage_failure(error, doing="Saving a checkpoint") from error
        begin_partial(partial)

    def clear(self, partial: Path) -> None:
        """See `SaveBackend`."""
        ObjectPartWriter(partial, self.store).abandon(0, files=(), why={})

    def write(
        self,
        partial: Path,
        entries: Sequence[StateEntry],
        *,
        rank: int,
        world: int,
        wrote: Callable[[int], None],
    ) -> Part:
        """See `SaveBackend`. Each transfer has time-outs of its own."""
        return send_part(ObjectPartWriter(partial, self.store), entries, rank=rank, world=world)

    def commit(self, partial: Path, parts: Sequence[Part], snapshot: StateSnapshot) -> None:
        """See `SaveBackend`."""
        ObjectPartWriter(partial, self.store).commit_parts(
            parts,
            step=snapshot.step,
            incarnation=snapshot.incarnation,
            time=now(),
            values=snapshot.values,
            about=snapshot.about,
        )

    def read_back(self, partial: Path, written: Sequence[FileRecord], *, is_first: bool) -> str:
        """See `SaveBackend`. Each file was verified when it was sent."""
        return ""
