"""A data file that lies in memory as it is to be stored: straight to the disk, hashed on the way."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bloomery.checkpoint.datafile import BlockHasher
from bloomery.checkpoint.manifest import FileRecord

PAGE_BYTES = 4096
"""What direct writing wants addresses, offsets and lengths to be multiples of."""
_CHUNK_BYTES = 8 << 20
_WRITES_AT_ONCE = 4
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP}


def write_image(
    path: Path,
    image: memoryview,
    *,
    length: int,
    until_filled: Callable[[int], None] = lambda bytes: None,
    rest: Callable[[], None] = lambda: None,
    anew: bool = False,
) -> FileRecord:
    """Write the first `length` bytes of `image` to a new durable file, and return its record. Raises OSError.

    image: page-aligned, and a whole number of pages; what follows `length` is cut off again.
    The page cache is passed by, so that nothing of the training's is driven out of it; where the file system
    does not allow that, it is written as any file. until_filled: returns once so many bytes of it are there.
    rest: called between every few megabytes.
    anew: what lies there is what a writer that died has left. It is never written to: whatever of that writer
    is still under way to the disk ends in a file without a name.
    """
    if anew:
        path.unlink(missing_ok=True)
    file, hasher = _opened(path), BlockHasher()
    try:
        _reserve(file, length)
        with ThreadPoolExecutor(_WRITES_AT_ONCE) as pool:
            pending: deque[Future[None]] = deque()
            for start in range(0, length, _CHUNK_BYTES):
                if start:
                    rest()
                stop = min(start + _CHUNK_BYTES, length)
                until_filled(stop)
                whole_pages = image[start : stop + -stop % PAGE_BYTES]
                pending.append(pool.submit(_write_at, file, whole_pages, start))
                hasher.update(image[start:stop])
                if len(pending) > _WRITES_AT_ONCE:
                    pending.popleft().result()
            while pending:
                pending.popleft().result()
        os.ftruncate(file, length)
        os.fsync(file)
    finally:
        os.close(file)
    return hasher.record(path.name)


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o666)


def _reserve(file: int, length: int) -> None:
    """Take a file's blocks before it is written. Raises OSError when there is no room.

    Writes that need not lengthen a file do not wait for each other; where a file system cannot, they do.
    """
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if allocate is None or not length:  # not Linux
        return
    allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if allocate(file, 0, 0, length) and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            count = os.pwrite(file, data, offset)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            direct = getattr(os, "O_DIRECT", 0)
            if error.errno not in _REFUSALS or not flags & direct:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~direct)
            continue
        data, offset = data[count:], offset + count
