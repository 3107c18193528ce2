"""Reads ranges of a data file, and verifies the hash of each block they touch before the bytes are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeAlias

import xxhash

from bloomery.checkpoint.format.data_file import shortened
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DIGITS,
    DamagedCheckpoint,
    FileRecord,
    IndexedBox,
    unreadable,
)
from bloomery.checkpoint.format.source import Ranges, Source

Piece: TypeAlias = tuple[int, memoryview]
"""(begin, view): the view is to be filled with the bytes of the file from `begin` on."""


class VerifiedReader:
    """Reads ranges of one data file. A context manager; may be used by several threads.

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
            self._file: Ranges = source.open(record.name)
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
