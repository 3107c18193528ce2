"""Memory that a trainer shares with its writer: taken in full at once, and kept over a restart."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bloomery.checkpoint.writer import shared_buffer
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer, mapped_bytes, refuse_without_memory
from bloomery.errors import StorageError
from bloomery.events.machine import machine_id


@contextmanager
def created(size: int, path: Path | None = None) -> Iterator[SharedBuffer]:
    buffer = SharedBuffer.create(size, name="looked-at", path=path)
    try:
        yield buffer
    finally:
        buffer.close()


def has_populate_write() -> bool:
    """Whether the kernel maps pages when it is asked to: Linux 5.14."""
    release = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text())
    return release is not None and tuple(map(int, release.groups())) >= (5, 14)


def mapped_here(name: str) -> int:
    """Bytes of the mapping of a file that are in this process's page table."""
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    (area,) = (area for area in areas if name in area)
    return int(re.findall(r"^Rss:\s+(\d+) kB", area, re.M)[0]) * 1024


@pytest.mark.parametrize("size", [4096, 5000, 3 << 20])
def test_a_buffer_takes_its_memory_when_it_is_created_and_not_at_the_first_save(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_buffer, "_PIECE_BYTES", 10_000)
    with created(size, tmp_path / "slot") as buffer:
        status = (tmp_path / "slot").stat()
        assert status.st_mode & 0o777 == 0o600, "nobody else reads the state"
        assert buffer.bytes == size and status.st_size == mapped_bytes(size) >= size + 4096
        assert status.st_blocks * 512 >= status.st_size


def test_a_buffer_takes_whole_pages_and_one_more():
    page = mmap.PAGESIZE
    sizes = [mapped_bytes(size) for size in (0, 1, page - 1, page, page + 1)]
    assert sizes == [page, 2 * page, 2 * page, 2 * page, 3 * page]


def test_what_is_still_looked_at_stays_readable_after_a_buffer_is_closed():
    buffer = SharedBuffer.create(5000, name="looked-at")
    buffer.view[:5] = b"state"
    view = buffer.view[:5]
    buffer.close()
    assert bytes(view) == b"state"
    view.release()


@pytest.mark.skipif(not has_populate_write(), reason="this kernel maps pages only when they are touched")
def test_every_page_of_a_buffer_is_mapped_before_the_first_copy_into_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_buffer, "_PIECE_BYTES", 1 << 20)  # several pieces, the last one shorter
    with created((5 << 19) + 77):
        assert mapped_here("memfd:looked-at") >= (5 << 19) + 77


def test_what_an_earlier_process_left_stays_where_it_has_the_size_and_goes_where_not(tmp_path: Path):
    path = tmp_path / "slot"
    with created(10_000, path) as buffer:
        buffer.view[:5] = b"state"
        buffer.view[9_999:10_000] = b"!"
    with created(10_000, path) as buffer:
        assert bytes(buffer.view[:5]) == b"state" and bytes(buffer.view[9_999:10_000]) == b"!"
    for other in (50_000, 6_000):
        with created(other, path) as buffer:
            assert not any(buffer.view[:other]) and path.stat().st_size == mapped_bytes(other)
            buffer.view[:5] = b"state"


def test_what_the_two_processes_tell_each_other_lies_beside_the_bytes_and_apart(tmp_path: Path):
    with created(8_192, tmp_path / "slot") as ours, (tmp_path / "slot").open("r+b") as file:
        theirs = SharedBuffer(file.fileno(), bytes=8_192)
        ours.view[:8_192] = b"\xff" * 8_192
        assert (theirs.filled, theirs.is_urgent, theirs.stops_reading) == (0, False, False)
        ours.filled = 8_192
        assert (theirs.filled, theirs.is_urgent, theirs.stops_reading) == (8_192, False, False)
        ours.is_urgent = True
        assert (theirs.filled, theirs.is_urgent, theirs.stops_reading) == (8_192, True, False)
        ours.stops_reading, ours.is_urgent = True, False
        assert (theirs.filled, theirs.is_urgent, theirs.stops_reading) == (8_192, False, True)
        assert bytes(theirs.view[:8_192]) == b"\xff" * 8_192
        del theirs


def test_all_memory_but_what_is_left_to_other_processes_may_be_taken(monkeypatch: pytest.MonkeyPatch):
    free = 5 << 30
    monkeypatch.setattr(shared_buffer, "available_memory_bytes", lambda: free)
    refuse_without_memory(4 << 30)
    with pytest.raises(StorageError, match=r"needs 4\.3 GB of memory: 5\.4 GB are free"):
        refuse_without_memory((4 << 30) + 1)
    monkeypatch.setattr(shared_buffer, "available_memory_bytes", lambda: None)
    refuse_without_memory(1 << 50)  # where nothing is known, taking it says whether it is there


def test_a_machine_without_the_memory_refuses_and_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_buffer, "available_memory_bytes", lambda: 2 << 30)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StorageError, match="memory") as refused, created((1 << 30) + 1, tmp_path / "slot"):
        pass
    assert "checkpoint.background=off" in refused.value.remedy
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert (tmp_path / "slot").stat().st_size == 0


def test_ranks_of_one_machine_know_each_other_by_its_boot_or_else_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Path, "read_text", lambda path: f"of {path.name}\n")
    assert machine_id() == "of boot_id"

    def unknown(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", unknown)
    assert machine_id() == os.uname().nodename


def test_a_place_for_a_buffer_that_cannot_be_made_is_told_and_a_full_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Taking memory for checkpoints failed"):
        SharedBuffer.create(4096, name="x", path=tmp_path / "file" / "slot")
    before = len(list(Path("/proc/self/fd").iterdir()))

    def full(file: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"needs 0\.0 GB of memory: No space left on device"):
        SharedBuffer.create(4096, name="x", path=tmp_path / "slot")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
