"""Times writing and reading a checkpoint's bytes from all nodes at once, and forecasts saves and loads."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bloomery import durable
from bloomery.errors import storage_error

_BLOCK = 4 << 20


@dataclass(frozen=True, kw_only=True)
class StorageTimes:
    """What one node wrote and read.

    bytes_written: by all its writers. save_s: until all of it was synced. load_s: until it was read again.
    is_equal: whether what was read is what was written.
    """

    bytes_written: int
    save_s: float
    load_s: float
    is_equal: bool


@dataclass(frozen=True, kw_only=True)
class StorageForecast:
    """What a save and a load of the whole run will take.

    measured_nodes, nodes: those that measured, and those of the run.
    save_s, load_s: (if each node's own path is the limit, if what all share is the limit), in seconds.
    With all nodes measuring equal bytes, both are the measured time.
    """

    measured_nodes: int
    nodes: int
    save_s: tuple[float, float]
    load_s: tuple[float, float]


def measure_storage(directory: Path, *, total: int, writers: int) -> StorageTimes:
    """Return how long it takes to write and sync `total` bytes in parallel, and to read them from the disk.

    The pages are dropped from memory before they are read. Raises StorageError. The files are removed. Of a
    process that is killed they stay; it has locked them (`durable.remove_abandoned`).

    total: bytes of all files together. writers: the number of files, each written and read by a thread.
    """
    share = -(-total // writers)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = durable.hold_directory(directory)
        paths = [directory / f"writer-{index}" for index in range(writers)]
        try:
            with ThreadPoolExecutor(writers) as pool:
                begun = time.monotonic()
                written = list(pool.map(lambda path: _write(path, share), paths))
                saved = time.monotonic()
                read = list(pool.map(_read, paths))
                loaded = time.monotonic()
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
            directory.rmdir()
            if lock is not None:
                os.close(lock)
    except OSError as refused:
        raise storage_error(refused, path=directory, doing="Measuring the storage") from refused
    return StorageTimes(
        bytes_written=share * writers, save_s=saved - begun, load_s=loaded - saved, is_equal=written == read
    )


def forecast(times: Sequence[StorageTimes], *, total: int, nodes: int) -> StorageForecast:
    """Return what `total` bytes of a checkpoint take from `nodes` nodes, from what some of them measured.

    Two limits are possible, and few nodes cannot tell them apart: each node's own path, of which more nodes
    have more, and the storage that all share, of which they have not.
    """
    share = total / nodes
    own = [
        max((measured.save_s, measured.load_s)[index] * share / measured.bytes_written for measured in times)
        for index in (0, 1)
    ]
    bytes_moved = sum(measured.bytes_written for measured in times)
    slowest = [max((measured.save_s, measured.load_s)[index] for measured in times) for index in (0, 1)]
    shared = [seconds * total / bytes_moved for seconds in slowest]
    if len(times) >= nodes:
        shared = own
    return StorageForecast(
        measured_nodes=len(times), nodes=nodes, save_s=(own[0], shared[0]), load_s=(own[1], shared[1])
    )


def _write(path: Path, size: int) -> str:
    """Write `size` bytes that no file system can compress to a file, and sync it. Return their hash."""
    block, digest = os.urandom(_BLOCK), hashlib.blake2b()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        left, number = size, 0
        while left > 0:
            part = number.to_bytes(8, "little") + block[8 : min(left, _BLOCK)]
            part = part[:left]
            digest.update(part)
            view = memoryview(part)
            while view:
                view = view[os.write(file, view) :]
            left, number = left - len(part), number + 1
        durable.sync_file(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return digest.hexdigest()


def _read(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
