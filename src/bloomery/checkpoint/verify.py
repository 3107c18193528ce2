"""Verifying that every byte of a checkpoint is the one that was saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from bloomery.checkpoint.datafile import shortened
from bloomery.checkpoint.manifest import (
    BLOCK_BYTES,
    DIGITS,
    INDEX,
    MANIFEST,
    FileRecord,
    Index,
    Manifest,
    read_index,
    read_manifest,
)
from bloomery.checkpoint.source import Source, source_of
from bloomery.errors import CheckpointError
from bloomery.objects import Unreached, storage_failure

_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong in a checkpoint. offset: of the damaged block; None for the whole file."""

    file: str
    offset: int | None
    text: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = "" if self.offset is None else f" at byte {self.offset:,}"
        holds = f" (it holds {shortened(self.tensors)})" if self.tensors else ""
        return f"{self.file}{place}: {self.text}{holds}"


def verify(
    where: Path | Source, *, contents: bool = True, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Return all that is wrong with a checkpoint; nothing when it is whole.

    contents: read and hash every file; otherwise only the manifest is hashed, and sizes are compared.
    progress: called with the bytes of each read. Raises StorageError where a remote one is not reached.
    """
    source = source_of(where)
    try:
        manifest = read_manifest(source)
    except CheckpointError as error:
        return [Problem(file=MANIFEST, offset=None, text=error.message)]
    problems = [problem for record in manifest.files for problem in _wrong_size(source, record)]
    if not contents:
        return problems + _wrong_index_size(source, manifest)
    unreadable = {problem.file for problem in problems}
    try:
        index = read_index(source, manifest)
    except CheckpointError as error:
        index = Index(boxes=(), files={})
        problems.append(Problem(file=INDEX, offset=None, text=error.message))
    for record in manifest.files:
        if record.name not in unreadable:
            problems += _wrong_contents(source, record, index, progress or (lambda count: None))
    return problems


def excess(where: Path) -> float:
    """Return the bytes a checkpoint takes on the disk over those its tensors have, index and manifest aside.

    1.0 is a checkpoint that holds its tensors and nothing else. Raises CheckpointError, OSError.
    """
    manifest = read_manifest(where)
    index = read_index(where, manifest)
    needed = sum(box.end - box.begin for box in index.boxes)
    headers = sum(8 + 4096 for _ in index.files)
    taken = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
    return max(0, taken - manifest.index_bytes - headers - (where / MANIFEST).stat().st_size) / max(1, needed)


def _wrong_size(source: Source, record: FileRecord) -> list[Problem]:
    try:
        size = source.size(record.name)
    except FileNotFoundError:
        return [Problem(file=record.name, offset=None, text="missing")]
    except OSError as error:
        return [_unreadable(record, error)]
    if size == record.bytes:
        return []
    what = "truncated" if size < record.bytes else "too long"
    text = f"{what}: {size:,} bytes, of {record.bytes:,} that were saved"
    return [Problem(file=record.name, offset=None, text=text)]


def _wrong_index_size(source: Source, manifest: Manifest) -> list[Problem]:
    return _wrong_size(source, FileRecord(name=INDEX, bytes=manifest.index_bytes, xxh3_128="", blocks=""))


def _wrong_contents(
    source: Source, record: FileRecord, index: Index, progress: Callable[[int], None]
) -> list[Problem]:
    """Hash one file: as a whole, and block by block where the index can be trusted, to say which."""
    blocks = index.files[record.name].blocks if record.name in index.files else ""
    problems = []
    whole = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_WINDOW_BYTES, record.bytes)))
    try:
        with source.open(record.name) as file:
            for start in range(0, record.bytes, _WINDOW_BYTES):
                data = buffer[: min(_WINDOW_BYTES, record.bytes - start)]
                count = file.read_into([data], begin=start)
                progress(count)
                whole.update(data)
                if start == 0:
                    problems += _wrong_header(record, bytes(data[:8]))
                for offset in range(0, len(data) if blocks else 0, BLOCK_BYTES):
                    number = (start + offset) // BLOCK_BYTES
                    expected = blocks[number * DIGITS : (number + 1) * DIGITS]
                    block = data[offset : offset + BLOCK_BYTES]
                    if count < offset + len(block) or xxhash.xxh3_64_hexdigest(block) != expected:
                        problems.append(_damaged_block(record, start + offset, index))
    except OSError as error:
        return [_unreadable(record, error)]
    if not problems and whole.hexdigest() != record.xxh3_128:
        problems.append(Problem(file=record.name, offset=None, text="damaged: it has another hash"))
    return problems


def _unreadable(record: FileRecord, error: OSError) -> Problem:
    """Return the problem that this is. Raises StorageError where it says nothing of the file."""
    if isinstance(error, Unreached):
        raise storage_failure(error, doing=f"Verifying {record.name}") from error
    return Problem(file=record.name, offset=None, text=f"cannot be read: {error.strerror or error}")


def _wrong_header(record: FileRecord, lead: bytes) -> list[Problem]:
    """Refuse a header longer than the file: a reader of safetensors would ask for that much memory."""
    length = int.from_bytes(lead, "little")
    if len(lead) == 8 and 8 + length <= record.bytes:
        return []
    text = f"damaged: its header claims {length:,} bytes, the file has {record.bytes:,}"
    return [Problem(file=record.name, offset=0, text=text)]


def _damaged_block(record: FileRecord, start: int, index: Index) -> Problem:
    touched = tuple(
        item.name
        for item in index.boxes
        if item.file == record.name and item.begin < start + BLOCK_BYTES and start < item.end
    )
    return Problem(
        file=record.name, offset=start, text="damaged: the block has another hash", tensors=touched
    )
