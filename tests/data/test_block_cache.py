"""The cache of a remote file's blocks: which stay, which leave, and what is said where none can come."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from bloomery import durable
from bloomery.data import block_cache
from bloomery.data.block_cache import BlockCache, RemoteFileInfo, punch_hole
from bloomery.errors import DataError, StorageError

SIZE = 8
CONTENT = bytes(range(200)) * 2 + b"abc"  # 51 blocks, the last of three bytes


class Line:
    """The way to the remote file. answers: what is given instead of the right bytes, in turn."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.answers: list[bytes] = []

    def __call__(self, start: int, length: int) -> bytes:
        self.asked.append((start, length))
        return self.answers.pop(0) if self.answers else CONTENT[start : start + length]

    @property
    def blocks(self) -> list[int]:
        return [start // SIZE for start, _ in self.asked]


@pytest.fixture
def line() -> Line:
    return Line()


def cache_at(path: Path, line: Callable[[int, int], bytes], *, capacity: int = 51) -> BlockCache:
    cut = [CONTENT[start : start + SIZE] for start in range(0, len(CONTENT), SIZE)]
    sums = np.array([xxhash.xxh3_64_intdigest(block) for block in cut], dtype=np.uint64)
    outline = RemoteFileInfo(address="s3://b/f.bin", size_bytes=len(CONTENT), block_bytes=SIZE, sums=sums)
    return BlockCache(path, outline, capacity=capacity, fetch=line)


def read(cache: BlockCache, path: Path, *ranges: tuple[int, int]) -> list[bytes]:
    starts, stops = (np.array(side, dtype=np.int64) for side in zip(*ranges, strict=True))

    def copy() -> list[bytes]:
        content = path.read_bytes()
        return [content[start:stop] for start, stop in ranges]

    return cache.read(starts, stops, copy)


def one(cache: BlockCache, path: Path, block: int) -> bytes:
    return read(cache, path, (block * SIZE, min((block + 1) * SIZE, len(CONTENT))))[0]


@pytest.mark.parametrize(
    ("ranges", "blocks"),
    [
        ([(0, 1)], [0]),
        ([(7, 8)], [0]),
        ([(8, 9)], [1]),
        ([(7, 9)], [0, 1]),
        ([(3, 32)], [0, 1, 2, 3]),
        ([(3, 33)], [0, 1, 2, 3, 4]),
        ([(40, 48), (16, 17), (41, 42)], [2, 5]),
        ([(400, 403)], [50]),
        ([(24, 24)], [3]),
    ],
)
def test_the_blocks_that_ranges_touch_are_fetched_once_and_no_others(
    tmp_path: Path, line: Line, ranges: list[tuple[int, int]], blocks: list[int]
) -> None:
    path = tmp_path / "here.bin"
    cache = cache_at(path, line)
    sides = [np.array(side) for side in zip(*ranges, strict=True)]
    assert cache.blocks_of(*sides) == len(blocks)
    for _ in range(2):
        assert read(cache, path, *ranges) == [CONTENT[start:stop] for start, stop in ranges]
    assert sorted(line.asked) == [(block * SIZE, 3 if block == 50 else SIZE) for block in blocks]
    assert cache.held == len(blocks)


def test_who_opens_the_cache_later_finds_the_blocks_and_counts_them(tmp_path: Path, line: Line) -> None:
    path = tmp_path / "here.bin"
    first = cache_at(path, line)
    for block in (4, 9, 50):
        one(first, path, block)
    assert path.stat().st_size == len(CONTENT) and (tmp_path / "here.blocks").stat().st_size == 52 * 8
    line.asked.clear()
    later = cache_at(path, line)
    assert later.held == 3 and [one(later, path, block) for block in (4, 9, 50)] == [
        CONTENT[32:40],
        CONTENT[72:80],
        b"abc",
    ]
    assert line.asked == []


def test_the_blocks_that_were_not_read_for_longest_leave_a_sixteenth_at_a_time(
    tmp_path: Path, line: Line
) -> None:
    path = tmp_path / "here.bin"
    cache = cache_at(path, line, capacity=32)
    for block in range(32):
        one(cache, path, block)
    for block in (0, 2):  # read again: they are no longer the oldest
        one(cache, path, block)
    assert cache.held == 32 and line.blocks == list(range(32))
    one(cache, path, 40)
    assert cache.held == 31, "a sixteenth of 32 left, and one came"
    one(cache, path, 41)
    assert cache.held == 32, "there was room"
    line.asked.clear()
    assert [one(cache, path, block) for block in (0, 2, 4, 40, 41)] == [
        CONTENT[block * SIZE : (block + 1) * SIZE] for block in (0, 2, 4, 40, 41)
    ]
    assert line.asked == []
    one(cache, path, 1)
    one(cache, path, 3)
    assert line.blocks == [1, 3], "which were the two oldest"


def test_a_block_that_came_anew_meanwhile_is_not_dropped_with_the_one_that_was_wrong(
    tmp_path: Path, line: Line
) -> None:
    path = tmp_path / "here.bin"
    cache = cache_at(path, line)
    for block in (4, 5):
        one(cache, path, block)
    cache._drop(np.array([4, 5]), np.array([3, 1]))
    assert (cache.held, cache._versions[[4, 5]].tolist()) == (1, [1, 2])


def test_a_block_that_is_written_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, begin: write(file, content[:3], begin))
    with (tmp_path / "file").open("wb") as file:
        block_cache._write_all(file.fileno(), b"abcdefgh", 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0abcdefgh"


def test_a_hole_that_a_signal_interrupts_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> int:
        ctypes.set_errno(errno.EINTR)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=interrupted))
    punch_hole(0, 0, 4096, path=tmp_path)


def test_a_disk_that_refuses_a_block_is_told_by_the_file_and_the_block_is_not_taken_as_there(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "here.bin", os.pwrite
    cache = cache_at(path, line)

    def full(file: int, content: bytes, begin: int) -> int:
        write(file, content[:2], begin)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as refusing:
        refusing.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=rf"failed at {path}: No space left on device"):
            one(cache, path, 4)
    assert cache.held == 0 and int(cache._state["used"][0]) == 0 and not cache._threads.locked()
    assert one(cache, path, 4) == CONTENT[32:40] and line.blocks == [4, 4]
    with pytest.raises(StorageError, match=rf"failed at {tmp_path}/none/here\.bin: No such file"):
        cache_at(tmp_path / "none" / "here.bin", line)


def test_a_cache_that_nobody_has_any_more_holds_no_files_open(tmp_path: Path, line: Line) -> None:
    cache = cache_at(tmp_path / "here.bin", line)
    files = (cache._file, cache._lock_file)
    assert [os.fstat(file).st_size for file in files] == [len(CONTENT), 52 * 8]
    del cache
    gc.collect()
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_of_a_cache_of_few_blocks_one_leaves_at_a_time(tmp_path: Path, line: Line) -> None:
    path = tmp_path / "here.bin"
    cache = cache_at(path, line, capacity=3)
    for block in range(5):
        one(cache, path, block)
        assert cache.held == min(block + 1, 3)
    one(cache, path, 2)
    assert line.blocks == [0, 1, 2, 3, 4]


def test_a_cache_that_was_made_smaller_gives_back_all_that_is_too_much(tmp_path: Path, line: Line) -> None:
    path = tmp_path / "here.bin"
    large = cache_at(path, line, capacity=40)
    for block in range(40):
        one(large, path, block)
    small = cache_at(path, line, capacity=16)
    one(small, path, 45)
    assert small.held == 16 and large.held == 16
    line.asked.clear()
    one(small, path, 39)
    assert line.asked == []


def test_a_read_may_take_all_that_the_cache_holds_and_no_block_more(tmp_path: Path, line: Line) -> None:
    path = tmp_path / "here.bin"
    cache = cache_at(path, line, capacity=4)
    assert read(cache, path, (8, 40)) == [CONTENT[8:40]]
    with pytest.raises(DataError) as refused:
        read(cache, path, (8, 41))
    assert refused.value.message == "One read takes 5 blocks of s3://b/f.bin, and the cache holds 4."
    assert refused.value.remedy == "Give data.cache_gb more." and len(line.asked) == 4


def test_a_block_that_was_damaged_on_the_way_is_fetched_a_second_time_and_not_a_third(
    tmp_path: Path, line: Line
) -> None:
    path = tmp_path / "here.bin"
    cache = cache_at(path, line)
    line.answers = [b"damaged!"]
    assert one(cache, path, 6) == CONTENT[48:56] and line.asked == [(48, 8)] * 2
    line.asked.clear()
    line.answers = [b"ab", b"damaged!"]
    with pytest.raises(DataError) as refused:
        one(cache, path, 50)
    assert line.asked == [(400, 3)] * 2
    assert refused.value.message == "Bytes 400 to 402 of s3://b/f.bin are not what its seal said."
    assert f"remove {tmp_path}:" in refused.value.remedy
    assert cache.held == 1 and one(cache, path, 50) == b"abc"


def test_a_block_that_is_no_longer_what_it_was_on_the_disk_is_fetched_anew(
    tmp_path: Path, line: Line
) -> None:
    path = tmp_path / "here.bin"
    first = cache_at(path, line)
    for block in (5, 6):
        one(first, path, block)
    with path.open("r+b") as file:
        file.seek(5 * SIZE)
        file.write(b"\0" * SIZE)
    line.asked.clear()
    later = cache_at(path, line)
    assert read(later, path, (40, 56)) == [CONTENT[40:56]]
    assert line.blocks == [5] and later.held == 2


def test_a_block_that_another_process_brings_while_it_is_fetched_stays_as_it_is(
    tmp_path: Path, line: Line
) -> None:
    path, asked = tmp_path / "here.bin", list[int]()
    other = cache_at(path, line)

    def slower(start: int, length: int) -> bytes:
        asked.append(start)
        one(other, path, 6)
        return line(start, length)

    cache = cache_at(path, slower)
    assert one(cache, path, 6) == CONTENT[48:56] == one(other, path, 6)
    assert (asked, line.blocks) == ([48], [6, 6])
    assert cache.held == 1 and int(cache._versions[6]) == 1


def test_blocks_that_a_killed_process_did_not_count_are_counted_when_the_cache_is_opened(
    tmp_path: Path, line: Line
) -> None:
    path = tmp_path / "here.bin"
    killed = cache_at(path, line, capacity=3)
    for block in range(3):
        one(killed, path, block)
    killed._state["used"][0] = 1
    later = cache_at(path, line, capacity=3)
    one(later, path, 9)
    assert later.held == 3


def test_a_block_that_leaves_while_it_is_copied_is_copied_again(tmp_path: Path, line: Line) -> None:
    path = tmp_path / "here.bin"
    cache, other = (cache_at(path, line, capacity=2) for _ in range(2))
    copied: list[bytes] = []

    def copy() -> bytes:
        if not copied:
            for block in (20, 21):  # of another process: they take the room of what is being read
                one(other, path, block)
        copied.append(path.read_bytes()[16:24])
        return copied[-1]

    assert cache.read(np.array([16]), np.array([24]), copy) == CONTENT[16:24]
    assert len(copied) == 2


def test_who_never_gets_to_read_what_came_is_told_to_have_more_room(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "_TRIES", 3)
    path, tries = tmp_path / "here.bin", list[int]()
    cache, other = (cache_at(path, line, capacity=1) for _ in range(2))

    def copy() -> None:
        tries.append(one(other, path, len(tries) + 9)[0])

    with pytest.raises(DataError) as refused:
        cache.read(np.array([0]), np.array([8]), copy)
    assert len(tries) == 3 and refused.value.message == (
        "Blocks of s3://b/f.bin leave the cache before they are read: it holds 1 of 8 bytes."
    )


def test_the_state_is_changed_under_the_lock_of_all_processes_alone(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "here.bin"
    cache, held, changed = cache_at(path, line, capacity=2), list[str](), list[str]()
    lock, unlock = durable.wait_for_lock, durable.unlock
    write, punch = block_cache._write_all, block_cache.punch_hole

    def locking(file: int, **more: float) -> bool:
        held.append("process")
        return lock(file, **more)

    def unlocking(file: int) -> None:
        held.clear()
        unlock(file)

    def watched(act: Callable[..., None], name: str) -> Callable[..., None]:
        def call(*given: object, **more: object) -> None:
            assert held == ["process"] and cache._threads.locked()
            changed.append(name)
            act(*given, **more)

        return call

    monkeypatch.setattr(durable, "wait_for_lock", locking)
    monkeypatch.setattr(durable, "unlock", unlocking)
    monkeypatch.setattr(block_cache, "_write_all", watched(write, "written"))
    monkeypatch.setattr(block_cache, "punch_hole", watched(punch, "punched"))
    for block in range(3):
        one(cache, path, block)
    assert changed == ["written", "written", "punched", "written"] and held == []
    monkeypatch.setattr(durable, "wait_for_lock", lambda file, *, timeout_s, poll_s: False)
    with pytest.raises(StorageError) as refused:
        one(cache, path, 9)
    assert refused.value.message == f"Waited 600 s for another process that holds {path}."
    assert refused.value.remedy == f"Look which one it is: fuser -v {path}."
    assert not cache._threads.locked()


def test_a_file_system_that_cannot_give_back_a_part_of_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    with path.open("r+b") as file:
        punch_hole(file.fileno(), 0, 4096, path=path)
        assert path.read_bytes() == bytes(4096) + b"x" * 4096
    with path.open("rb") as file, pytest.raises(StorageError, match=f"file system of {path} cannot") as told:
        punch_hole(file.fileno(), 0, 4096, path=path)
    assert os.strerror(errno.EBADF) in told.value.message and "data.cache" in told.value.remedy
