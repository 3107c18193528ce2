"""A checkpoint that is being fetched: files of the right size, of which some blocks are here and verified.

What an earlier try has brought is found by its hashes; nothing else is remembered, so nothing can be wrong.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from bloomery.checkpoint.manifest import BLOCK_BYTES, DIGITS, INDEX, MANIFEST, Index, Manifest
from bloomery.elastic.serving.blocks import Missing, Run, runs_of
from bloomery.events.storage import sync_directory


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
                os.fsync(descriptor)
        wanted = set(self._descriptors)
        self.close()
        for path in self._directory.iterdir():
            if path.name not in wanted:
                path.unlink()
        for name, content in ((INDEX, index), (MANIFEST, manifest)):
            with (self._directory / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sync_directory(self._directory)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            shutil.rmtree(final)
        self._directory.rename(final)
        sync_directory(final.parent)

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
