"""Writes one rank's part of a save into a directory that all ranks share, throttled in favour of training.

It leaves the processors to the training while the save is not urgent. `ObjectPartWriter` is the same for
object storage, where there is no such directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from bloomery.checkpoint.format import deadlines
from bloomery.checkpoint.format.commit import (
    Part,
    abandon_part,
    commit,
    final_directory,
    part_record_path,
    publish,
    read_part_record,
    wait_for_part_record,
    write_part_record,
)
from bloomery.checkpoint.format.data_file import write_image
from bloomery.checkpoint.format.deadlines import PartProgress, note_progress, progress_path
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    FileRecord,
    read_manifest,
    without_garbage_collection,
)
from bloomery.checkpoint.format.verified_reader import read_back, read_back_index
from bloomery.checkpoint.writer.shared_buffer import ABANDONED, SharedBuffer
from bloomery.errors import CheckpointError, StorageError, require_space, storage_error
from bloomery.events.machine import processors_of_a_rank

_SHARE = 1 / 128
"""The fraction of a rank's processors that its writer uses. A step slows down by more than this fraction,
because it waits for the slowest of its threads."""
_LONGEST_PAUSE_S = 0.15
"""With a few megabytes between pauses, the rate stays well above `deadlines.SLOWEST_BYTES_PER_S`."""
_POLL_URGENT_S = 0.02


class CpuThrottle:
    """Limits this process to its share of the processors, by pauses, while its work is not urgent."""

    def __init__(self, is_urgent: Callable[[], bool]) -> None:
        self._is_urgent = is_urgent
        self._share = _SHARE * processors_of_a_rank()
        self._begun_s, self._used_s = time.monotonic(), time.process_time()

    def rest(self) -> None:
        """Pause until the processor time used since the last pause is within the share again."""
        due_s = (time.process_time() - self._used_s) / self._share
        end = min(self._begun_s + due_s, time.monotonic() + _LONGEST_PAUSE_S)
        while (left_s := end - time.monotonic()) > 0 and not self._is_urgent():
            time.sleep(min(left_s, _POLL_URGENT_S))
        self._begun_s, self._used_s = time.monotonic(), time.process_time()


_DOING = "Saving a checkpoint"
_STAGING_POLL_S = 0.0005
MARGIN_BYTES = 1 << 20
"""Bytes of a save beside the data files: the index, the manifest and the directory's own blocks."""


class PartWriter(Protocol):
    """What a rank's writer does for one save, in the order in which it is called.

    order: the trainer's request to the writer (`process`), as JSON values.
    """

    def written_before(self, order: Mapping[str, Any]) -> Part | None:
        """Return the part that a writer which died over this order has made durable; None to write it again.

        A part without files means that the checkpoint is committed.
        """

    def progress(self, rank: int, tell: Callable[[int], None]) -> PartProgress:
        """Return a counter of what this rank writes, which the first rank can see from its own node."""

    def write(self, order: Mapping[str, Any], buffer: SharedBuffer, progress: PartProgress) -> Part:
        """Write this rank's data files from the buffer, and return the part once it is durable."""

    def record(self, rank: int, part: Part) -> None:
        """Record that this rank's files are durable."""

    def commit(self, part: Part, order: Mapping[str, Any], progress: PartProgress) -> None:
        """Wait for the parts of all other ranks, and commit the checkpoint. Called by the first rank."""

    def abandon(self, rank: int, *, files: Iterable[str], why: Mapping[str, str]) -> None:
        """Remove what a rank wrote for a save that failed, and report that to the first rank at once."""

    def read_back(
        self,
        part: Part,
        rank: int,
        *,
        read: Callable[[int], None],
        rest: Callable[[], None],
        go_on: Callable[[], bool],
    ) -> str:
        """Return what is wrong with the files of a part; "" for nothing. Raises GivenUp: see `read_back`."""


def part_writer_for(order: Mapping[str, Any]) -> PartWriter:
    """Return the part writer that an order asks for: to a directory, or to object storage at `store`."""
    if order.get("store"):
        from bloomery.checkpoint.writer.store_place import ObjectPartWriter  # it loads what only stores need

        return ObjectPartWriter(Path(order["partial"]), order["store"])
    return DirectoryPartWriter(Path(order["partial"]))


class DirectoryPartWriter:
    """Writes into the `.partial` directory of a save, which all ranks see."""

    def __init__(self, partial: Path) -> None:
        self._partial = partial

    def written_before(self, order: Mapping[str, Any]) -> Part | None:
        """See `PartWriter`."""
        return _part_already_written(self._partial, order)

    def progress(self, rank: int, tell: Callable[[int], None]) -> PartProgress:
        """See `PartWriter`."""
        if not rank:
            return PartProgress(tell)
        return PartProgress(
            tell,
            note=lambda count: note_progress(self._partial, rank, count),
            note_every_s=deadlines.NOTE_EVERY_S,
        )

    def write(self, order: Mapping[str, Any], buffer: SharedBuffer, progress: PartProgress) -> Part:
        """See `PartWriter`."""
        return _write(self._partial, order, buffer, progress)

    def record(self, rank: int, part: Part) -> None:
        """See `PartWriter`."""
        progress_path(self._partial, rank).unlink(missing_ok=True)
        write_part_record(self._partial, rank, part)

    def commit(self, part: Part, order: Mapping[str, Any], progress: PartProgress) -> None:
        """See `PartWriter`."""
        _commit(self._partial, part, order, progress)

    def abandon(self, rank: int, *, files: Iterable[str], why: Mapping[str, str]) -> None:
        """See `PartWriter`."""
        abandon_part(self._partial, rank, files=files, why=why)

    def read_back(
        self,
        part: Part,
        rank: int,
        *,
        read: Callable[[int], None],
        rest: Callable[[], None],
        go_on: Callable[[], bool],
    ) -> str:
        """See `PartWriter`. The first rank reads the manifest and the index back too."""
        problem = read_back_index(self._partial) if rank == 0 else ""
        return problem or read_back(self._partial, part.files, read=read, rest=rest, go_on=go_on)


def _part_already_written(partial: Path, order: Mapping[str, Any]) -> Part | None:
    """See `PartWriter.written_before`. What a commit may already include must not be changed or removed.

    The checks come in the reverse order of a commit, which removes the part records once
    the manifest is durable, and only then renames the directory.
    """
    if order["rank"] == 0:
        if _is_whole(partial):
            publish(partial, records=_part_records(partial, order))
        if _is_whole(final_directory(partial)):
            return Part(files=(), boxes=())
        for name in (INDEX, MANIFEST):
            (partial / name).unlink(missing_ok=True)
        return None
    left = read_part_record(partial, order["rank"])
    if left is None and (_is_whole(partial) or _is_whole(final_directory(partial))):
        return Part(files=(), boxes=())
    return left


def _is_whole(directory: Path) -> bool:
    try:
        return bool(read_manifest(directory).files)
    except CheckpointError:
        return False


def _part_records(partial: Path, order: Mapping[str, Any]) -> list[Path]:
    return [part_record_path(partial, other) for other in range(1, order["world"])]


def _commit(partial: Path, part: Part, order: Mapping[str, Any], progress: PartProgress) -> None:
    until, parts = time.monotonic() + order["parts_s"], [part]
    with without_garbage_collection():
        for other in range(1, order["world"]):
            parts.append(
                wait_for_part_record(
                    partial, other, until=until, stall_s=order["stall_s"], progressed=progress.add
                )
            )
            progress.add(1)
        _refuse_lost_files(partial, parts)
        commit(
            partial,
            parts,
            time=order["time"],
            values=order["values"],
            records=_part_records(partial, order),
            **order["checkpoint"],
        )


def _refuse_lost_files(partial: Path, parts: Sequence[Part]) -> None:
    """Raise StorageError unless all files have their full size: other ranks wrote them some time ago."""
    for record in (record for part in parts for record in part.files):
        try:
            size = (partial / record.name).stat().st_size
        except OSError as error:
            raise storage_error(error, path=partial / record.name, doing=_DOING) from error
        if size != record.bytes:
            raise StorageError(
                f"{partial / record.name} has {size} bytes of the {record.bytes} that were written",
                remedy="Does something else write there? The next save is tried as usual.",
            )


def _write(partial: Path, order: Mapping[str, Any], buffer: SharedBuffer, progress: PartProgress) -> Part:
    """Write this rank's data files from the buffer, and return the part."""
    needed = sum(file["bytes"] for file in order["files"]) + MARGIN_BYTES
    records: list[FileRecord] = []
    try:
        require_space(partial, doing=_DOING, bytes_needed=needed)
        for file in order["files"]:
            offset = file["offset"]
            image = buffer.view[offset:]

            def until_filled(bytes: int, offset: int = offset) -> None:
                wait_until_filled(buffer, offset + bytes)

            path, throttle = partial / file["name"], CpuThrottle(lambda: buffer.is_urgent)
            records.append(
                write_image(
                    path,
                    image,
                    length=file["bytes"],
                    until_filled=until_filled,
                    rest=throttle.rest,
                    wrote=progress.add,
                    anew=order["attempt"] > 1,
                )
            )
    except OSError as error:
        raise storage_error(error, path=partial, doing=_DOING, bytes_needed=needed) from error
    return replace(Part.from_json({"files": [], "boxes": order["boxes"]}), files=tuple(records))


def wait_until_filled(buffer: SharedBuffer, bytes: int) -> None:
    """Wait until so many bytes are staged: staging goes on while the first files are written.

    The trainer has the deadline. Raises CheckpointError where the staging failed.
    """
    while buffer.filled < bytes:
        time.sleep(_STAGING_POLL_S)
    if buffer.filled == ABANDONED:
        raise CheckpointError("the state could not be copied", remedy="The trainer's log says why.")
