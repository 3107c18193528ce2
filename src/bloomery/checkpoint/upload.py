"""Copying one checkpoint to a remote place: file by file, each read back and compared, the manifest last.

Killed anywhere, it goes on where it was: what has been verified is noted beside the run. There is no
checkpoint at the other end before its manifest, which is written when all that it names has been verified.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bloomery.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    FileRecord,
    Index,
    Manifest,
    read_index,
    read_manifest,
)
from bloomery.checkpoint.remote import CHECKPOINTS
from bloomery.checkpoint.subset import Texts, subset
from bloomery.objects import Objects, Stat, storage_failure

Progress = Callable[[int, int], None]
"""progress(bytes done, bytes in all)."""


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """A checkpoint that is at the other end, verified. what: "all", or "model" for the weights alone."""

    url: str
    what: str
    bytes: int
    bytes_sent: int


class Interrupted(Exception):
    """The upload was asked to stop. What has been verified is noted."""


def upload_checkpoint(
    directory: Path,
    remote: Objects,
    *,
    what: str = "all",
    notes: Path,
    progress: Progress | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Uploaded:
    """Copy a checkpoint to `checkpoints/NAME` of a remote place and verify it there.

    what: "all", or "model" for the weights alone, which never take the place of all. notes: a file in which
    it is kept what has been verified. go_on: asked between files; Interrupted is raised when it says no.
    Raises StorageError where the remote place fails, and CheckpointError where the checkpoint itself is
    damaged.
    """
    manifest = read_manifest(directory)
    index = read_index(directory, manifest)
    texts = _as_it_is(directory, manifest, index)
    try:
        if what != "all" and _Upload(directory, remote, texts, notes).is_there:
            what = "all"
        if what != "all":
            texts = subset(manifest, index, parts={what})
        upload = _Upload(directory, remote, texts, notes)
        sent = upload.carry_out(progress or (lambda done, total: None), go_on)
    except OSError as error:
        raise storage_failure(error, doing=f"The backup of {directory.name}") from error
    url = remote.place(upload.prefix.rstrip("/"))
    return Uploaded(url=url, what=what, bytes=upload.total, bytes_sent=sent)


def _as_it_is(directory: Path, manifest: Manifest, index: Index) -> Texts:
    records = tuple(index.files[file.name] for file in manifest.files)
    index_bytes, manifest_bytes = (directory / INDEX).read_bytes(), (directory / MANIFEST).read_bytes()
    return Texts(files=records, index=index_bytes, manifest=manifest_bytes)


class _Upload:
    """One checkpoint on its way."""

    def __init__(self, directory: Path, remote: Objects, texts: Texts, notes: Path) -> None:
        self.prefix = f"{CHECKPOINTS}/{directory.name}/"
        self.total = sum(file.bytes for file in texts.files) + len(texts.index) + len(texts.manifest)
        self._directory, self._remote, self._texts, self._notes = directory, remote, texts, notes
        self._noted = _read_notes(notes, remote.url)

    @property
    def is_there(self) -> bool:
        """Whether the other end has this manifest, and so all that it names."""
        return self._is_same(MANIFEST, self._texts.manifest)

    def carry_out(self, progress: Progress, go_on: Callable[[], bool]) -> int:
        """Bring the other end to what the checkpoint is; return the bytes that were sent."""
        if not self.is_there:
            self._take_back()
        sent = done = 0
        for record in self._texts.files:
            if not go_on():
                raise Interrupted(self._directory.name)
            sent += self._file(record)
            done += record.bytes
            progress(done, self.total)
        for name, content in ((INDEX, self._texts.index), (MANIFEST, self._texts.manifest)):
            if not self._is_same(name, content):
                self._remote.put(self.prefix + name, content)
                sent += len(content)
                if not self._is_same(name, content):
                    raise OSError(5, f"{self._remote.place(self.prefix + name)} is not what was written")
        self._notes.unlink(missing_ok=True)
        progress(self.total, self.total)
        return sent

    def _file(self, record: FileRecord) -> int:
        """Have one data file there, verified; return the bytes that were sent."""
        key = self.prefix + record.name
        there = self._stat(key)
        if there is not None and there.bytes == record.bytes:
            if self._noted.get(record.name) == there.mark:
                return 0
            if self._remote.digest(key) == record.xxh3_128:
                self._note(record, there)
                return 0
        self._remote.put(key, self._directory / record.name)
        if self._remote.digest(key) != record.xxh3_128:
            raise OSError(
                5,
                f"{self._remote.place(key)} is not what was saved: either {self._directory / record.name} is "
                "damaged (see `bloomery ckpt verify`), or it was changed on its way",
            )
        self._note(record, self._remote.stat(key))
        return record.bytes

    def _take_back(self) -> None:
        """Remove another content's manifest first: nothing half replaced may count as a checkpoint."""
        if self._stat(self.prefix + MANIFEST) is not None:
            self._remote.delete(self.prefix + MANIFEST)

    def _is_same(self, name: str, content: bytes) -> bool:
        there = self._stat(self.prefix + name)
        if there is None or there.bytes != len(content):
            return False
        return self._remote.digest(self.prefix + name) == xxhash.xxh3_128_hexdigest(content)

    def _stat(self, key: str) -> Stat | None:
        try:
            return self._remote.stat(key)
        except FileNotFoundError:
            return None

    def _note(self, record: FileRecord, there: Stat) -> None:
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"url": self._remote.url, "file": record.name, "mark": there.mark})
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _read_notes(notes: Path, url: str) -> dict[str, str]:
    """Return the mark of each file that was verified at a place. A line cut short is passed over."""
    noted: dict[str, str] = {}
    if not notes.exists():
        return noted
    for line in notes.read_text(encoding="utf-8").splitlines():
        try:
            said: Any = json.loads(line)  # Any: JSON
            if said["url"] == url:
                noted[said["file"]] = said["mark"]
        except (ValueError, KeyError, TypeError):
            continue
    return noted
