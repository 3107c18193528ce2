"""Uploads the logs of a run while it trains: each pass sends only what is new."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bloomery.errors import StorageError, storage_error
from bloomery.events.incarnation import identity, is_same_run
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.sync.pieces import new_pieces, piece_key, pieces_by_file
from bloomery.operate.sync.places import SyncPlace

GROWING = ("journal", "logs", "tensorboard", "operations.jsonl", "evaluations.jsonl", "rounds.jsonl")
"""Files, and directories of files, that are only appended to."""
WHOLE = ("incarnations", "recipe.toml", "sources.toml", "stacks", "chronicle.md", "submission.json")
"""Files, and directories of files, that are written anew as a whole. The first one tells the run."""
_RECORD = re.compile(rf"{WHOLE[0]}/\d{{6,}}\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SentFiles:
    """What one call of `send_new` sent: the number of files or pieces of them, and their bytes."""

    count: int
    bytes: int


class RunSync:
    """Sends the logs of one run to one place; the place's listing shows what it has already."""

    def __init__(self, rundir: RunDirectory, place: SyncPlace) -> None:
        self._rundir, self._place = rundir, place
        self._sent: dict[str, tuple[int, int]] = {}
        self._is_ours = False

    def send_new(self) -> SentFiles:
        """Send what is new and return what was sent. Raises StorageError: the next call goes on from there.

        A growing file costs its new bytes and at most PIECE_BYTES more, since its newest piece is sent again.
        Nothing is sent to a place with the logs of another run, nor to one with any before this run began.
        """
        entries = self._place.entries()
        if not self._is_ours:
            records = [key for key, entry in entries.items() if _RECORD.fullmatch(key) and entry.bytes]
            has_begun = bool(identity(self._rundir))
            if records and not has_begun:
                return SentFiles(count=0, bytes=0)
            if records:
                self._refuse_another_run(min(records))
            self._is_ours = has_begun
        held = {key: entry.bytes for key, entry in entries.items()}
        count = sent = 0
        batch: dict[str, bytes] = {}
        stale: list[str] = []
        seen: dict[str, tuple[int, int]] = {}
        for key, content in self._new(held, stale, seen):
            if sum(map(len, batch.values())) + len(content) > self._place.most_bytes and batch:
                self._place.publish(batch)
                batch = {}
            batch[key] = content
            count, sent = count + 1, sent + len(content)
        if batch:
            self._place.publish(batch)
        self._place.remove(stale)
        self._sent |= seen  # only now: what could not be sent is tried again
        return SentFiles(count=count, bytes=sent)

    def _refuse_another_run(self, first: str) -> None:
        """Raise StorageError where the place holds files of another run, which would be overwritten.

        first: the place's record of a first incarnation.
        """
        if not is_same_run(self._rundir, {first: self._place.content(first)}):
            raise StorageError(
                f"{self._place.name} holds the logs of another run than {self._rundir.path}.",
                remedy="Give each run a place of its own, or remove what is there.",
            )

    def _new(
        self, held: Mapping[str, int], stale: list[str], seen: dict[str, tuple[int, int]]
    ) -> Iterator[tuple[str, bytes]]:
        """Yield what is to be sent, first what tells whose files they are.

        stale: gets the pieces of files that have become shorter. seen: gets size and time of whole files.
        """
        for path in self._files(WHOLE):
            yield from self._whole(path, held, seen)
        pieces = pieces_by_file(held)
        for path in self._files(GROWING):
            key = path.relative_to(self._rundir.path).as_posix()
            sent = pieces.get(key, [])
            try:
                if path.stat().st_size < sum(sent):
                    stale += [piece_key(key, number) for number in range(1, len(sent))]
                for piece in new_pieces(path, sent):
                    name = piece_key(key, piece.number)
                    if name in stale:
                        stale.remove(name)
                    yield name, piece.content
            except FileNotFoundError:
                continue  # a person has removed it meanwhile
            except OSError as error:
                raise storage_error(error, path=path, doing="Reading what is to be sent") from error

    def _whole(
        self, path: Path, held: Mapping[str, int], seen: dict[str, tuple[int, int]]
    ) -> Iterator[tuple[str, bytes]]:
        """Yield a file that has changed since it was sent; the first call compares it with what is there."""
        key = path.relative_to(self._rundir.path).as_posix()
        try:
            facts = path.stat()
            content = b"" if self._sent.get(key) == (facts.st_size, facts.st_mtime_ns) else path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, path=path, doing="Reading what is to be sent") from error
        if content and (held.get(key) != len(content) or self._place.content(key) != content):
            yield key, content
        seen[key] = (facts.st_size, facts.st_mtime_ns)

    def _files(self, names: tuple[str, ...]) -> Iterator[Path]:
        """Yield the regular files; what has a name with a leading dot is being written."""
        for name in names:
            place = self._rundir.path / name
            for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
                if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                    yield path
