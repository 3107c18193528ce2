"""Bringing a backed-up checkpoint back: file by file, hashed on the way, committed by a rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from bloomery.checkpoint.commit import check_coverage
from bloomery.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    PARTIAL,
    DamagedCheckpoint,
    FileRecord,
    read_index,
    read_manifest,
)
from bloomery.checkpoint.source import Source
from bloomery.checkpoint.upload import Progress
from bloomery.events.storage import free_bytes, no_space, storage_error, sync_directory
from bloomery.objects import Unreached, storage_failure

_WINDOW_BYTES = 16 << 20


def download_checkpoint(
    source: Source,
    directory: Path,
    *,
    before_commit: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> Path:
    """Copy a checkpoint below `directory` and return where it is. What an earlier try brought whole is kept.

    before_commit: called when all has been brought and verified, before anybody can see a checkpoint.
    Raises DamagedCheckpoint where what arrives is not what was saved, and StorageError.
    """
    final = directory / source.name
    if (final / MANIFEST).exists():
        before_commit()
        return final
    manifest = read_manifest(source)
    check_coverage(read_index(source, manifest).boxes)
    partial = final.with_name(final.name + PARTIAL)
    try:
        if free_bytes(directory) < manifest.bytes:
            raise no_space(directory, doing="Copying a checkpoint", bytes_needed=manifest.bytes)
        partial.mkdir(parents=True, exist_ok=True)
        done = 0
        for record in manifest.files:
            if not _is_here(partial / record.name, record):
                _fetch(source, record, partial / record.name)
            done += record.bytes
            if progress is not None:
                progress(done, manifest.bytes)
        index = source.content(INDEX, at_most=manifest.index_bytes)
        for name, content in ((INDEX, index), (MANIFEST, source.content(MANIFEST, at_most=256 << 20))):
            (partial / name).unlink(missing_ok=True)
            with (partial / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sync_directory(partial)
        before_commit()
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_directory(directory)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{error.strerror or error}") from error
    except Unreached as error:
        raise storage_failure(error, doing=f"Fetching {source.name}") from error
    except OSError as error:
        raise storage_error(error, path=final, doing="Copying a checkpoint") from error
    return final


def _is_here(path: Path, record: FileRecord) -> bool:
    if not path.exists() or path.stat().st_size != record.bytes:
        return False
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_WINDOW_BYTES):
            hasher.update(data)
    return hasher.hexdigest() == record.xxh3_128


def _fetch(source: Source, record: FileRecord, path: Path) -> None:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_WINDOW_BYTES, record.bytes)))
    with source.open(record.name) as opened, path.open("wb") as file:
        for begin in range(0, record.bytes, _WINDOW_BYTES):
            data = buffer[: min(_WINDOW_BYTES, record.bytes - begin)]
            if opened.read_into([data], begin=begin) < len(data):
                raise DamagedCheckpoint(f"{source.place(record.name)} ends too early")
            hasher.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if hasher.hexdigest() != record.xxh3_128:
        path.unlink()
        raise DamagedCheckpoint(f"{source.place(record.name)} does not have the hash it was saved with")
