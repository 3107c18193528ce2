"""Data files: valid safetensors, written front to back with their hashes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import xxhash

from bloomery.checkpoint.manifest import BLOCK_BYTES, FileRecord, IndexedBox
from bloomery.checkpoint.state import ITEM_BYTES, Box, StateEntry

HEADER_ALIGNMENT = 4096
_TYPES = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file to be written: its entries in order, the header before them, and where each will lie."""

    name: str
    entries: tuple[StateEntry, ...]
    header: bytes
    boxes: tuple[IndexedBox, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.boxes[-1].end if self.boxes else len(self.header)


def lay_out(entries: Iterable[StateEntry], *, rank: int, world: int, file_bytes: int) -> tuple[DataFile, ...]:
    """Return the files that hold `entries`: each part's apart, none larger than `file_bytes` if it can be.

    Entries with larger elements come first, so that each starts at a multiple of its element size. What is to
    keep to `file_bytes` has gone through `in_pieces`.
    """
    parts: dict[str, list[StateEntry]] = {}
    for entry in sorted(entries, key=lambda item: (-ITEM_BYTES[item.dtype], item.name, item.box.offset)):
        parts.setdefault(entry.name.partition(".")[0], []).append(entry)
    files = []
    for part, members in sorted(parts.items()):
        for number, group in enumerate(_cut(members, file_bytes=file_bytes)):
            name = f"{part}-r{rank:05d}-of-{world:05d}-{number:03d}.safetensors"
            files.append(_data_file(name, tuple(group)))
    return tuple(files)


def in_pieces(entries: Iterable[StateEntry], *, piece_bytes: int) -> Iterator[StateEntry]:
    """Yield the entries; those larger than `piece_bytes` in boxes of whole rows, as equal as can be."""
    for entry in entries:
        if entry.nbytes <= piece_bytes or not entry.box.shape:
            yield entry
            continue
        height = entry.box.shape[0]
        most = max(1, piece_bytes * height // entry.nbytes)
        rows = -(-height // -(-height // most))
        for start in range(0, height, rows):
            length = min(rows, height - start)
            box = Box((entry.box.offset[0] + start, *entry.box.offset[1:]), (length, *entry.box.shape[1:]))
            yield replace(entry, box=box, tensor=entry.tensor[start : start + length])


class BlockHasher:
    """Hashes a file whose bytes come in order: the whole, and each block."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._blocks: list[str] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        hashed = 0
        while hashed < len(data):
            piece = data[hashed : hashed + BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            self._whole.update(piece)  # both while it is in the cache
            self._block.update(piece)
            hashed += len(piece)
            self.bytes += len(piece)
            if self.bytes % BLOCK_BYTES == 0:
                self._end_block()

    def record(self, name: str) -> FileRecord:
        """Return the record of the file, which ends here."""
        if self.bytes % BLOCK_BYTES:
            self._end_block()
        return FileRecord(
            name=name, bytes=self.bytes, xxh3_128=self._whole.hexdigest(), blocks="".join(self._blocks)
        )

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()


class HashingWriter:
    """A new file, hashed as it is written: the whole, and each block."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hasher = BlockHasher()

    def write(self, data: memoryview) -> None:
        """Append bytes. Raises OSError."""
        data = data.cast("B")
        self._hasher.update(data)
        while data:
            data = data[os.write(self._file, data) :]

    def finish(self) -> FileRecord:
        """Make the file durable and return its record. Raises OSError."""
        os.fsync(self._file)
        return self._hasher.record(self._name)

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def shortened(names: Sequence[str], *, most: int = 10) -> str:
    """Return names as a list for people, cut where it would not end."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "no tensor") + more


def _cut(entries: Sequence[StateEntry], *, file_bytes: int) -> list[list[StateEntry]]:
    groups: list[list[StateEntry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    return groups


def _data_file(name: str, entries: tuple[StateEntry, ...]) -> DataFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans: list[tuple[int, int]] = []
    position = 0
    for entry in entries:
        span = (position, position + entry.nbytes)
        header[_key(entry)] = {
            "dtype": _TYPES[entry.dtype],
            "shape": entry.box.shape,
            "data_offsets": span,
        }
        spans.append(span)
        position = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    lead = len(text).to_bytes(8, "little") + text
    boxes = tuple(
        IndexedBox(
            name=entry.name,
            dtype=entry.dtype,
            global_shape=entry.global_shape,
            box=entry.box,
            scope=entry.scope,
            file=name,
            begin=len(lead) + begin,
            end=len(lead) + end,
        )
        for entry, (begin, end) in zip(entries, spans, strict=True)
    )
    return DataFile(name=name, entries=entries, header=lead, boxes=boxes)


def _key(entry: StateEntry) -> str:
    """Return the tensor's key: its name, and its place where it is not the whole."""
    if entry.box.shape == entry.global_shape:
        return entry.name
    return f"{entry.name}@{','.join(map(str, entry.box.offset))}"
