"""A checkpoint that is read from the memories of the ranks' nodes, without a disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import xxhash

from bloomery.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    Manifest,
    checkpoint_name,
    index_text,
    manifest_text,
)
from bloomery.checkpoint.ramcopy import Holding, Holdings, newest_complete
from bloomery.checkpoint.ranks import Ranks
from bloomery.checkpoint.source import LOCAL_WINDOW_BYTES
from bloomery.events.incarnation import Base


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A whole checkpoint in memory. readers: of each file, the ranks that have it on their node."""

    base: Base
    source: MemorySource
    readers: Mapping[str, Sequence[int]]


def find_in_memory(
    holdings: Holdings, ranks: Ranks, visible: Callable[[Iterable[Base]], Collection[Base]]
) -> InMemory | None:
    """Return the newest checkpoint that all parts are in memory of, at one node or another. Collective.

    visible: picks those that are part of the run; asked on the first rank.
    """
    here = holdings.listed()
    everyones = [
        [Holding.from_json(one) for one in told] for told in ranks.gather([h.to_json() for h in here])
    ]
    bases = {holding.base for listed in everyones for holding in listed}
    allowed = {(step, incarnation) for step, incarnation in ranks.first(lambda: sorted(visible(bases)))}
    chosen = newest_complete(everyones, allowed)
    if not chosen:
        return None
    base, readers = chosen[0].base, dict[str, list[int]]()
    for part in chosen:
        seen_by = [
            rank
            for rank, listed in enumerate(everyones)
            if any(one.base == base and one.rank == part.rank for one in listed)
        ]
        readers |= {file.name: seen_by for file in part.part.files}
    mine = [one for one in here if one.base == base]
    return InMemory(base=base, source=MemorySource(chosen, mine), readers=readers)


class MemorySource:
    """Implements `source.Source`: index and manifest from what all ranks hold, bytes from what lies here."""

    def __init__(self, parts: Sequence[Holding], here: Sequence[Holding]) -> None:
        first = parts[0]
        self.name = checkpoint_name(first.step, first.incarnation)
        files = [file for part in parts for file in part.part.files]
        index = index_text((box for part in parts for box in part.part.boxes), files).encode()
        manifest = Manifest(
            step=first.step,
            incarnation=first.incarnation,
            time=first.time,
            world=first.world,
            about=first.about,
            values=first.values,
            files=tuple(replace(file, blocks="") for file in files),
            index_bytes=len(index),
            index_xxh3_128=xxhash.xxh3_128_hexdigest(index),
        )
        self._contents = {INDEX: index, MANIFEST: manifest_text(manifest).encode()}
        self._sizes = {file.name: file.bytes for file in files}
        self._places = {
            file.name: (one.path, one.offsets[file.name], file.bytes)
            for one in here
            for file in one.part.files
        }

    def place(self, file: str = "") -> str:
        """Return where a file, or the checkpoint itself, is."""
        if file in self._places:
            return f"{self._places[file][0]} ({file})"
        return f"{self.name} in memory" + (f" ({file})" if file else "")

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of the index or the manifest."""
        if file not in self._contents:
            raise FileNotFoundError(file)
        return self._contents[file][:at_most]

    def size(self, file: str) -> int:
        """Return a file's bytes."""
        return len(self._contents[file]) if file in self._contents else self._sizes[file]

    def open(self, file: str) -> _Stretch:
        """Open a file that lies on this node."""
        if file not in self._places:
            raise FileNotFoundError(file)
        path, offset, bytes = self._places[file]
        return _Stretch(path, offset=offset, bytes=bytes)


class _Stretch:
    """Implements `source.Ranges` for a part of a file."""

    window_bytes = LOCAL_WINDOW_BYTES

    def __init__(self, path: Path, *, offset: int, bytes: int) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset, self._bytes = offset, bytes

    def read_into(self, views: Sequence[memoryview], *, begin: int) -> int:
        position = begin
        for view in views:
            wanted = min(len(view), self._bytes - position)
            filled = 0
            while filled < wanted:
                count = os.preadv(self._file, [view[filled:wanted]], self._offset + position + filled)
                if count == 0:
                    return position + filled - begin
                filled += count
            position += filled
        return position - begin

    def __enter__(self) -> _Stretch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
