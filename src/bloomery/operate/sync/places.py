"""Opens the destination of `bloomery sync`: an object store, or a repository of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from bloomery.config.checkpoint import SCHEMES
from bloomery.config.data import HUB_PREFIX
from bloomery.errors import StorageError
from bloomery.objects import Objects, ObjectStat, storage_failure

_BACKUPS = "checkpoints/"


class SyncPlace(Protocol):
    """A place that holds small files by key. Its methods raise StorageError.

    name: as it was given. most_bytes: what one call of `publish` takes.
    """

    name: str
    most_bytes: int

    def entries(self) -> dict[str, ObjectStat]:
        """Return the size and mark of each file; a mark changes when the file does."""
        ...

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write files, each of which replaces an earlier one."""
        ...

    def remove(self, keys: Collection[str]) -> None:
        """Remove files."""
        ...

    def content(self, key: str, *, begin: int = 0) -> bytes:
        """Return the bytes of a file from `begin` on."""
        ...


class StorePlace:
    """The objects below one URL. See `SyncPlace`."""

    most_bytes = 32 << 20

    def __init__(self, url: str, *, patience_s: float = 120.0, create: bool = True) -> None:
        self.name = url
        self._objects = Objects(url, patience_s=patience_s, create=create)

    def entries(self) -> dict[str, ObjectStat]:
        """Return the size and mark of each object."""
        try:
            entries = {entry.key: entry.stat for entry in self._objects.entries()}
        except OSError as error:
            raise storage_failure(error, doing=f"Listing {self.name}") from error
        if any(key.startswith(_BACKUPS) for key in entries):
            raise StorageError(
                f"{self.name} holds backups, which have whole files under the names of pieces.",
                remedy="Give a place of its own, such as the same URL with /logs.",
            )
        return entries

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write objects."""
        try:
            for key, content in files.items():
                self._objects.put(key, content)
        except OSError as error:
            raise storage_failure(error, doing=f"Sending to {self.name}") from error

    def remove(self, keys: Collection[str]) -> None:
        """Remove objects."""
        try:
            for key in keys:
                self._objects.delete(key)
        except OSError as error:
            raise storage_failure(error, doing=f"Removing from {self.name}") from error

    def content(self, key: str, *, begin: int = 0) -> bytes:
        """Return the bytes of an object from `begin` on."""
        try:
            return self._objects.content(key, begin=begin)
        except OSError as error:
            raise storage_failure(error, doing=f"Reading {self.name}") from error


def open_place(text: str, *, is_public: bool = False, create: bool = True) -> SyncPlace:
    """Return the place that a user named: hf:OWNER/NAME, or a URL.

    is_public: whether a repository of the Hub that is made now is for everybody to read.
    create: make the directory of a file:// URL; who only reads makes none.
    """
    if text.startswith(HUB_PREFIX):
        from bloomery.operate.sync.hub import HubRepository

        return HubRepository(text.removeprefix(HUB_PREFIX), is_public=is_public)
    refuse_other_places(text)
    return StorePlace(text, create=create)


def refuse_other_places(text: str) -> None:
    """Raise StorageError where a text names neither a store that can be listed nor a repository."""
    scheme = text.partition("://")[0] if "://" in text else ""
    if scheme not in SCHEMES and not text.startswith(HUB_PREFIX):
        raise StorageError(
            f"{text!r} is no place that files can be sent to and listed.",
            remedy="Give s3://bucket/path, gs://…, az://…, file:///path, or hf:OWNER/NAME for the Hub.",
        )
