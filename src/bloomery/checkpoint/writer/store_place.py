"""Writes a rank's part of a save to object storage, commits it there, and enters it in the run directory.

Every rank sends its own data files to `checkpoints/NAME/` of the run's URL, and then a record of its part to
`saving/NAME/`. The first rank waits for all records, sends the index, and last the manifest, which it creates
exclusively: before it there is no checkpoint. No file system is shared. On the first rank's node the run
directory gets an entry of the checkpoint, which says where it is.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import xxhash

from bloomery import durable
from bloomery.checkpoint.format.commit import (
    Part,
    commit_texts,
    final_directory,
    late_part,
    part_or_failure,
    part_record,
    part_record_path,
    publish,
    recorded_part,
    stalled_part,
)
from bloomery.checkpoint.format.data_file import BlockHasher
from bloomery.checkpoint.format.deadlines import PartProgress, StallWatch, progress_path
from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, FileRecord, without_garbage_collection
from bloomery.checkpoint.format.source import CHECKPOINTS, STORED_AT
from bloomery.checkpoint.format.state import Json
from bloomery.checkpoint.writer.part_place import CpuThrottle, wait_until_filled
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer
from bloomery.errors import RunBusy, StorageError, storage_error
from bloomery.objects import Objects, storage_failure

log = logging.getLogger(__name__)

SAVING = "saving"
"""The prefix of the records that ranks exchange during a save."""
_NOTE_EVERY_S = 60.0
"""Each note is a request that costs money, and a stall is judged after minutes."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 2.0
_CHUNK_BYTES = 8 << 20
_READS_AT_ONCE = 16


class ObjectPartWriter:
    """A save to object storage: see `PartWriter`, which it implements.

    directory: what the `.partial` directory of the save would be; the first rank makes the run's entry there.
    url: of the run in the store.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self._partial, self._url = directory, url
        self.name = final_directory(directory).name
        self._files, self._notes = f"{CHECKPOINTS}/{self.name}/", f"{SAVING}/{self.name}/"

    @cached_property
    def _objects(self) -> Objects:
        """The store. Opened at the first use: where a mount is gone, the save fails and not its end.

        The run made the directory of a file:// URL when it began. Made again, it would lie on another disk.
        """
        return Objects(self._url, create=False)

    def written_before(self, order: Mapping[str, Any]) -> Part | None:
        """See `PartWriter`."""
        with _told():
            if order["rank"] == 0:
                if not self._objects.exists(self._files + MANIFEST):
                    return None
                self._enter(self._objects.content(self._files + MANIFEST))
                return Part(files=(), boxes=())
            try:
                return recorded_part(self._objects.content(self._record_key(order["rank"])))
            except FileNotFoundError:
                is_whole = self._objects.exists(self._files + MANIFEST)
                return Part(files=(), boxes=()) if is_whole else None

    def progress(self, rank: int, tell: Callable[[int], None]) -> PartProgress:
        """See `PartWriter`."""
        if not rank:
            return PartProgress(tell)
        key = self._notes + progress_path(self._partial, rank).name
        return PartProgress(
            tell,
            note=lambda count: self._objects.put(key, str(count).encode()),
            note_every_s=_NOTE_EVERY_S,
        )

    def write(self, order: Mapping[str, Any], buffer: SharedBuffer, progress: PartProgress) -> Part:
        """See `PartWriter`. A file is sent in parts while it is still being staged."""
        records = []
        for file in order["files"]:
            pieces = partial(_staged, buffer, file["offset"], file["bytes"], progress)
            records.append(self.send(file["name"], size=file["bytes"], pieces=pieces))
        return replace(Part.from_json({"files": [], "boxes": order["boxes"]}), files=tuple(records))

    def send(self, name: str, *, size: int, pieces: Callable[[], Iterable[memoryview]]) -> FileRecord:
        """Send a data file, verified by the store's checksum or read back; return its record.

        pieces: returns the file's bytes from the first on; called again where the line broke.
        Raises StorageError.
        """
        hasher = BlockHasher()

        def hashed() -> Iterator[memoryview]:
            nonlocal hasher
            hasher = BlockHasher()
            for piece in pieces():
                hasher.update(piece)
                yield piece

        key = self._files + name
        with _told():
            is_proven = self._objects.send_pieces(key, size=size, pieces=hashed)
            record = hasher.record(name)
            if not is_proven and self._objects.digest(key) != record.xxh3_128:
                raise OSError(5, f"{self._objects.place(key)} is not what was sent")
        return record

    def record(self, rank: int, part: Part) -> None:
        """See `PartWriter`."""
        with _told():
            self._objects.put(self._record_key(rank), part_record(part))

    def commit(self, part: Part, order: Mapping[str, Any], progress: PartProgress) -> None:
        """See `PartWriter`."""
        with without_garbage_collection():
            parts = [part, *self._parts_of_others(order, progress)]
            self.commit_parts(parts, time=order["time"], values=order["values"], **order["checkpoint"])

    def commit_parts(
        self,
        parts: Sequence[Part],
        *,
        step: int,
        incarnation: int,
        time: float,
        values: Mapping[str, Mapping[str, Json]],
        about: Mapping[str, Json],
    ) -> None:
        """Turn what all ranks sent into a checkpoint: see `commit`.

        Raises RunBusy where another process has gone on with the run meanwhile, CheckpointError, and
        StorageError.
        """
        index, manifest = commit_texts(
            parts, step=step, incarnation=incarnation, time=time, values=values, about=about
        )
        with _told():
            self._refuse_lost_files(parts)
            self._refuse_superseded(incarnation)
            self._objects.put(self._files + INDEX, index)
            if self._objects.digest(self._files + INDEX) != xxhash.xxh3_128_hexdigest(index):
                raise OSError(5, f"{self._objects.place(self._files + INDEX)} is not what was sent")
            if not self._objects.create(self._files + MANIFEST, manifest):
                raise OSError(5, f"{self._objects.place(self._files + MANIFEST)} is another checkpoint's")
        self._enter(manifest)
        try:
            self._objects.delete_all(entry.key for entry in self._objects.entries(self._notes))
        except OSError as error:  # the checkpoint is there, and the next start removes the notes
            log.warning("what ranks noted of %s stays for now: %s", self.name, error)

    def abandon(self, rank: int, *, files: Iterable[str], why: Mapping[str, str]) -> None:
        """See `PartWriter`."""
        try:
            if rank == 0:
                self.clear()
                return
            key = self._record_key(rank)
            if self._objects.exists(key) and recorded_part(self._objects.content(key)) is not None:
                return  # the first rank may commit at any moment
            self._objects.put(key, part_record(failure=why))
            self._objects.delete_all(self._files + name for name in files)
        except (OSError, StorageError) as error:  # the next start removes what was not committed
            log.warning("what was sent of %s stays for now: %s", self.name, error)

    def clear(self) -> None:
        """Remove what was sent for a save, unless it is committed. Raises OSError."""
        if self._objects.exists(self._files + MANIFEST):
            return
        shutil.rmtree(self._partial, ignore_errors=True)
        listed = [*self._objects.entries(self._notes), *self._objects.entries(self._files)]
        self._objects.delete_all(entry.key for entry in listed)
        self._objects.remove_unfinished(self._files)

    def read_back(
        self,
        part: Part,
        rank: int,
        *,
        read: Callable[[int], None],
        rest: Callable[[], None],
        go_on: Callable[[], bool],
    ) -> str:
        """See `PartWriter`. Nothing is read: each file was verified when it was sent."""
        return ""

    def _parts_of_others(self, order: Mapping[str, Any], progress: PartProgress) -> list[Part]:
        """Wait for the records of all other ranks, with one listing for all of them; return their parts."""
        until, pause_s = time.monotonic() + order["parts_s"], _FIRST_POLL_S
        waited = {rank: StallWatch(order["stall_s"]) for rank in range(1, order["world"])}
        notes, changes = dict.fromkeys(waited, ""), dict.fromkeys(waited, 0)
        parts: dict[int, Part] = {}
        while True:
            with _told():
                marks = {entry.key: entry.stat.mark for entry in self._objects.entries(self._notes)}
                parts |= self._read_records([rank for rank in waited if self._record_key(rank) in marks])
            for rank in parts.keys() & waited.keys():
                del waited[rank]
                progress.add(1)
            if not waited:
                return [parts[rank] for rank in sorted(parts)]
            for rank, watch in waited.items():
                mark = marks.get(self._notes + progress_path(self._partial, rank).name, "")
                if mark != notes[rank]:
                    notes[rank], changes[rank] = mark, changes[rank] + 1
                    progress.add(1)
                if watch.is_stalled(changes[rank]):
                    raise stalled_part(rank, self.name, stall_s=order["stall_s"], after="what it noted last")
            if time.monotonic() > until:
                raise late_part(min(waited), self.name)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)

    def _read_records(self, ranks: Sequence[int]) -> dict[int, Part]:
        """Return the parts of ranks that have left a record. Raises StorageError where one failed."""

        def read(rank: int) -> Part:
            key = self._record_key(rank)
            return part_or_failure(self._objects.content(key), rank=rank, place=self._objects.place(key))

        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            return dict(zip(ranks, pool.map(read, ranks), strict=True))

    def _refuse_lost_files(self, parts: Sequence[Part]) -> None:
        """Raise OSError unless the store lists all files with their full size."""
        sizes = {entry.key: entry.stat.bytes for entry in self._objects.entries(self._files)}
        for record in (record for part in parts for record in part.files):
            key = self._files + record.name
            if sizes.get(key) != record.bytes:
                raise OSError(
                    5, f"{self._objects.place(key)} has {sizes.get(key)} bytes of the {record.bytes} sent"
                )

    def _refuse_superseded(self, incarnation: int) -> None:
        """Raise RunBusy where a later incarnation has begun, which ignores what this one saves."""
        names = [entry.key.rpartition("/")[2] for entry in self._objects.entries("incarnations/")]
        newest = max((int(name[:-5]) for name in names if name[:-5].isdecimal()), default=0)
        if newest > incarnation:
            raise RunBusy(
                f"another process has gone on with {self._objects.url} as incarnation {newest}, and this one "
                f"is incarnation {incarnation}: what it saves is no longer part of the run",
                remedy="Let the other process train, or stop it and start this one again.",
            )

    def _enter(self, manifest: bytes) -> None:
        """Make the run's entry of the committed checkpoint."""
        enter_stored(self._partial, manifest, url=self._objects.place(self._files.rstrip("/")))

    def _record_key(self, rank: int) -> str:
        return self._notes + part_record_path(self._partial, rank).name


def _staged(buffer: SharedBuffer, offset: int, length: int, progress: PartProgress) -> Iterator[memoryview]:
    """Yield a file that is being staged from `offset` on in a buffer, at the pace of the throttle."""
    throttle = CpuThrottle(lambda: buffer.is_urgent)
    for start in range(0, length, _CHUNK_BYTES):
        if start:
            throttle.rest()
        stop = min(start + _CHUNK_BYTES, length)
        wait_until_filled(buffer, offset + stop)
        progress.add(stop - start)
        yield buffer.view[offset + start : offset + stop]


def enter_stored(draft: Path, manifest: bytes, *, url: str, mark: tuple[str, bytes] | None = None) -> Path:
    """Make the entry in a run directory of a checkpoint at `url`, durably; return its directory.

    mark: name and content of the file that marks it as suspect. Raises StorageError.
    """
    final = final_directory(draft)
    try:
        shutil.rmtree(draft, ignore_errors=True)
        durable.make_directory(draft)
        if mark is not None:
            durable.write_new(draft / mark[0], mark[1])
        durable.write_new(draft / STORED_AT, json.dumps({"url": url}) + "\n")
        durable.write_new(draft / MANIFEST, manifest)
        durable.sync_directory(draft)
    except OSError as error:
        raise storage_error(error, path=final, doing="Entering a checkpoint") from error
    return publish(draft)


@contextmanager
def _told() -> Iterator[None]:
    """Raise StorageError for an error of the store."""
    try:
        yield
    except OSError as error:
        raise storage_failure(error, doing="Saving a checkpoint") from error
