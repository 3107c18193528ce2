"""Reads the files of a checkpoint in object storage, as a `Source`, and those that a run keeps there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bloomery.checkpoint.format.source import STORED_AT, Directory, Ranges
from bloomery.errors import CheckpointError
from bloomery.objects import Objects

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

    def open(self, file: str) -> Ranges:
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
        self._entry = Directory(entry)
        self.stored = RemoteCheckpoint(Objects(stored_url(entry)), "")

    @property
    def name(self) -> str:
        """The checkpoint's own name."""
        return self._entry.name

    def place(self, file: str = "") -> str:
        """Return the URL of a file, or of the checkpoint."""
        return self.stored.place(file)

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of a file."""
        is_here = file.endswith(".json") and file != "index.json"
        return (self._entry if is_here else self.stored).content(file, at_most=at_most)

    def size(self, file: str) -> int:
        """Return a file's bytes."""
        return self.stored.size(file)

    def open(self, file: str) -> Ranges:
        """Open a file."""
        return self.stored.open(file)


def stored_url(entry: Path) -> str:
    """Return the URL of the checkpoint that an entry of the run directory names. Raises CheckpointError."""
    try:
        return str(json.loads((entry / STORED_AT).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
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
