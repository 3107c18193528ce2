"""A partly downloaded checkpoint: its verified blocks, the missing ones, and which source has which files.

The missing blocks are handed to the threads that fetch.

Blocks that an earlier try fetched are recognised by their hashes. No other record of them is kept, so none
can be wrong.

`MissingBlocks` hands out the blocks that are still missing, in runs of neighbours, to the threads that fetch.

The fewer blocks are left, the shorter are the runs, so that all sources have something to send until the end.
When every missing run is being fetched, `MissingBlocks` hands out runs a second time; the first result
counts, and the other fetch of the run is given up. So a source that has become slow does not delay the whole
checkpoint.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from bloomery import durable
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DIGITS,
    INDEX,
    MANIFEST,
    FileRecord,
    Index,
    Manifest,
)
from bloomery.state_transfer.source import PeerSource, ServedState

RUN_BLOCKS = 4
TWICE = 2
"""The most threads that fetch the same run when no other run is left."""


@dataclass(frozen=True, kw_only=True, order=True)
class BlockRun:
    """Neighbouring blocks of one file: bytes [begin, end)."""

    file: str
    begin: int
    end: int


class MissingBlocks:
    """The runs that have not been fetched yet. Thread-safe.

    A run is either in `_waiting`, or in `_at` with the number of threads that are fetching it. A large
    checkpoint has half a million runs. So they are kept by file, the next one last, and a file without any
    is left out: who looks for a run looks at the files alone. `_waiting_bytes` is the sum over `_waiting`.

    unit: bytes; a run that is handed out is a multiple of it, unless its file ends.
    streams: how many threads will fetch runs, so that the first to come leaves as much to each of the others.
    """

    def __init__(self, runs: Iterable[BlockRun], *, unit: int = BLOCK_BYTES, streams: int = 1) -> None:
        self._waiting: dict[str, list[BlockRun]] = {}
        self._waiting_bytes = 0
        for run in sorted(runs, key=lambda run: (run.file, -run.begin)):
            self._put(run)
        self._unit, self._streams = unit, streams
        self._at: dict[BlockRun, int] = {}
        self._changed = threading.Condition()

    def take(
        self, files: Collection[str], first: Collection[str] = (), *, timeout_s: float
    ) -> BlockRun | None:
        """Return a missing run of one of these files, which the caller is to fetch.

        first: the files whose runs are handed out before those of others.
        Returns None when nothing is missing, or no run could be handed out within `timeout_s`.
        """
        with self._changed:
            run = self._next(files, first)
            if run is None and self._some():
                self._changed.wait(timeout_s)
                run = self._next(files, first)
            if run is not None:
                self._at[run] = self._at.get(run, 0) + 1
            return run

    def done(self, run: BlockRun) -> bool:
        """Record that the run has been fetched. Returns whether it was missing until now."""
        with self._changed:
            was_missing = self._at.pop(run, None) is not None
            self._changed.notify_all()
            return was_missing

    def give_back(self, run: BlockRun) -> None:
        """Record that a caller of `take` could not fetch the run, so that another may."""
        with self._changed:
            if run in self._at:
                self._at[run] -= 1
                if not self._at[run]:
                    del self._at[run]
                    self._put(run)
            self._changed.notify_all()

    def is_missing(self, run: BlockRun) -> bool:
        """Whether nobody has fetched this run, which was handed out, to its end yet."""
        with self._changed:
            return run in self._at

    def files(self) -> set[str]:
        """Return the names of the files of which a run is missing."""
        with self._changed:
            return {*self._waiting, *(run.file for run in self._at)}

    @property
    def is_over(self) -> bool:
        """Whether nothing is missing."""
        with self._changed:
            return not self._some()

    def runs_of(self, file: str) -> list[BlockRun]:
        """Return the missing runs of a file, also those that are being fetched."""
        with self._changed:
            return [*self._waiting.get(file, ()), *(run for run in self._at if run.file == file)]

    def wait(self, timeout_s: float) -> None:
        """Wait until the missing runs change, `wake` is called or `timeout_s` is over."""
        with self._changed:
            if self._some():
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Wake all who wait, because something that they check has changed elsewhere."""
        with self._changed:
            self._changed.notify_all()

    def _some(self) -> bool:
        return bool(self._waiting or self._at)

    def _next(self, files: Collection[str], first: Collection[str]) -> BlockRun | None:
        for wanted in (first, files):
            file = next((file for file in self._waiting if file in wanted), None) if wanted else None
            if file is not None:
                return self._cut(file)
        shared = [run for run, count in self._at.items() if count < TWICE and run.file in files]
        return min(shared, key=lambda run: (self._at[run], run), default=None)

    def _put(self, run: BlockRun) -> None:
        self._waiting.setdefault(run.file, []).append(run)
        self._waiting_bytes += run.end - run.begin

    def _cut(self, file: str) -> BlockRun:
        """Take a file's next run out, or only its first bytes where little is left; return what was taken.

        Of n threads that fetch or will fetch, none takes more than the 2n-th part of all waiting bytes, or
        one unit.
        """
        runs = self._waiting[file]
        run = runs.pop()
        share = self._waiting_bytes // (2 * max(len(self._at) + 1, self._streams))
        end = min(run.end, run.begin + max(1, share // self._unit) * self._unit)
        if end < run.end:
            runs.append(replace(run, begin=end))
        if not runs:
            del self._waiting[file]
        self._waiting_bytes -= end - run.begin
        return replace(run, end=end)


def runs_of(file: str, blocks: Iterable[int], size: int) -> list[BlockRun]:
    """Join neighbouring blocks of a file into runs of at most RUN_BLOCKS.

    blocks: block numbers in ascending order.
    size: the bytes of the file, whose last block may be shorter than the others.
    """
    groups: list[list[int]] = []
    for block in blocks:
        if groups and block == groups[-1][-1] + 1 and len(groups[-1]) < RUN_BLOCKS:
            groups[-1].append(block)
        else:
            groups.append([block])
    return [
        BlockRun(file=file, begin=group[0] * BLOCK_BYTES, end=min(size, (group[-1] + 1) * BLOCK_BYTES))
        for group in groups
    ]


class PartialCheckpoint:
    """The files of a checkpoint that is being fetched. Thread-safe.

    missing: the runs that have not been fetched yet.
    bytes: the bytes fetched so far.

    before: what was fetched last into this directory, which is closed now. The blocks of files that both have
        alike are known, and not hashed again: that would take a quarter of an hour for 2 TB.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, index: Index, *, before: PartialCheckpoint | None = None
    ) -> None:
        self._directory, self._index = directory, index
        self._records = {record.name: record for record in manifest.files}
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}
        directory.mkdir(parents=True, exist_ok=True)
        runs: list[BlockRun] = []
        try:
            for record in manifest.files:
                path = directory / record.name
                begun = path.exists()
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptors[record.name] = os.open(path, flags, 0o666)
                os.ftruncate(self._descriptors[record.name], record.bytes)
                if before is not None and before.has(record, index):
                    runs += before.missing.runs_of(record.name)
                    continue
                blocks = self._wrong(record.name, record.bytes) if begun else range(_blocks(record.bytes))
                runs += runs_of(record.name, blocks, record.bytes)
        except BaseException:
            self.close()
            raise
        self.missing: MissingBlocks = MissingBlocks(runs)
        self.bytes = manifest.bytes - sum(run.end - run.begin for run in runs)

    def has(self, record: FileRecord, index: Index) -> bool:
        """Return whether this file is one of these, with the same hash of each block."""
        name = record.name
        return self._records.get(name) == record and self._index.files[name] == index.files[name]

    def is_right(self, run: BlockRun, data: memoryview) -> bool:
        """Return whether the data has the hashes that the index lists for the run."""
        hashes = self._index.files[run.file].blocks
        for begin in range(run.begin, run.end, BLOCK_BYTES):
            block = data[begin - run.begin : min(begin + BLOCK_BYTES, run.end) - run.begin]
            number = begin // BLOCK_BYTES
            if xxhash.xxh3_64_hexdigest(block) != hashes[number * DIGITS : (number + 1) * DIGITS]:
                return False
        return True

    def write(self, run: BlockRun, data: memoryview) -> None:
        """Write a run whose data `is_right`; does nothing after `finish` or `close`. Raises OSError."""
        with self._lock:
            if run.file not in self._descriptors:
                return
            write_at(self._descriptors[run.file], data, run.begin)
        if self.missing.done(run):
            self.bytes += run.end - run.begin

    def finish(self, final: Path, *, index: bytes, manifest: bytes) -> None:
        """Turn the fetched files into a checkpoint at `final`. Raises OSError.

        The data is synced to disk first and the manifest is written last: whoever sees a manifest sees a
        whole checkpoint.
        """
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
        """Close the files; they stay on disk for another try."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def _wrong(self, name: str, size: int) -> Iterator[int]:
        buffer = bytearray(BLOCK_BYTES)
        for number in range(_blocks(size)):
            begin = number * BLOCK_BYTES
            view = memoryview(buffer)[: min(BLOCK_BYTES, size - begin)]
            count = os.preadv(self._descriptors[name], [view], begin)
            run = BlockRun(file=name, begin=begin, end=begin + len(view))
            if count < len(view) or not self.is_right(run, view):
                yield number


def write_at(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of the data to its place in a file. Raises OSError."""
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


@dataclass(kw_only=True)
class FetchSource:
    """A peer that has sent its manifest.

    text: the manifest as it was sent.
    records: the files in the manifest.
    failures: how often it has failed since its last block.
    is_out: whether it has been given up.
    """

    state: ServedState
    manifest: Manifest
    text: bytes
    records: frozenset[FileRecord]
    failures: int = 0
    is_out: bool = False


@dataclass(frozen=True, kw_only=True)
class FetchPlan:
    """What is fetched: the leader's checkpoint. Any thread may ask it.

    A state has thousands of files, and is fetched in half a million runs of blocks. So what a source has is
    computed once, and what it alone has once for each set of other sources.

    partial: the files fetched so far.
    index: the leader's index as it was sent.
    """

    leader: FetchSource
    partial: PartialCheckpoint
    index: bytes
    _files: dict[PeerSource, frozenset[str]] = field(default_factory=dict)
    _own: dict[PeerSource, tuple[tuple[PeerSource, ...], frozenset[str]]] = field(default_factory=dict)
    """By source, the other sources for which it was computed, and the files that none of them has."""

    def files_of(self, source: FetchSource) -> frozenset[str]:
        """Return the names of the files that a source has identically to the leader."""
        origin = source.state.origin
        files = self._files.get(origin)
        if files is None:
            files = frozenset(record.name for record in self.leader.records & source.records)
            self._files[origin] = files
        return files

    def files_only_of(self, source: FetchSource, others: Sequence[FetchSource]) -> frozenset[str]:
        """Return the names of those files of a source that none of the others has."""
        origin, beside = source.state.origin, tuple(other.state.origin for other in others)
        computed_for, own = self._own.get(origin, (None, frozenset[str]()))
        if computed_for != beside:
            own = self.files_of(source).difference(*map(self.files_of, others))
            self._own[origin] = beside, own
        return own
