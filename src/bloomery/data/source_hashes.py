"""Hashes of the files of text, kept beside the prepared data, so that each content is read once.

A record answers while the file's size and times are those that it had when it was hashed. So at a start the
first rank reads what is new, and all other ranks, and the next start, read nothing.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import xxhash

from bloomery import durable
from bloomery.errors import DataError

log = logging.getLogger(__name__)

_FILE = "source-hashes.json"
_PIECE_BYTES = 4 << 20
_SETTLED_NS = 2_000_000_000
"""A file that was changed later than so long before it was hashed may be changed again at the same time."""


class SourceHashes:
    """The hashes of files, from the record in `directory` or from their contents."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self._known = _read(self._path)
        self._is_new = False

    def of(self, path: Path) -> tuple[str, int]:
        """Return the xxh3-128 of a file's content and its bytes. Raises DataError where it cannot be read."""
        key = str(path.absolute())
        try:
            record = self._known.get(key)
            if record is not None and record[:3] == _mark(path.stat()):
                return str(record[3]), int(record[0])
            begun_ns = time.time_ns()
            before = path.stat()
            digest, total = _hashed(path)
            if before.st_mtime_ns < begun_ns - _SETTLED_NS and total == before.st_size:
                self._known[key] = [*_mark(before), digest]
                self._is_new = True
        except OSError as unreadable:
            raise DataError(
                f"Cannot read {path}: {unreadable.strerror}.", remedy="Check that it is yours to read."
            ) from unreadable
        return digest, total

    def keep(self) -> None:
        """Write the record, if something was hashed that it lacks. Without it the files are read again."""
        if not self._is_new:
            return
        try:
            durable.write_whole(self._path, json.dumps(self._known))
        except OSError as error:
            log.warning("%s could not be written, so the text is read at each start: %s", self._path, error)


def _mark(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _hashed(path: Path) -> tuple[str, int]:
    content, total = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            content.update(piece)
            total += len(piece)
    return content.hexdigest(), total


def _read(path: Path) -> dict[str, list[Any]]:  # Any: JSON numbers and a text
    """Return the record; an empty one where there is none, or it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: record for key, record in content.items() if isinstance(record, list) and len(record) == 4}
