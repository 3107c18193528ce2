"""Sends data files of a checkpoint to a remote store, each verified and noted, by any rank or thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.manifest import FileRecord
from bloomery.checkpoint.format.remote_source import CHECKPOINTS
from bloomery.objects import Objects, ObjectStat


class FileSender:
    """Sends files of one checkpoint to `checkpoints/NAME` of a store. Several threads may use one.

    A file counts as verified where the store's own checksum of it is that of the bytes that were hashed while
    they were sent; where the store gives no such checksum, the object is read back.

    notes: the file in which this sender records what is verified. noted: the mark of each file that was
    verified before, by name.
    """

    def __init__(self, directory: Path, remote: Objects, *, notes: Path, noted: Mapping[str, str]) -> None:
        self.prefix = f"{CHECKPOINTS}/{directory.name}/"
        self._directory, self._remote, self._notes, self._noted = directory, remote, notes, noted
        self._writing = threading.Lock()

    def send(self, record: FileRecord) -> int:
        """Upload and verify one data file unless it is there already; return the bytes that were sent.

        Raises OSError.
        """
        key = self.prefix + record.name
        stored = self.stat(record.name)
        if stored is not None and stored.bytes == record.bytes:
            if self._noted.get(record.name) == stored.mark:
                return 0
            if self._remote.digest(key) == record.xxh3_128:
                self._note(record, stored)
                return 0
        sent = self._remote.send(key, self._directory / record.name)
        is_right = sent.xxh3_128 == record.xxh3_128
        if is_right and not sent.is_proven:
            is_right = self._remote.digest(key) == record.xxh3_128
        if not is_right:
            raise OSError(
                5,
                f"{self._remote.place(key)} is not what was saved: either {self._directory / record.name} is "
                "damaged (see `bloomery ckpt verify`), or it was changed on its way",
            )
        self._note(record, self._remote.stat(key))
        return record.bytes

    def stat(self, name: str) -> ObjectStat | None:
        """Return what the store has under a name; None for nothing. Raises OSError."""
        try:
            return self._remote.stat(self.prefix + name)
        except FileNotFoundError:
            return None

    def _note(self, record: FileRecord, stored: ObjectStat) -> None:
        line = json.dumps({"url": self._remote.url, "file": record.name, "mark": stored.mark})
        with self._writing:
            self._notes.parent.mkdir(parents=True, exist_ok=True)
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def read_notes(notes: Path, url: str) -> dict[str, str]:
    """Return the mark (ETag) of each file that was verified at `url`, by name, as all ranks noted it.

    notes: the first rank's file; those of other ranks have names that begin with its name. Truncated lines
    are skipped.
    """
    noted: dict[str, str] = {}
    for path in all_notes(notes):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                note: Any = json.loads(line)  # Any: JSON
                if note["url"] == url:
                    noted[note["file"]] = note["mark"]
            except (ValueError, KeyError, TypeError):
                continue
    return noted


def all_notes(notes: Path) -> list[Path]:
    """Return the notes of all ranks about one checkpoint."""
    return sorted(notes.parent.glob(f"{notes.name}*"))
