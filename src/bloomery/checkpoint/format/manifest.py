"""The two JSON files of a checkpoint: the index (where each tensor lies) and the manifest (it is complete).

The manifest is written last, so a directory without one is unfinished. It holds the sizes and hashes of all
other files, and its own hash. docs/checkpoint-format.md describes both files for readers without this code.
"""

from __future__ import annotations

import errno
import gc
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from operator import add, attrgetter, le
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from bloomery.checkpoint.format.source import Source, source_of
from bloomery.checkpoint.format.state import ITEM_BYTES, Box, Json, Scope
from bloomery.errors import BloomeryError, CheckpointError, storage_error
from bloomery.events.records import as_json
from bloomery.objects import StoreUnreachable, storage_failure

FORMAT = "bloomery-checkpoint"
VERSION = 1
BLOCK_BYTES = 1 << 20
DIGITS = 16
"""Hexadecimal digits of the hash (xxh3-64) of one block."""
MANIFEST = "manifest.json"
INDEX = "index.json"
PARTIAL = ".partial"

_NAME = re.compile(r"step-(\d{6,})\.i(\d{3,})")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""The names that a data file may have."""
_MANIFEST_BYTES_AT_MOST = 256 << 20
_INDEX_BYTES_AT_MOST = 64 << 30
_FILE_BYTES_AT_MOST = (1 << 63) - 1
_LATEST_S = 253_402_300_799  # the last second of the year 9999
_NOT_DAMAGE = {
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
    *(
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
    ),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}
"""Errors of rights, file handles, memory or the network: they say nothing about the file's content."""
_REMEDY = "See what is damaged with `bloomery ckpt verify`, and take an older checkpoint (`--fallback`)."


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not those that were saved."""

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy=_REMEDY)


def unreadable(place: str, error: OSError, *, what: str = "") -> BloomeryError:
    """Return the exception for a file of a checkpoint that could not be read. Raise it `from error`.

    DamagedCheckpoint where the disk lost the bytes or the file is missing. StorageError where a network is
    down, or credentials or rights are missing: the checkpoint may be intact then, and nobody may fall back to
    an older one.

    place: where the file is, for the message. what: the message of damage; by default "PLACE cannot be read".
    """
    if isinstance(error, StoreUnreachable):
        return storage_failure(error, doing="Reading a checkpoint")
    if error.errno in _NOT_DAMAGE:
        return storage_error(error, path=Path(place), doing="Reading a checkpoint")
    if isinstance(error, FileNotFoundError):
        return DamagedCheckpoint(f"{place} is missing")
    return DamagedCheckpoint(what or f"{place} cannot be read: {error.strerror or error}")


Counts = tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)], ...]


class IndexedBox(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One box of a logical tensor, stored row-major in bytes [begin, end) of the data file `file`.

    `index.json` holds the fields as they stand here. There may be a million, decoded and encoded in C.
    """

    name: str
    dtype: str
    global_shape: Counts
    offset: Counts
    shape: Counts
    scope: Scope
    file: str
    begin: int
    end: int

    @property
    def box(self) -> Box:
        """The box of the tensor."""
        return Box(self.offset, self.shape)

    @property
    def size(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    def is_within_tensor(self) -> bool:
        """Say whether the box lies in a tensor of the global shape."""
        whole, offset, shape = self.global_shape, self.offset, self.shape
        return len(whole) == len(offset) == len(shape) and all(map(le, map(add, offset, shape), whole))


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and hashes of a data file: a hash of the whole file, and of each block of BLOCK_BYTES.

    The last block may be shorter.
    """

    name: str
    bytes: int
    xxh3_128: str
    blocks: str
    """xxh3-64 of each block: 16 hexadecimal digits each, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """Where each box of each tensor lies: the boxes sorted by name and offset, and the data files by name."""

    boxes: tuple[IndexedBox, ...]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `manifest.json` says about a complete checkpoint.

    time: when it was saved, seconds since 1970. world: how many ranks wrote it. about: facts for people.
    values: the small JSON values of each part of the run, by the part's name.
    """

    step: int
    incarnation: int
    time: float
    world: int
    about: Mapping[str, Json]
    values: Mapping[str, Mapping[str, Json]]
    files: tuple[FileRecord, ...] = field(default=())
    """The data files, without block hashes: those are in the index."""
    index_bytes: int = 0
    index_xxh3_128: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all data files and the index."""
        return self.index_bytes + sum(file.bytes for file in self.files)


def checkpoint_name(step: int, incarnation: int) -> str:
    """Return the directory name of a checkpoint."""
    return f"step-{step:06d}.i{incarnation:03d}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return (step, incarnation) of a checkpoint's directory name; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def index_bytes(boxes: Iterable[IndexedBox], files: Iterable[FileRecord]) -> bytes:
    """Return the content of `index.json`, made tensor by tensor: there may be a million boxes."""
    by_name: dict[str, list[IndexedBox]] = {}
    for item in boxes:
        by_name.setdefault(item.name, []).append(item)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "block_bytes": BLOCK_BYTES,
        "files": {item.name: {"bytes": item.bytes, "blocks": item.blocks} for item in files},
    }
    encoder = msgspec.json.Encoder()
    tensors = []
    for name in sorted(by_name):
        tensors.append(encoder.encode(sorted(by_name[name], key=attrgetter("offset")))[1:-1])
    return b'%b,"boxes":[%b]}' % (encoder.encode(head)[:-1], b",".join(tensors))


def manifest_text(manifest: Manifest) -> str:
    """Return the text of `manifest.json`. Its last field is the hash of all others."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(manifest),
        "files": [{"name": i.name, "bytes": i.bytes, "xxh3_128": i.xxh3_128} for i in manifest.files],
    }
    plain = as_json(content)
    assert isinstance(plain, dict)
    return json.dumps({**plain, "manifest_xxh3_128": _digest(plain)}, indent=1, ensure_ascii=False) + "\n"


def read_manifest(where: Path | Source) -> Manifest:
    """Return a checkpoint's manifest, its hash verified.

    Raises CheckpointError where there is none or of another version, DamagedCheckpoint, and StorageError.
    """
    source = source_of(where)
    path = source.place(MANIFEST)
    try:
        content = json.loads(source.content(MANIFEST, at_most=_MANIFEST_BYTES_AT_MOST))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{source.place()} is not a finished checkpoint: it has no {MANIFEST}",
            remedy="`bloomery ckpt list RUN` shows those that are.",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or "manifest_xxh3_128" not in content:
        raise DamagedCheckpoint(f"{path} is not the manifest of a bloomery checkpoint")
    # The hash comes first, in every version of the format: a damaged version number is damage.
    if content.pop("manifest_xxh3_128") != _digest(content):
        raise DamagedCheckpoint(f"{path} is damaged: it does not have the hash it was saved with")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('version')!r}; this bloomery reads version {VERSION}",
            remedy="Read it with the version of bloomery that wrote it, or a newer one.",
        )
    try:
        return checked_manifest(_manifest_from_json(content))
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # OverflowError: a number is Infinity
        raise DamagedCheckpoint(f"{path} is not a valid manifest: {_reason(error)}") from error


def read_index(where: Path | Source, manifest: Manifest) -> Index:
    """Return a checkpoint's index, verified against its manifest. Raises CheckpointError."""
    source = source_of(where)
    path = source.place(INDEX)
    try:
        text = source.content(INDEX, at_most=manifest.index_bytes + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if xxhash.xxh3_128_hexdigest(text) != manifest.index_xxh3_128:
        raise DamagedCheckpoint(f"{path} is damaged: it does not have the hash it was saved with")
    try:
        with without_garbage_collection():
            content = msgspec.json.decode(text, type=_IndexFile)
        sums = {item.name: item.xxh3_128 for item in manifest.files}
        files = {
            name: FileRecord(name=name, bytes=item.bytes, xxh3_128=sums[name], blocks=item.blocks)
            for name, item in content.files.items()
        }
        return checked_index(Index(boxes=content.boxes, files=files), manifest)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not a valid index: {_reason(error)}") from error


def checked_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest, once its file names, sizes and facts are checked. Raises ValueError.

    No name may lead out of the checkpoint's directory.
    """
    if not isinstance(manifest.about, dict) or not isinstance(manifest.values, dict):
        raise ValueError("its facts or its values are no table")
    if not all(isinstance(values, dict) for values in manifest.values.values()):
        raise ValueError("the values of a part are no table")
    if type(manifest.time) not in (int, float) or not 0 <= manifest.time <= _LATEST_S:
        raise ValueError(f"it cannot have been saved at {manifest.time!r:.40}")
    if type(manifest.world) is not int or manifest.world < 1:
        raise ValueError(f"{manifest.world!r:.40} ranks cannot have written it")
    for file in manifest.files:
        if not FILE_NAME.fullmatch(file.name) or file.name in (MANIFEST, INDEX):
            raise ValueError(f"a data file cannot be named {file.name!r}")
        if not 0 <= file.bytes <= _FILE_BYTES_AT_MOST:
            raise ValueError(f"{file.name} cannot have {file.bytes!r:.40} bytes")
    if not 0 <= manifest.index_bytes <= _INDEX_BYTES_AT_MOST:
        raise ValueError(f"an index cannot have {manifest.index_bytes} bytes")
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("it names a file twice")
    return manifest


def checked_index(index: Index, manifest: Manifest) -> Index:
    """Return the index, once each box is known to lie within its tensor and its file.

    Raises ValueError otherwise. So a forged index makes no reader allocate or read more than the files hold.
    """
    sizes = {file.name: file.bytes for file in manifest.files}
    for name, record in index.files.items():
        if record.bytes != sizes.get(name):
            raise ValueError(f"it gives {name} {record.bytes} bytes, the manifest {sizes.get(name)}")
        if len(record.blocks) != DIGITS * -(-record.bytes // BLOCK_BYTES):
            raise ValueError(f"it has not one hash for each block of {name}")
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for item in index.boxes:
        if item.dtype not in ITEM_BYTES:
            raise ValueError(f"{item.name} has the unknown element type {item.dtype!r}")
        if not item.is_within_tensor():
            raise ValueError(f"a box of {item.name} lies outside its tensor")
        if not 0 <= item.begin <= item.end <= index.files[item.file].bytes:
            raise ValueError(f"a box of {item.name} lies outside its file")
        if item.end - item.begin != item.size * ITEM_BYTES[item.dtype]:
            raise ValueError(f"a box of {item.name} has not the bytes of its shape")
        if shapes.setdefault(item.name, (item.global_shape, item.dtype)) != (item.global_shape, item.dtype):
            raise ValueError(f"{item.name} has two shapes or types")
    return index


def now() -> float:
    """Return the current time as a manifest holds it: seconds since 1970, to the millisecond."""
    return round(time.time(), 3)


def _manifest_from_json(content: Mapping[str, Any]) -> Manifest:  # Any: JSON
    return Manifest(
        step=int(content["step"]),
        incarnation=int(content["incarnation"]),
        time=content["time"],
        world=content["world"],
        about=content["about"],
        values=content["values"],
        files=tuple(
            FileRecord(name=item["name"], bytes=int(item["bytes"]), xxh3_128=item["xxh3_128"], blocks="")
            for item in content["files"]
        ),
        index_bytes=int(content["index_bytes"]),
        index_xxh3_128=content["index_xxh3_128"],
    )


def _reason(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _digest(content: Mapping[str, Any]) -> str:  # Any: JSON
    """Hash JSON independently of its layout: with sorted keys, no spaces, and everything escaped."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


class _IndexedFile(msgspec.Struct):
    """What `index.json` says about a data file."""

    bytes: int
    blocks: str


class _IndexFile(msgspec.Struct):
    """What is read of `index.json`."""

    files: dict[str, _IndexedFile]
    boxes: tuple[IndexedBox, ...]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch Python's search for cyclic garbage off within the block.

    Among a million new objects the search takes half of the time.

    The objects of the block must not be cyclic, or they stay until a later search finds them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
