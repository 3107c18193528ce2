"""Downloads what `bloomery sync` uploaded, each time only what is new, into a directory like a run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bloomery import durable
from bloomery.errors import StorageError, storage_error
from bloomery.objects import ObjectStat
from bloomery.operate.sync.pieces import file_of, piece_key, pieces_by_file
from bloomery.operate.sync.places import SyncPlace
from bloomery.operate.sync.run_sync import GROWING, WHOLE

_RECORD = ".followed.json"
_LONGEST_PIECE = 256 << 20


class RunMirror:
    """A directory that grows as a run elsewhere does. It holds journals and logs, no checkpoints.

    What the place names is not trusted: only files that a sync sends are fetched, and only below `directory`.
    """

    def __init__(self, place: SyncPlace, directory: Path) -> None:
        self._place, self._directory = place, directory
        self._marks = self._read_record()

    def fetch(self) -> int:
        """Fetch what is new and return its bytes. Raises StorageError."""
        entries = {key: stat for key, stat in self._place.entries().items() if _is_expected(key)}
        if not entries:
            raise StorageError(
                f"{self._place.name} holds no logs of a run.",
                remedy="`bloomery sync RUN PLACE` sends them there; is the name right?",
            )
        too_long = [key for key, stat in entries.items() if stat.bytes > _LONGEST_PIECE]
        if too_long:
            raise StorageError(
                f"{self._place.name}: {too_long[0]} is longer than what `bloomery sync` sends at once.",
                remedy="Has it been put there by something else? Remove it.",
            )
        fetched, before = 0, dict(self._marks)
        try:
            for file, sizes in pieces_by_file({key: stat.bytes for key, stat in entries.items()}).items():
                if file.split("/")[0] in GROWING:
                    fetched += self._fetch_growing(file, sizes, entries)
                else:
                    fetched += self._fetch_whole(file, entries[file])
            if self._marks != before:  # it names each piece of each file: megabytes after months
                durable.write_whole_unsynced(self._directory / _RECORD, json.dumps(self._marks))
        except OSError as error:
            raise storage_error(error, path=self._directory, doing="Writing what was fetched") from error
        return fetched

    def _fetch_growing(self, file: str, sizes: list[int], entries: Mapping[str, ObjectStat]) -> int:
        """Append the bytes that are missing; a file that was written anew there is fetched anew."""
        path = self._directory / file
        keys = [piece_key(file, number) for number in range(len(sizes))]
        here = path.stat().st_size if path.exists() else 0
        is_anew = any(
            self._marks.get(key, entries[key].mark) != entries[key].mark
            for key, begin, size in zip(keys, _begins(sizes), sizes, strict=True)
            if begin + size <= here
        )
        if here > sum(sizes) or is_anew:
            path.unlink()
            here = 0
        fetched = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as target:
            for key, begin, size in zip(keys, _begins(sizes), sizes, strict=True):
                if begin + size > here:
                    content = self._place.content(key, begin=here - begin)[: begin + size - here]
                    target.write(content)
                    here, fetched = here + len(content), fetched + len(content)
                self._marks[key] = entries[key].mark
                if here < begin + size:
                    break  # the piece was written anew while it was read: the next fetch goes on
        return fetched

    def _fetch_whole(self, file: str, stat: ObjectStat) -> int:
        path = self._directory / file
        if path.exists() and self._marks.get(file) == stat.mark and stat.mark:
            return 0
        content = self._place.content(file)
        durable.write_whole(path, content)
        self._marks[file] = stat.mark
        return len(content)

    def _read_record(self) -> dict[str, str]:
        try:
            record = json.loads((self._directory / _RECORD).read_bytes())
        except (OSError, ValueError):
            return {}
        is_record = isinstance(record, dict) and all(isinstance(mark, str) for mark in record.values())
        return record if is_record else {}


def _begins(sizes: list[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _is_expected(key: str) -> bool:
    """Return whether a sync sends a file of this name, and none of its parts leads elsewhere."""
    parts = key.split("/")
    is_plain = all(part and not part.startswith(".") and part.isprintable() for part in parts)
    return is_plain and file_of(parts[0]) in (*GROWING, *WHOLE)
