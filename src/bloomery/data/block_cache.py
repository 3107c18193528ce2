"""Caches the blocks of a remote file in a local sparse file, and fetches them when they are read.

A reader maps the sparse file and reads it inside `BlockCache.read`, which fetches the blocks first and may
remove the least recently used ones. `PREFIX.blocks` records which blocks are present. All processes of a
machine share the file, and the blocks stay when the processes end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery import durable
from bloomery.data.storage import as_storage_error
from bloomery.errors import DataError, StorageError

_CONNECTIONS = 16
_PUNCH_AND_KEEP_SIZE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_TRIES = 100
_LOCK_TIMEOUT_S = 600.0
_ENTRY = np.dtype([("version", "<u4"), ("used", "<u4")])

Blocks = npt.NDArray[np.int64]
Result = TypeVar("Result")
Fetch = Callable[[int, int], bytes]
"""Returns bytes of the remote file, given their offset and number. Raises DataError if they cannot be read.
"""


@dataclass(frozen=True, kw_only=True)
class RemoteFileInfo:
    """The address, size and block checksums of a remote file, known before it is read.

    sums: xxh3-64 of each block; [blocks].
    """

    address: str
    size_bytes: int
    block_bytes: int
    sums: npt.NDArray[np.uint64]


class BlockCache:
    """Fetches blocks of a remote file into `path`, and keeps at most `capacity` of them.

    Threads and processes may share it. The state holds a version for each block, which is odd while the block
    is present, and which grows by one whenever the block comes or goes. So a reader sees afterwards whether
    what it read stayed. Entry 0 of the state holds two counters: the blocks that are present, and a clock of
    their use.
    """

    def __init__(self, path: Path, outline: RemoteFileInfo, *, capacity: int, fetch: Fetch) -> None:
        self.outline, self.capacity = outline, capacity
        self._path, self._fetch = path, fetch
        count = -(-outline.size_bytes // outline.block_bytes)
        with as_storage_error(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, outline.size_bytes)
            state = path.with_suffix(".blocks")
            self._lock_file = os.open(state, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._lock_file, (count + 1) * _ENTRY.itemsize)
        # Each opening of a pair makes a cache, and hundreds of pairs are opened several times at a start.
        weakref.finalize(self, _close, self._file, self._lock_file).atexit = False
        self._state = np.memmap(state, dtype=_ENTRY, mode="r+")
        self._versions, self._used = self._state["version"][1:], self._state["used"][1:]
        self._checked = np.zeros(count, dtype=np.uint32)
        """The version of each block when this process last verified it against its checksum; 0: never."""
        self._threads = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        with self._alone():
            self._state["used"][0] = int((self._versions & 1).sum())

    def read(self, starts: Blocks, stops: Blocks, copy: Callable[[], Result]) -> Result:
        """Return what `copy` returns, called while bytes [start, stop) of each range are present.

        `copy` may be called again, and must not keep views of the file. Raises DataError for bytes that
        cannot be fetched or that do not match the seal, and StorageError if there is no room for them.
        """
        blocks = self._blocks(starts, stops)
        if blocks.size > self.capacity:
            raise DataError(
                f"One read takes {blocks.size:,} blocks of {self.outline.address}, and the cache holds "
                f"{self.capacity:,}.",
                remedy="Give data.cache_gb more.",
            )
        for _ in range(_TRIES):
            versions = self._bring(blocks)
            result = copy()
            if (self._versions[blocks] == versions).all():
                return result
        raise DataError(
            f"Blocks of {self.outline.address} leave the cache before they are read: it holds "
            f"{self.capacity:,} of {self.outline.block_bytes:,} bytes.",
            remedy="Give data.cache_gb more.",
        )

    def blocks_of(self, starts: Blocks, stops: Blocks) -> int:
        """Return how many blocks the byte ranges touch."""
        return int(self._blocks(starts, stops).size)

    @property
    def held(self) -> int:
        """Number of blocks that are present."""
        return int((self._versions & 1).sum())

    def _blocks(self, starts: Blocks, stops: Blocks) -> Blocks:
        size = self.outline.block_bytes
        first, last = starts // size, np.maximum(stops - 1, starts) // size
        longest = int((last - first).max(initial=0)) + 1
        numbers = first[:, None] + np.arange(longest)
        blocks: Blocks = np.unique(numbers[numbers <= last[:, None]])
        return blocks

    def _bring(self, blocks: Blocks) -> npt.NDArray[np.uint32]:
        """Make sure that the blocks are present and checked, and return their versions."""
        clock = int(self._state["version"][0]) + 1 & 0xFFFFFFFF
        self._state["version"][0] = clock
        self._used[blocks] = clock
        versions: npt.NDArray[np.uint32] = self._versions[blocks].copy()
        doubtful = blocks[((versions & 1) == 0) | (self._checked[blocks] != versions)]
        if doubtful.size == 1:
            self._settle(int(doubtful[0]))
        elif doubtful.size:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="bloomery-stream")
            for fetch in [self._pool.submit(self._settle, int(block)) for block in doubtful]:
                fetch.result()  # each fetch has a deadline of its own
        versions = self._versions[blocks].copy()
        # a block that left already gets 0, which never matches
        return np.where(versions & 1, versions, np.uint32(0))

    def _settle(self, block: int) -> None:
        """Make sure that one block is present and correct."""
        version = int(self._versions[block])
        begin = block * self.outline.block_bytes
        length = min(self.outline.block_bytes, self.outline.size_bytes - begin)
        # an earlier process left it, or another one fetched it; it is correct unless power was lost
        if version & 1:
            if _sum(os.pread(self._file, length, begin)) == int(self.outline.sums[block]):
                self._checked[block] = version
                return
            if int(self._versions[block]) == version:
                self._drop(np.array([block]), np.array([version]))
        content = self._fetched(begin, length, int(self.outline.sums[block]))
        with self._alone(), as_storage_error(self._path):
            if self._versions[block] & 1:
                return  # another process was quicker; the block is checked when it is read
            self._make_room()
            _write_all(self._file, content, begin)
            self._state["used"][0] += 1
            self._versions[block] += 1
            self._checked[block] = self._versions[block]

    def _fetched(self, begin: int, length: int, expected: int) -> bytes:
        for _ in range(2):  # a second time, since the first transfer may have been damaged on the way
            content = self._fetch(begin, length)
            if _sum(content) == expected:
                return content
        raise DataError(
            f"Bytes {begin:,} to {begin + length - 1:,} of {self.outline.address} are not what its seal "
            "said.",
            remedy="Restore there what was sealed. If what is there now is right and sealed, remove "
            f"{self._path.parent}: it is fetched again.",
        )

    def _make_room(self) -> None:
        """Remove the longest unused blocks, at least a sixteenth of all, to get below the capacity. The
        caller holds the lock.
        """
        if int(self._state["used"][0]) < self.capacity:
            return
        present = np.flatnonzero(self._versions & 1)
        leaving = max(1, present.size - self.capacity + max(1, self.capacity // 16))
        oldest = present[np.argsort(self._used[present], kind="stable")[:leaving]]
        self._release(oldest)

    def _drop(self, blocks: Blocks, versions: Blocks) -> None:
        with self._alone():
            self._release(blocks[self._versions[blocks] == versions])

    def _release(self, blocks: Blocks) -> None:
        """Remove blocks. The caller holds the lock.

        The state changes before the bytes go, so that no reader takes a hole for tokens.
        """
        self._versions[blocks] += 1
        for block in blocks.tolist():
            punch_hole(
                self._file, block * self.outline.block_bytes, self.outline.block_bytes, path=self._path
            )
        self._state["used"][0] = int((self._versions & 1).sum())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock on the state against the threads of this process and all other processes."""
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


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def punch_hole(file: int, start: int, length: int, *, path: Path) -> None:
    """Free the disk blocks of a part of a file. Raises StorageError if its file system cannot do that."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    status = fallocate(file, _PUNCH_AND_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(length))
    if status and ctypes.get_errno() != errno.EINTR:
        raise StorageError(
            f"The file system of {path} cannot give back parts of a file: {os.strerror(ctypes.get_errno())}.",
            remedy="Set data.cache to a directory on a local disk (ext4, xfs, btrfs, tmpfs).",
        )


def _sum(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content)


def _write_all(file: int, content: bytes, begin: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, begin)
        view, begin = view[written:], begin + written
