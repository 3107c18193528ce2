"""Reads a checkpoint's files, each block verified by its hash: ranges for a load, or all that a rank wrote.

What was just written is read past the page cache, so that the disk is checked and not the memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import xxhash

from bloomery.checkpoint.format.commit import final_directory
from bloomery.checkpoint.format.data_file import BlockHasher, shortened
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DIGITS,
    INDEX,
    DamagedCheckpoint,
    FileRecord,
    IndexedBox,
    read_manifest,
    unreadable,
)
from bloomery.checkpoint.format.source import RangedFile, Source
from bloomery.errors import CheckpointError

Piece: TypeAlias = tuple[int, memoryview]
"""(begin, view): the view is to be filled with the bytes of the file from `begin` on."""


class VerifiedReader:
    """Reads ranges of one data file of a checkpoint, and checks each block that it touches against its hash.

    A context manager; several threads may use it.

    boxes: the boxes that lie in the file, for messages. count: called with the bytes of each read.
    Raises DamagedCheckpoint, naming file, block and tensors; StorageError where the file cannot be reached.
    """

    def __init__(
        self,
        source: Source,
        record: FileRecord,
        *,
        boxes: Sequence[IndexedBox] = (),
        count: Callable[[int], None] | None = None,
    ) -> None:
        self._record, self._boxes, self._count = record, boxes, count
        self._place = source.place(record.name)
        try:
            self._file: RangedFile = source.open(record.name)
        except OSError as error:
            raise unreadable(self._place, error) from error

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill the views. pieces: sorted by `begin`, without overlap, within the file.

        A block that several pieces touch is read once; a block that none touches is not read.
        """
        for run in _runs([piece for piece in pieces if len(piece[1])]):
            if run[0][0] < 0 or run[-1][0] + len(run[-1][1]) > self._record.bytes:
                raise ValueError(f"{self._place}: a range beyond its {self._record.bytes:,} bytes")
            for window in _windows(_filled(run, end=self._record.bytes), most=self._file.window_bytes):
                self._read_window(window)

    def __enter__(self) -> VerifiedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def _read_window(self, window: Sequence[Piece]) -> None:
        begin, views = window[0][0], [view for _, view in window]
        wanted = sum(map(len, views))
        try:
            count = self._file.read_into(views, begin=begin)
        except OSError as error:
            what = self._damaged(begin, f"cannot be read ({error.strerror or error})").message
            raise unreadable(self._place, error, what=what) from error
        if count < wanted:
            raise self._damaged(begin + count, "ends too early")
        if self._count is not None:
            self._count(count)
        self._compare(views, begin)

    def _compare(self, views: Sequence[memoryview], begin: int) -> None:
        """Verify the blocks that the views hold, from the block at `begin` on."""
        hasher, hashed, number = xxhash.xxh3_64(), 0, begin // BLOCK_BYTES
        for view in views:
            while view:
                part, view = view[: BLOCK_BYTES - hashed], view[BLOCK_BYTES - hashed :]
                hasher.update(part)
                hashed += len(part)
                if hashed == self._length(number):
                    if hasher.hexdigest() != self._record.blocks[number * DIGITS : (number + 1) * DIGITS]:
                        what = "does not have the hash it was saved with"
                        raise self._damaged(number * BLOCK_BYTES, what)
                    hasher.reset()
                    hashed, number = 0, number + 1

    def _length(self, number: int) -> int:
        return min(BLOCK_BYTES, self._record.bytes - number * BLOCK_BYTES)

    def _damaged(self, offset: int, what: str) -> DamagedCheckpoint:
        start = offset - offset % BLOCK_BYTES
        names = [box.name for box in self._boxes if box.begin < start + BLOCK_BYTES and start < box.end]
        return DamagedCheckpoint(
            f"{self._place}: the block at byte {start:,} {what} (it holds {shortened(names)})"
        )


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in groups, between which there is at least one block that no piece touches."""
    run: list[Piece] = []
    for piece in pieces:
        if run and piece[0] // BLOCK_BYTES > -(-(run[-1][0] + len(run[-1][1])) // BLOCK_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _filled(run: Sequence[Piece], *, end: int) -> list[Piece]:
    """Return a group with temporary views in its gaps, so that it covers whole blocks without a gap."""
    filled: list[Piece] = []
    position = run[0][0] - run[0][0] % BLOCK_BYTES
    last = run[-1][0] + len(run[-1][1])
    for begin, view in (*run, (min(end, last + -last % BLOCK_BYTES), memoryview(b""))):
        if begin > position:
            filled.append((position, memoryview(bytearray(begin - position))))
        filled.append((begin, view))
        position = begin + len(view)
    return filled


def _windows(pieces: Sequence[Piece], *, most: int) -> Iterator[list[Piece]]:
    """Cut adjoining pieces into windows that are read at a time: whole blocks, `most` bytes at most."""
    window: list[Piece] = []
    stop = pieces[0][0] + most
    for begin, view in pieces:
        while begin + len(view) >= stop:
            window.append((begin, view[: stop - begin]))
            yield window
            begin, view, window = stop, view[stop - begin :], []
            stop += most
        if view:
            window.append((begin, view))
    if window:
        yield window


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
                count = _read_at(file, view, hasher.bytes)
                if not count:
                    return
                hasher.update(view[:count])
                os.posix_fadvise(file, 0, hasher.bytes, os.POSIX_FADV_DONTNEED)  # where it was cached
                read(count)
                rest()
            raise GivenUp
        finally:
            os.close(file)


def _read_at(file: int, view: memoryview, offset: int) -> int:
    """Fill a view as far as the file goes, and return how many bytes there were. Raises OSError.

    Some file systems open a file for direct I/O and then refuse to read so, all of it or what begins at an
    end that is no whole page; the file's flag then goes.
    """
    try:
        return os.preadv(file, [view], offset)
    except OSError as error:
        flags, direct = fcntl.fcntl(file, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
        if error.errno not in _REFUSALS or not flags & direct:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~direct)
        return os.preadv(file, [view], offset)
