"""Caches the blocks of a remote file in a local sparse file of the same size, fetched when they are read.

A reader maps the sparse file and reads it inside `Mirror.read`, which fetches the blocks first and may remove
the least recently used. `PREFIX.blocks` records which blocks are present. All processes of a machine share
the file, and the blocks stay when the processes end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery import durable
from bloomery.data.storage import refusals_named
from bloomery.errors import DataError, StorageError

_CONNECTIONS = 16
_PUNCH_AND_KEEP_SIZE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_TRIES = 100
_LOCK_TIMEOUT_S = 600.0
_ENTRY = np.dtype([("turn", "<u4"), ("used", "<u4")])

Blocks = npt.NDArray[np.int64]
Result = TypeVar("Result")
Fetch = Callable[[int, int], bytes]
"""Bytes of the file elsewhere, from a place on, so many; raises DataError where they are not to be had."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of the file elsewhere before it is read. sums: xxh3-64 of each block, in hexadecimal."""

    address: str
    size_bytes: int
    block_bytes: int
    sums: Sequence[str]


class Mirror:
    """Brings blocks of a file elsewhere to `path`, and keeps at most `capacity` of them.

    Threads and processes may share it. In the state each block has a turn, odd while it is here, which moves
    on whenever it comes or goes: so a reader sees afterwards whether what it read stayed. The state's entry 0
    counts: blocks that are here, and a clock of their use.
    """

    def __init__(self, path: Path, outline: Outline, *, capacity: int, fetch: Fetch) -> None:
        self.outline, self.capacity = outline, capacity
        self._path, self._fetch = path, fetch
        count = -(-outline.size_bytes // outline.block_bytes)
        with refusals_named(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, outline.size_bytes)
            state = path.with_suffix(".blocks")
            self._lock_file = os.open(state, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._lock_file, (count + 1) * _ENTRY.itemsize)
        self._state = np.memmap(state, dtype=_ENTRY, mode="r+")
        self._turns, self._used = self._state["turn"][1:], self._state["used"][1:]
        self._checked = np.zeros(count, dtype=np.uint32)
        """Turn at which this process found a block to be what its sum says."""
        self._threads = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        with self._alone():
            self._state["used"][0] = int((self._turns & 1).sum())

    def read(self, starts: Blocks, stops: Blocks, copy: Callable[[], Result]) -> Result:
        """What `copy` returns, called while bytes [start, stop) of each range are here.

        It may be called again, and must not keep views of the file. Raises DataError for bytes that are not
        to be had or not what was sealed, StorageError where there is no room for them.
        """
        blocks = self._blocks(starts, stops)
        if blocks.size > self.capacity:
            raise DataError(
                f"One read takes {blocks.size:,} blocks of {self.outline.address}, and the cache holds "
                f"{self.capacity:,}.",
                remedy="Give data.cache_gb more.",
            )
        for _ in range(_TRIES):
            turns = self._bring(blocks)
            result = copy()
            if (self._turns[blocks] == turns).all():
                return result
        raise DataError(
            f"Blocks of {self.outline.address} leave the cache before they are read: it holds "
            f"{self.capacity:,} of {self.outline.block_bytes:,} bytes.",
            remedy="Give data.cache_gb more.",
        )

    def blocks_of(self, starts: Blocks, stops: Blocks) -> int:
        """How many blocks some byte ranges touch."""
        return int(self._blocks(starts, stops).size)

    @property
    def held(self) -> int:
        """Blocks that are here."""
        return int((self._turns & 1).sum())

    def _blocks(self, starts: Blocks, stops: Blocks) -> Blocks:
        size = self.outline.block_bytes
        first, last = starts // size, np.maximum(stops - 1, starts) // size
        longest = int((last - first).max(initial=0)) + 1
        every = first[:, None] + np.arange(longest)
        blocks: Blocks = np.unique(every[every <= last[:, None]])
        return blocks

    def _bring(self, blocks: Blocks) -> npt.NDArray[np.uint32]:
        """Have the blocks here and checked; their turns."""
        clock = int(self._state["turn"][0]) + 1 & 0xFFFFFFFF
        self._state["turn"][0] = clock
        self._used[blocks] = clock
        turns: npt.NDArray[np.uint32] = self._turns[blocks].copy()
        doubtful = blocks[((turns & 1) == 0) | (self._checked[blocks] != turns)]
        if doubtful.size == 1:
            self._settle(int(doubtful[0]))
        elif doubtful.size:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="bloomery-stream")
            for done in [self._pool.submit(self._settle, int(block)) for block in doubtful]:
                done.result()  # each fetch has a deadline of its own
        turns = self._turns[blocks].copy()
        return np.where(turns & 1, turns, np.uint32(0))  # one that left already never fits

    def _settle(self, block: int) -> None:
        """Have one block here, and be sure of it."""
        turn = int(self._turns[block])
        begin = block * self.outline.block_bytes
        length = min(self.outline.block_bytes, self.outline.size_bytes - begin)
        if turn & 1:  # left by an earlier process, or brought by another: true unless power was lost
            if _sum(os.pread(self._file, length, begin)) == self.outline.sums[block]:
                self._checked[block] = turn
                return
            if int(self._turns[block]) == turn:
                self._drop(np.array([block]), np.array([turn]))
        content = self._fetched(begin, length, self.outline.sums[block])
        with self._alone(), refusals_named(self._path):
            if self._turns[block] & 1:
                return  # another process was quicker; it is checked when it is read
            self._make_room()
            _write_all(self._file, content, begin)
            self._state["used"][0] += 1
            self._turns[block] += 1
            self._checked[block] = self._turns[block]

    def _fetched(self, begin: int, length: int, expected: str) -> bytes:
        for _ in range(2):  # a second time, since what came may have been hurt on the way
            content = self._fetch(begin, length)
            if _sum(content) == expected:
                return content
        raise DataError(
            f"Bytes {begin:,} to {begin + length - 1:,} of {self.outline.address} are not what its seal "
            "said.",
            remedy="Bring back there what was sealed. If what is there now is right and sealed, remove "
            f"{self._path.parent}: it comes anew.",
        )

    def _make_room(self) -> None:
        """Below the capacity; the longest unused go, a sixteenth of all at once. Called alone."""
        if int(self._state["used"][0]) < self.capacity:
            return
        here = np.flatnonzero(self._turns & 1)
        leaving = max(1, here.size - self.capacity + max(1, self.capacity // 16))
        oldest = here[np.argsort(self._used[here], kind="stable")[:leaving]]
        self._release(oldest)

    def _drop(self, blocks: Blocks, turns: Blocks) -> None:
        with self._alone():
            self._release(blocks[self._turns[blocks] == turns])

    def _release(self, blocks: Blocks) -> None:
        """Let blocks go: first said, then done, so that no reader takes a hole for tokens. Called alone."""
        self._turns[blocks] += 1
        for block in blocks.tolist():
            punch(self._file, block * self.outline.block_bytes, self.outline.block_bytes, path=self._path)
        self._state["used"][0] = int((self._turns & 1).sum())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the state against the threads of this process and all other processes."""
        with self._threads:
            if not durable.wait_for_lock(self._lock_file, timeout_s=_LOCK_TIMEOUT_S, poll_s=0.002):
                raise StorageError(
                    f"Waited {_LOCK_TIMEOUT_S:.0f} s for another process that holds {self._path}.",
                    remedy=f"Look which one it is: fuser -v {self._path}.",
                )
            try:
                yield
            finally:
                durable.unlock(self._lock_file)


def punch(file: int, start: int, length: int, *, path: Path) -> None:
    """Give a part of a file back to the disk. Raises StorageError where its file system cannot."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    status = fallocate(file, _PUNCH_AND_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(length))
    if status and ctypes.get_errno() != errno.EINTR:
        raise StorageError(
            f"The file system of {path} cannot give back parts of a file: {os.strerror(ctypes.get_errno())}.",
            remedy="Set data.cache to a directory on a local disk (ext4, xfs, btrfs, tmpfs).",
        )


def _sum(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _write_all(file: int, content: bytes, begin: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, begin)
        view, begin = view[written:], begin + written
