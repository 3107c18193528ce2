"""The interface through which a checkpoint's files are read, for a local directory and for object storage.

Memory (`writer.memory_replica`) implements it too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Protocol

from bloomery.errors import CheckpointError
from bloomery.objects import Objects

STORED_AT = "stored-at.json"
"""The file of an entry in the run directory that says where in object storage the checkpoint is."""
LOCAL_WINDOW_BYTES = 1 << 20
"""The bytes that are read at a time: they are still in the processor's cache when they are hashed."""
_VIEWS_AT_ONCE = 512
"""preadv takes 1,024 buffers at most."""


class RangedFile(Protocol):
    """One file, open for ranged reads from several threads. A context manager: leaving it closes the file.

    window_bytes: how much to read at a time, a multiple of the block size.
    """

    window_bytes: int

    def read_into(self, views: Sequence[memoryview], *, begin: int) -> int:
        """Fill the views, one after the other, with the bytes from `begin` on; return how many there were.

        Fewer than the views hold only where the file ends. Raises OSError.
        """

    def __enter__(self) -> RangedFile: ...

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

    def open(self, file: str) -> RangedFile:
        """Open a file. Raises OSError; FileNotFoundError where it is missing."""


class LocalCheckpoint:
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

    def open(self, file: str) -> RangedFile:
        """Open a file."""
        return _LocalFile(self.path / file)


def source_of(where: Path | Source) -> Source:
    """Return the source of a checkpoint's path or, unchanged, a source.

    The path of a checkpoint that its run keeps in object storage gives the source there.
    """
    if not isinstance(where, Path):
        return where
    if not is_stored_elsewhere(where):
        return LocalCheckpoint(where)
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


CHECKPOINTS = "checkpoints"
"""The prefix of a run's checkpoints below the run's own URL."""


class RemoteCheckpoint:
    """A checkpoint in a remote store, as a `Source`: only the bytes that are read are fetched.

    is_marked: whether a listing showed that it is marked as suspect.
    """

    def __init__(self, remote: Objects, prefix: str, *, is_marked: bool = False) -> None:
        self._remote, self._prefix, self.is_marked = remote, prefix.strip("/"), is_marked

    @property
    def name(self) -> str:
        """The checkpoint's own name."""
        return (self._prefix or self._remote.url).rsplit("/", 1)[-1]

    def place(self, file: str = "") -> str:
        """Return the URL of a file, or of the checkpoint."""
        return self._remote.place(self._key(file))

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of a file."""
        size = min(at_most, self._remote.stat(self._key(file)).bytes)
        return self._remote.content(self._key(file), end=size)

    def size(self, file: str) -> int:
        """Return a file's bytes."""
        return self._remote.stat(self._key(file)).bytes

    def open(self, file: str) -> RangedFile:
        """Open a file. Asks for its size, so that a missing file is an error here."""
        return _RemoteFile(self._remote, self._key(file))

    def _key(self, file: str) -> str:
        return "/".join(part for part in (self._prefix, file) if part)


class StoredCheckpoint:
    """A checkpoint of a run that saves to object storage, by its entry in the run directory, as a `Source`.

    The entry is a directory with a copy of the manifest and, where the checkpoint is suspect, its mark: they
    are read from there, so that listing a run asks no store. Everything else is read from the store.
    """

    def __init__(self, entry: Path) -> None:
        self._entry, self._url = LocalCheckpoint(entry), stored_url(entry).rstrip("/")

    @cached_property
    def stored(self) -> RemoteCheckpoint:
        """The checkpoint in the store, opened at the first use: what the entry says needs no store."""
        return RemoteCheckpoint(Objects(self._url, create=False), "")

    @property
    def name(self) -> str:
        """The checkpoint's own name."""
        return self._entry.name

    def place(self, file: str = "") -> str:
        """Return the URL of a file, or of the checkpoint."""
        return f"{self._url}/{file}" if file else self._url

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of a file."""
        is_here = file.endswith(".json") and file != "index.json"
        return (self._entry if is_here else self.stored).content(file, at_most=at_most)

    def size(self, file: str) -> int:
        """Return a file's bytes."""
        return self.stored.size(file)

    def open(self, file: str) -> RangedFile:
        """Open a file."""
        return self.stored.open(file)


def stored_url(entry: Path) -> str:
    """Return the URL of the checkpoint that an entry of the run directory names. Raises CheckpointError."""
    try:
        return str(json.loads((entry / STORED_AT).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{entry / STORED_AT} does not say where the checkpoint is stored",
            remedy="Remove the directory: the next start of the run writes it anew.",
        ) from error


class _RemoteFile:
    """Reads ranges of one object. Caches nothing, and never asks for bytes beyond the object's end."""

    window_bytes = 32 << 20

    def __init__(self, remote: Objects, key: str) -> None:
        self._remote, self._key = remote, key
        stat = remote.stat(key)
        self._bytes, self._mark = stat.bytes, stat.mark

    def read_into(self, views: Sequence[memoryview], *, begin: int) -> int:
        end = min(begin + sum(map(len, views)), self._bytes)
        position, left = begin, [view for view in views if view]
        for piece in self._remote.pieces(self._key, begin=begin, end=end, mark=self._mark):
            while piece:
                count = min(len(piece), len(left[0]))
                left[0][:count], piece = piece[:count], piece[count:]
                position += count
                left[0] = left[0][count:]
                if not left[0]:
                    left.pop(0)
        return position - begin

    def __enter__(self) -> _RemoteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""
