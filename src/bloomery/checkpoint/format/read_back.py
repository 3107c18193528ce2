"""Reads back what one rank wrote of a checkpoint, past the page cache, and compares the hashes."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from bloomery.checkpoint.format.commit import final_directory
from bloomery.checkpoint.format.data_file import BlockHasher
from bloomery.checkpoint.format.manifest import BLOCK_BYTES, DIGITS, INDEX, FileRecord, read_manifest
from bloomery.errors import CheckpointError

_CHUNK_BYTES = 8 << 20
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP}


class GivenUp(Exception):
    """The reading back was stopped, because the writer is needed for something else."""


def read_back(
    partial: Path,
    records: Iterable[FileRecord],
    *,
    read: Callable[[int], None] = lambda bytes: None,
    rest: Callable[[], None] = lambda: None,
    go_on: Callable[[], bool] = lambda: True,
) -> str:
    """Return what is wrong with the first file that differs from its record; "" where all are right.

    partial: the directory into which the rank wrote; its files may be in the committed checkpoint by now.
    read: called with the bytes of each read. rest: called after it; may pause. go_on: asked before each read;
    GivenUp is raised where it says no.
    """
    for record in records:
        hasher = BlockHasher()
        try:
            _hash_file(_opened(partial, record.name), hasher, read, rest, go_on)
        except OSError as error:
            return f"{record.name} cannot be read back: {error.strerror or error}"
        if hasher.bytes != record.bytes:
            return f"{record.name} has {hasher.bytes:,} bytes of the {record.bytes:,} that were written"
        read_record = hasher.record(record.name)
        if read_record.xxh3_128 != record.xxh3_128:
            return f"{record.name} is not what was written{_where(read_record.blocks, record.blocks)}"
    return ""


def read_back_index(partial: Path) -> str:
    """Return what is wrong with the manifest and the index of a committed checkpoint; "" for nothing."""
    final = final_directory(partial)
    try:
        manifest = read_manifest(final)
    except CheckpointError as error:
        return error.message
    record = FileRecord(name=INDEX, bytes=manifest.index_bytes, xxh3_128=manifest.index_xxh3_128, blocks="")
    return read_back(partial, [record])


def _where(read_blocks: str, written: str) -> str:
    """Return the place of the first block that differs, for the message; "" where blocks are not known."""
    for block in range(len(written) // DIGITS):
        digits = slice(block * DIGITS, (block + 1) * DIGITS)
        if read_blocks[digits] != written[digits]:
            return f", from byte {block * BLOCK_BYTES:,} on"
    return ""


def _opened(partial: Path, name: str) -> int:
    """Open a file where it is: the first rank renames the directory at any moment. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    for path in (partial / name, final_directory(partial) / name):
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return os.open(path, flags)
    return os.open(final_directory(partial) / name, flags)


def _hash_file(
    file: int,
    hasher: BlockHasher,
    read: Callable[[int], None],
    rest: Callable[[], None],
    go_on: Callable[[], bool],
) -> None:
    """Hash a file from its beginning to its end, and close it. Raises OSError, GivenUp."""
    with mmap.mmap(-1, _CHUNK_BYTES) as buffer, memoryview(buffer) as view:  # aligned to pages
        try:
            while go_on():
                count = os.preadv(file, [view], hasher.bytes)
                if not count:
                    return
                hasher.update(view[:count])
                os.posix_fadvise(file, 0, hasher.bytes, os.POSIX_FADV_DONTNEED)  # where it was cached
                read(count)
                rest()
            raise GivenUp
        finally:
            os.close(file)
