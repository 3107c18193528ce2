"""The interface through which a checkpoint's files are read, and its implementation for a local directory.

Objects elsewhere (`remote.remote_checkpoint`) and memory (`writer.memory_replica`) implement it too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

STORED_AT = "stored-at.json"
"""The file of an entry in the run directory that says where in object storage the checkpoint is."""
LOCAL_WINDOW_BYTES = 1 << 20
"""So much is read at a time: it is still in the processor's cache when it is hashed."""
_VIEWS_AT_ONCE = 512
"""preadv takes 1,024 buffers at most."""


class Ranges(Protocol):
    """One file, open for ranged reads from several threads. A context manager: leaving it closes the file.

    window_bytes: how much to read at a time, a multiple of the block size.
    """

    window_bytes: int

    def read_into(self, views: Sequence[memoryview], *, begin: int) -> int:
        """Fill the views, one after the other, with the bytes from `begin` on; return how many there were.

        Fewer than the views hold only where the file ends. Raises OSError.
        """

    def __enter__(self) -> Ranges: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Source(Protocol):
    """The files of one checkpoint."""

    @property
    def name(self) -> str:
        """The checkpoint's own name, as in `step-000500.i002`."""

    def place(self, file: str = "") -> str:
        """Return where a file, or the checkpoint itself, is: for messages."""

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of a file. Raises OSError (FileNotFoundError)."""

    def size(self, file: str) -> int:
        """Return a file's bytes. Raises OSError; FileNotFoundError where it is missing."""

    def open(self, file: str) -> Ranges:
        """Open a file. Raises OSError; FileNotFoundError where it is missing."""


class Directory:
    """A checkpoint on a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The checkpoint's own name."""
        return self.path.name

    def place(self, file: str = "") -> str:
        """Return where a file, or the checkpoint itself, is."""
        return str(self.path / file)

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of a file."""
        with (self.path / file).open("rb") as opened:
            return opened.read(at_most)

    def size(self, file: str) -> int:
        """Return a file's bytes."""
        return (self.path / file).stat().st_size

    def open(self, file: str) -> Ranges:
        """Open a file."""
        return _LocalFile(self.path / file)


def source_of(where: Path | Source) -> Source:
    """Return the source of a checkpoint's path or, unchanged, a source.

    The path of a checkpoint that its run keeps in object storage gives the source there.
    """
    if not isinstance(where, Path):
        return where
    if not is_stored_elsewhere(where):
        return Directory(where)
    from bloomery.checkpoint.format.remote_source import StoredCheckpoint

    return StoredCheckpoint(where)


def is_stored_elsewhere(directory: Path) -> bool:
    """Whether a directory is only the entry of a checkpoint that is in object storage."""
    return (directory / STORED_AT).is_file()


class _LocalFile:
    """Reads a file with preadv. Direct I/O was no faster, and a restart finds the pages still cached."""

    window_bytes = LOCAL_WINDOW_BYTES

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, views: Sequence[memoryview], *, begin: int) -> int:
        left = [view for view in views if view]
        position = begin
        while left:
            count = os.preadv(self._file, left[:_VIEWS_AT_ONCE], position)
            if count == 0:
                break
            position += count
            left = _without(left, count)
        return position - begin

    def __enter__(self) -> _LocalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def _without(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the views after their first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
