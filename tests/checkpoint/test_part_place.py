"""What a writer needs before it writes, waits for while it writes, and notes for whoever waits for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from bloomery import errors
from bloomery.checkpoint.format import data_file
from bloomery.checkpoint.format.commit import Part, part_record_path, read_part_record
from bloomery.checkpoint.format.deadlines import note_progress, progress_path
from bloomery.checkpoint.format.manifest import FileRecord
from bloomery.checkpoint.writer import part_place
from bloomery.checkpoint.writer.part_place import (
    MARGIN_BYTES,
    DirectoryPartWriter,
    part_writer_for,
    processors_of_a_rank,
    wait_until_filled,
)
from bloomery.checkpoint.writer.shared_buffer import ABANDONED, SharedBuffer
from bloomery.checkpoint.writer.store_place import ObjectPartWriter
from bloomery.errors import CheckpointError, StorageError
from bloomery.objects import Objects

EMPTY = Part(files=(), boxes=())


def test_each_file_is_written_as_soon_as_its_own_bytes_are_staged(
    tmp_path: Path, buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(part_place, "wait_until_filled", lambda buffer, bytes: asked.append(bytes))
    files = [{"name": "f", "offset": 0, "bytes": 70}, {"name": "g", "offset": 4096, "bytes": 100}]
    place = DirectoryPartWriter(tmp_path)
    part = place.write({"files": files, "boxes": [], "attempt": 1}, buffer, place.progress(0, lambda _: None))
    assert asked == [70, 4196] and [file.bytes for file in part.files] == [70, 100]


def test_a_file_that_is_sent_again_is_hashed_from_its_first_byte_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off_once(
        self: Objects, key: str, *, size: int, pieces: Callable[[], Iterator[memoryview]]
    ) -> bool:
        next(iter(pieces()))
        assert b"".join(pieces()) == b"abcdef"
        return True

    monkeypatch.setattr(Objects, "send_pieces", broken_off_once)
    (tmp_path / "store").mkdir()
    place = ObjectPartWriter(tmp_path / "step-000003.i001.partial", f"file://{tmp_path}/store")
    sent = place.send("f", size=6, pieces=lambda: map(memoryview, (b"abc", b"def")))
    assert (sent.bytes, sent.xxh3_128) == (6, xxhash.xxh3_128_hexdigest(b"abcdef"))


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    made = SharedBuffer.create(8192, name="part")
    yield made
    made.close()


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    path = tmp_path / "step-000001.i001.partial"
    path.mkdir()
    return path


def test_what_is_staged_is_waited_for_to_the_byte_unless_the_staging_failed(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        buffer.filled = len(pauses) * 1000

    monkeypatch.setattr(part_place.time, "sleep", pause)
    wait_until_filled(buffer, 3000)
    assert len(pauses) == 3
    wait_until_filled(buffer, 3000)
    assert len(pauses) == 3
    buffer.filled = ABANDONED
    with pytest.raises(CheckpointError, match=r"(?s)could not be copied.*The trainer's log says why"):
        wait_until_filled(buffer, 3000)


def order(*files: tuple[str, int, int], attempt: int = 1) -> dict[str, Any]:
    listed = [{"name": name, "offset": offset, "bytes": size} for name, offset, size in files]
    return {"files": listed, "boxes": [], "attempt": attempt, "rank": 1, "world": 3}


def test_a_part_is_written_from_its_places_in_the_buffer_where_there_is_room_for_all_of_it(
    buffer: SharedBuffer, partial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.view[:10], buffer.view[4096:4100] = b"0123456789", b"abcd"
    buffer.filled, buffer.is_urgent = 8192, True
    asked = order(("one", 0, 10), ("two", 4096, 4))
    free = [10 + 4 + MARGIN_BYTES - 1]
    monkeypatch.setattr(errors, "free_bytes", lambda path: free[0])
    place, told = DirectoryPartWriter(partial), list[int]()
    with pytest.raises(StorageError, match="no space"):
        place.write(asked, buffer, place.progress(1, told.append))
    assert list(partial.iterdir()) == []
    free[0] += 1
    progress = place.progress(1, told.append)
    part = place.write(asked, buffer, progress)
    assert [(file.name, file.bytes) for file in part.files] == [("one", 10), ("two", 4)]
    assert [(partial / name).read_bytes() for name in ("one", "two")] == [b"0123456789", b"abcd"]
    with pytest.raises(StorageError, match="File exists"):
        place.write(asked, buffer, progress)
    again = place.write(order(("one", 1, 9), attempt=2), buffer, progress)
    assert (partial / "one").read_bytes() == b"123456789" and again.files[0].bytes == 9


def test_only_who_is_waited_for_leaves_notes_and_they_go_with_its_record(partial: Path) -> None:
    place = DirectoryPartWriter(partial)
    for rank, noted in ((0, False), (4, True)):
        progress = place.progress(rank, lambda count: None)
        progress._noted_s -= 4.9
        progress.add(7)
        assert list(partial.iterdir()) == [], "a save that takes seconds leaves none"
        progress._noted_s -= 5.0
        progress.add(8)
        assert progress_path(partial, rank).exists() is noted
    assert progress_path(partial, 4).read_text() == "15"
    note_progress(partial, 2, 1)
    place.record(4, EMPTY)
    assert read_part_record(partial, 4) == EMPTY
    assert sorted(partial.iterdir()) == [part_record_path(partial, 4), progress_path(partial, 2)]


def test_files_of_other_ranks_are_counted_before_a_commit(partial: Path) -> None:
    (partial / "one").write_bytes(b"12345")
    record = FileRecord(name="one", bytes=5, xxh3_128="", blocks="")
    part_place._refuse_lost_files(partial, [EMPTY, Part(files=(record,), boxes=())])
    (partial / "one").write_bytes(b"123456")
    with pytest.raises(
        StorageError, match=r"(?s)has 6 bytes of the 5 that were written.*something else write there"
    ):
        part_place._refuse_lost_files(partial, [EMPTY, Part(files=(record,), boxes=())])
    (partial / "one").unlink()
    with pytest.raises(StorageError, match="Saving a checkpoint failed"):
        part_place._refuse_lost_files(partial, [Part(files=(record,), boxes=())])


def test_the_processors_of_a_machine_are_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processors_of_a_rank() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert processors_of_a_rank() == 1.5


def test_an_order_goes_to_the_directory_or_to_the_store_that_it_names(tmp_path: Path) -> None:
    partial = str(tmp_path / "step-000001.i001.partial")
    assert isinstance(part_writer_for({"partial": partial, "store": ""}), DirectoryPartWriter)
    stored = part_writer_for({"partial": partial, "store": f"file://{tmp_path}/store"})
    assert isinstance(stored, ObjectPartWriter) and stored.name == "step-000001.i001"


def test_a_save_that_is_not_urgent_rests_between_chunks_and_an_urgent_one_is_known_as_such(
    buffer: SharedBuffer, partial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    monkeypatch.setattr(
        part_place, "CpuThrottle", lambda is_urgent: SimpleNamespace(rest=lambda: asked.append(is_urgent()))
    )
    monkeypatch.setattr(data_file, "_CHUNK_BYTES", 4096)
    buffer.filled = 8192
    place = DirectoryPartWriter(partial)
    for name, buffer.is_urgent in (("one", False), ("two", True)):
        place.write(order((name, 0, 8192)), buffer, place.progress(1, lambda count: None))
    assert asked == [False, True]


def test_a_disk_that_becomes_full_while_a_part_is_written_is_told_with_what_it_needs(
    buffer: SharedBuffer, partial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(part_place, "write_image", full)
    place = DirectoryPartWriter(partial)
    with pytest.raises(StorageError, match=r"Saving a checkpoint failed .* \(51\.0 MB needed"):
        place.write(order(("one", 0, 50_000_000 - 48_576)), buffer, place.progress(1, lambda count: None))


def test_no_note_of_progress_is_left_once_a_part_is_recorded(
    partial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_progress(partial, 4, 1)
    monkeypatch.setattr(
        part_place, "write_part_record", lambda partial, rank, part: notes.extend(partial.iterdir())
    )
    notes: list[Path] = []
    DirectoryPartWriter(partial).record(4, EMPTY)
    assert notes == [], "the first rank may commit the moment it finds the record"


def test_reading_back_counts_and_rests_as_it_is_told_and_the_first_rank_begins_with_the_index(
    partial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    torn = [""]
    monkeypatch.setattr(part_place, "read_back_index", lambda partial: torn[0])
    monkeypatch.setattr(
        part_place, "read_back", lambda *given, **how: asked.append((given, how)) or "f is torn"
    )
    record = FileRecord(name="f", bytes=5, xxh3_128="", blocks="")
    part, how = Part(files=(record,), boxes=()), {"read": print, "rest": list, "go_on": bool}
    for rank, torn[0], told in (
        (1, "the index is torn", "f is torn"),
        (0, "", "f is torn"),
        (0, "the index is torn", "the index is torn"),
    ):
        assert DirectoryPartWriter(partial).read_back(part, rank, **how) == told
    assert asked == [((partial, (record,)), how)] * 2
