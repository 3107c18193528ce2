"""Verifying that every byte of a checkpoint is the one that was saved."""

from __future__ import annotations

from collections.abc import Sequence
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
from bloomery.errors import CheckpointError


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


def verify(directory: Path, *, contents: bool = True) -> list[Problem]:
    """Return all that is wrong with a checkpoint; nothing when it is whole.

    contents: read and hash every file; otherwise only the manifest is hashed, and sizes are compared.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return [Problem(file=MANIFEST, offset=None, text=error.message)]
    problems = [problem for record in manifest.files for problem in _wrong_size(directory, record)]
    if not contents:
        return problems + _wrong_index_size(directory, manifest)
    unreadable = {problem.file for problem in problems}
    try:
        index = read_index(directory, manifest)
    except CheckpointError as error:
        index = Index(boxes=(), files={})
        problems.append(Problem(file=INDEX, offset=None, text=error.message))
    for record in manifest.files:
        if record.name not in unreadable:
            problems += _wrong_contents(directory, record, index)
    return problems


def _wrong_size(directory: Path, record: FileRecord) -> list[Problem]:
    try:
        size = (directory / record.name).stat().st_size
    except FileNotFoundError:
        return [Problem(file=record.name, offset=None, text="missing")]
    if size == record.bytes:
        return []
    what = "truncated" if size < record.bytes else "too long"
    text = f"{what}: {size:,} bytes, of {record.bytes:,} that were saved"
    return [Problem(file=record.name, offset=None, text=text)]


def _wrong_index_size(directory: Path, manifest: Manifest) -> list[Problem]:
    return _wrong_size(directory, FileRecord(name=INDEX, bytes=manifest.index_bytes, xxh3_128="", blocks=""))


def _wrong_contents(directory: Path, record: FileRecord, index: Index) -> list[Problem]:
    """Hash one file: as a whole, and block by block where the index can be trusted, to say which."""
    blocks = index.files[record.name].blocks if record.name in index.files else ""
    problems = []
    whole = xxhash.xxh3_128()
    try:
        with (directory / record.name).open("rb", buffering=0) as file:
            for start in range(0, record.bytes, BLOCK_BYTES):
                data = file.read(BLOCK_BYTES)
                whole.update(data)
                number = start // BLOCK_BYTES
                expected = blocks[number * DIGITS : (number + 1) * DIGITS]
                if blocks and xxhash.xxh3_64_hexdigest(data) != expected:
                    problems.append(_damaged_block(record, start, index))
    except OSError as error:
        return [Problem(file=record.name, offset=None, text=f"cannot be read: {error.strerror}")]
    if not problems and whole.hexdigest() != record.xxh3_128:
        problems.append(Problem(file=record.name, offset=None, text="damaged: it has another hash"))
    return problems


def _damaged_block(record: FileRecord, start: int, index: Index) -> Problem:
    touched: Sequence[str] = [
        item.name
        for item in index.boxes
        if item.file == record.name and item.begin < start + BLOCK_BYTES and start < item.end
    ]
    return Problem(
        file=record.name, offset=start, text="damaged: the block has another hash", tensors=tuple(touched)
    )
