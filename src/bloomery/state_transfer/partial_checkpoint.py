"""A checkpoint that is being fetched: which of its blocks are present and verified, and who fetches which.

What an earlier try has brought is found by its hashes; nothing else is remembered, so nothing can be wrong.

`Missing` hands out the blocks that are still missing, in runs, to the threads that fetch them.

When nothing is left to hand out, what others are still at is handed out again: the quicker one counts, so a
source that has become slow holds nobody up.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from bloomery import durable
from bloomery.checkpoint.format.manifest import BLOCK_BYTES, DIGITS, INDEX, MANIFEST, Index, Manifest

RUN_BLOCKS = 4
TWICE = 2
"""How many may fetch the same run when nothing else is left."""


@dataclass(frozen=True, kw_only=True, order=True)
class Run:
    """Neighbouring blocks of one file: bytes [begin, end)."""

    file: str
    begin: int
    end: int


class Missing:
    """The runs that are not here yet. Thread-safe."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._waiting = sorted(runs, reverse=True)
        self._at: dict[Run, int] = {}
        self._changed = threading.Condition()

    def take(self, files: Collection[str], first: Collection[str] = (), *, timeout_s: float) -> Run | None:
        """A run of one of these files, of those in `first` before all others.

        None after `timeout_s` without one, or when nothing is missing.
        """
        with self._changed:
            found = self._next(files, first)
            if found is None and self._some():
                self._changed.wait(timeout_s)
                found = self._next(files, first)
            if found is not None:
                self._at[found] = self._at.get(found, 0) + 1
            return found

    def done(self, run: Run) -> bool:
        """The run is here. Whether it was missing until now."""
        with self._changed:
            was_missing = self._at.pop(run, None) is not None
            self._changed.notify_all()
            return was_missing

    def give_back(self, run: Run) -> None:
        """It could not be fetched: somebody else may."""
        with self._changed:
            if run in self._at:
                self._at[run] -= 1
                if not self._at[run]:
                    del self._at[run]
                    self._waiting.append(run)
            self._changed.notify_all()

    def files(self) -> set[str]:
        """The files of which something is missing."""
        with self._changed:
            return {run.file for run in (*self._waiting, *self._at)}

    @property
    def is_over(self) -> bool:
        """Whether nothing is missing."""
        with self._changed:
            return not self._some()

    def wait(self, timeout_s: float) -> None:
        """Wait until something has happened."""
        with self._changed:
            if self._some():
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Something has happened elsewhere."""
        with self._changed:
            self._changed.notify_all()

    def _some(self) -> bool:
        return bool(self._waiting or self._at)

    def _next(self, files: Collection[str], first: Collection[str]) -> Run | None:
        for wanted in (first, files):
            for place in range(len(self._waiting) - 1, -1, -1):
                if self._waiting[place].file in wanted:
                    return self._waiting.pop(place)
        shared = [run for run, count in self._at.items() if count < TWICE and run.file in files]
        return min(shared, key=lambda run: (self._at[run], run), default=None)


def runs_of(file: str, blocks: Iterable[int], size: int) -> list[Run]:
    """Join neighbouring blocks into runs of up to RUN_BLOCKS."""
    found: list[list[int]] = []
    for block in blocks:
        if found and block == found[-1][-1] + 1 and len(found[-1]) < RUN_BLOCKS:
            found[-1].append(block)
        else:
            found.append([block])
    return [
        Run(file=file, begin=part[0] * BLOCK_BYTES, end=min(size, (part[-1] + 1) * BLOCK_BYTES))
        for part in found
    ]


class Partial:
    """The files of one checkpoint on their way. missing: the runs that are not here. Thread-safe."""

    def __init__(self, directory: Path, manifest: Manifest, index: Index) -> None:
        self._directory, self._index = directory, index
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}
        directory.mkdir(parents=True, exist_ok=True)
        runs: list[Run] = []
        try:
            for record in manifest.files:
                path = directory / record.name
                begun = path.exists()
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptors[record.name] = os.open(path, flags, 0o666)
                os.ftruncate(self._descriptors[record.name], record.bytes)
                blocks = self._wrong(record.name, record.bytes) if begun else range(_blocks(record.bytes))
                runs += runs_of(record.name, blocks, record.bytes)
        except BaseException:
            self.close()
            raise
        self.missing = Missing(runs)
        self.bytes = manifest.bytes - sum(run.end - run.begin for run in runs)

    def is_right(self, run: Run, data: memoryview) -> bool:
        """Whether these are the bytes of the run."""
        hashes = self._index.files[run.file].blocks
        for begin in range(run.begin, run.end, BLOCK_BYTES):
            block = data[begin - run.begin : min(begin + BLOCK_BYTES, run.end) - run.begin]
            number = begin // BLOCK_BYTES
            if xxhash.xxh3_64_hexdigest(block) != hashes[number * DIGITS : (number + 1) * DIGITS]:
                return False
        return True

    def write(self, run: Run, data: memoryview) -> None:
        """Take in a run that is right; one that comes when all is finished is dropped. Raises OSError."""
        with self._lock:
            if run.file not in self._descriptors:
                return
            position = run.begin
            while data:
                count = os.pwrite(self._descriptors[run.file], data, position)
                data, position = data[count:], position + count
        if self.missing.done(run):
            self.bytes += run.end - run.begin

    def finish(self, final: Path, *, index: bytes, manifest: bytes) -> None:
        """Turn it into a checkpoint at `final`: durable first, its manifest last. Raises OSError."""
        with self._lock:
            for descriptor in self._descriptors.values():
                durable.sync_file(descriptor)
        wanted = set(self._descriptors)
        self.close()
        for path in self._directory.iterdir():
            if path.name not in wanted:
                path.unlink()
        for name, content in ((INDEX, index), (MANIFEST, manifest)):
            durable.write_new(self._directory / name, content)
        durable.sync_directory(self._directory)
        durable.make_directory(final.parent)
        if final.exists():
            shutil.rmtree(final)
        durable.replace(self._directory, final)

    def close(self) -> None:
        """Let the files go; what is here stays for another try."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def _wrong(self, name: str, size: int) -> Iterator[int]:
        buffer = bytearray(BLOCK_BYTES)
        for number in range(_blocks(size)):
            begin = number * BLOCK_BYTES
            view = memoryview(buffer)[: min(BLOCK_BYTES, size - begin)]
            count = os.preadv(self._descriptors[name], [view], begin)
            run = Run(file=name, begin=begin, end=begin + len(view))
            if count < len(view) or not self.is_right(run, view):
                yield number


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)
