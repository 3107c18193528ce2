"""Lays out and writes data files: valid safetensors, hashed by the block while they are written.

There are two writers, because each is the fastest for its source. `HashingWriter` appends tensors that lie
anywhere, through the page cache. `write_image` writes a file that lies in memory byte for byte as it will be
stored, with direct I/O from several threads, while it is still being filled. Both hash with `BlockHasher`,
and both use the header of `safetensors_header`, as do exports.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType

import xxhash

from bloomery import durable
from bloomery.checkpoint.format.manifest import BLOCK_BYTES, FileRecord, IndexedBox
from bloomery.checkpoint.format.state import ITEM_BYTES, Box, StateEntry

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
    """A data file that is to be written.

    entries: its tensors, in the order in which they are stored. header: the bytes before the first of them.
    boxes: where in the file each entry will lie.
    """

    name: str
    entries: tuple[StateEntry, ...]
    header: bytes
    boxes: tuple[IndexedBox, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.boxes[-1].end if self.boxes else len(self.header)


def lay_out(
    entries: Iterable[StateEntry], *, rank: int, world: int, file_bytes: int, first: int = 0
) -> tuple[DataFile, ...]:
    """Return the files that hold `entries`: files of their own for each part, none beyond `file_bytes`.

    Entries with larger elements come first, so that each begins at a multiple of its element size. A single
    entry larger than `file_bytes` makes a larger file: `split_entries` cuts such entries first.
    first: the number of each part's first file.
    """
    parts: dict[str, list[StateEntry]] = {}
    for entry in sorted(entries, key=lambda item: (-ITEM_BYTES[item.dtype], item.name, item.box.offset)):
        parts.setdefault(entry.name.partition(".")[0], []).append(entry)
    files = []
    for part, members in sorted(parts.items()):
        for number, group in enumerate(_cut(members, file_bytes=file_bytes), first):
            name = f"{part}-r{rank:05d}-of-{world:05d}-{number:03d}.safetensors"
            files.append(_data_file(name, tuple(group)))
    return tuple(files)


def split_entries(entries: Iterable[StateEntry], *, piece_bytes: int) -> Iterator[StateEntry]:
    """Yield the entries, those above `piece_bytes` cut into boxes of whole rows, about equally large."""
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


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, alignment: int
) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the first bytes of a safetensors file, and the bytes [begin, end) of the file of each tensor.

    tensors: the name, the element type (a key of ITEM_BYTES) and the shape of each, in the stored order.
    alignment: the first tensor begins at a multiple of so many bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans: list[tuple[int, int]] = []
    position = 0
    for name, dtype, shape in tensors:
        span = (position, position + prod(shape) * ITEM_BYTES[dtype])
        header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": span}
        spans.append(span)
        position = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [(first + begin, first + end) for begin, end in spans]


class BlockHasher:
    """Hashes the bytes of a file as they come, in order: the whole file, and each block of BLOCK_BYTES."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._blocks: list[str] = []

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
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
    """Writes a new file from its beginning to its end, and hashes it. A context manager that closes it."""

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
        durable.sync_file(self._file)
        return self._hasher.record(self._name)

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def shortened(names: Sequence[str], *, most: int = 10) -> str:
    """Return names as a list for a message, the first `most` of them and a count of the rest."""
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
    described = [(_key(entry), entry.dtype, entry.box.shape) for entry in entries]
    header, spans = safetensors_header(described, alignment=HEADER_ALIGNMENT)
    boxes = tuple(
        IndexedBox(
            name=entry.name,
            dtype=entry.dtype,
            global_shape=entry.global_shape,
            offset=entry.box.offset,
            shape=entry.box.shape,
            scope=entry.scope,
            file=name,
            begin=begin,
            end=end,
        )
        for entry, (begin, end) in zip(entries, spans, strict=True)
    )
    return DataFile(name=name, entries=entries, header=header, boxes=boxes)


def _key(entry: StateEntry) -> str:
    """Return the tensor's key in the header: its name, and the box's offset unless it is the whole."""
    if entry.box.shape == entry.global_shape:
        return entry.name
    return f"{entry.name}@{','.join(map(str, entry.box.offset))}"


PAGE_BYTES = 4096
"""Direct I/O needs addresses, offsets and lengths that are multiples of this."""
_CHUNK_BYTES = 8 << 20
_WRITES_AT_ONCE = 4
_SYNC_BYTES = 64 << 20
"""The bytes after which a file that goes through the page cache is synced. A whole file in one sync, which
may get two megabytes a second, looks like a rank that writes nothing for minutes."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP}


def write_image(
    path: Path,
    image: memoryview,
    *,
    length: int,
    until_filled: Callable[[int], None] = lambda bytes: None,
    rest: Callable[[], None] = lambda: None,
    wrote: Callable[[int], None] = lambda bytes: None,
    anew: bool = False,
) -> FileRecord:
    """Write the first `length` bytes of `image` to a new durable file, and return its record.

    The page cache is bypassed, so that the training's own pages stay in it. Where the file system does not
    allow direct I/O, the file is written as any other. Raises OSError.

    image: page-aligned, and a whole number of pages; the file is cut to `length` at the end.
    until_filled: called with a number of bytes; returns once so many of the first bytes of `image` are there.
    rest: called between chunks of a few megabytes; may pause.
    wrote: called with the bytes of each chunk that has reached the file system.
    anew: a writer that died may have left a file there. It is removed, never written to: what the dead
        writer still has on its way to the disk then ends in a file without a name.
    """
    if anew:
        path.unlink(missing_ok=True)
    file, hasher = _opened(path), BlockHasher()
    try:
        _reserve(file, length)
        with ThreadPoolExecutor(_WRITES_AT_ONCE) as pool:
            pending: deque[Future[int]] = deque()
            synced = 0
            for start in range(0, length, _CHUNK_BYTES):
                if start:
                    rest()
                stop = min(start + _CHUNK_BYTES, length)
                until_filled(stop)
                whole_pages = image[start : stop + -stop % PAGE_BYTES]
                pending.append(pool.submit(_write_at, file, whole_pages, start))
                hasher.update(image[start:stop])
                if len(pending) > _WRITES_AT_ONCE:
                    wrote(pending.popleft().result())
                if stop - synced >= _SYNC_BYTES and not _is_direct(file):
                    durable.sync_file(file)  # what the page cache took is no progress yet
                    synced = stop
            while pending:
                wrote(pending.popleft().result())
        os.ftruncate(file, length)
        durable.sync_file(file)
    finally:
        os.close(file)
    return hasher.record(path.name)


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o666)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def _reserve(file: int, length: int) -> None:
    """Allocate a file's blocks before it is written. Raises OSError when there is no space.

    Parallel writes need not wait for each other where none of them lengthens the file. Where the file system
    cannot allocate, they wait.
    """
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if allocate is None or not length:  # not Linux
        return
    allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if allocate(file, 0, 0, length) and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _write_at(file: int, data: memoryview, offset: int) -> int:
    """Write all of `data` at an offset, and return its length.

    Some file systems open a file for direct I/O and then refuse to write so; the file's flag then goes, which
    all threads share. So a thread looks at it before it writes: another one may clear it meanwhile.
    """
    length, direct = len(data), getattr(os, "O_DIRECT", 0)
    while data:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            count = os.pwrite(file, data, offset)
        except OSError as error:
            if error.errno not in _REFUSALS or not flags & direct:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~direct)
            continue
        data, offset = data[count:], offset + count
    return length
