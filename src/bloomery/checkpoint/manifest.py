"""The two JSON files of a checkpoint: what it holds (the index), and that it is whole (the manifest).

The manifest is written last: a directory without one is unfinished. It carries the sizes and hashes of all
other files, and its own. docs/checkpoint-format.md describes both for people without this code.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bloomery.checkpoint.state import Box, Json, Scope
from bloomery.errors import CheckpointError
from bloomery.events.numbers import as_json

FORMAT = "bloomery-checkpoint"
VERSION = 1
BLOCK_BYTES = 1 << 20
MANIFEST = "manifest.json"
INDEX = "index.json"
PARTIAL = ".partial"

_NAME = re.compile(r"step-(\d{6,})\.i(\d{3,})")
_REMEDY = "See what is damaged with `bloomery ckpt verify`, and take an older checkpoint (`--fallback`)."


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not those that were saved."""

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy=_REMEDY)


@dataclass(frozen=True, kw_only=True)
class IndexedBox:
    """One box of a logical tensor, and the bytes [begin, end) of `file` it is stored in, row-major."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    scope: Scope
    file: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and hashes of a data file: of the whole, and of each BLOCK_BYTES (the last may be shorter)."""

    name: str
    bytes: int
    xxh3_128: str
    blocks: str
    """xxh3-64 of each block: 16 hexadecimal digits each, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """Where each box lies, sorted by name and offset."""

    boxes: tuple[IndexedBox, ...]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a whole checkpoint says of itself."""

    step: int
    incarnation: int
    time: float
    world: int
    about: Mapping[str, Json]
    values: Mapping[str, Mapping[str, Json]]
    files: tuple[FileRecord, ...] = field(default=())
    """Without their block hashes, which are the index's."""
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


def index_text(boxes: Iterable[IndexedBox], files: Iterable[FileRecord]) -> str:
    """Return the text of `index.json`."""
    ordered = sorted(boxes, key=lambda item: (item.name, item.box.offset))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "block_bytes": BLOCK_BYTES,
        "files": {item.name: {"bytes": item.bytes, "blocks": item.blocks} for item in files},
        "boxes": [_box_to_json(item) for item in ordered],
    }
    return json.dumps(content, separators=(",", ":"))


def manifest_text(manifest: Manifest) -> str:
    """Return the text of `manifest.json`. Its last field is the hash of the rest."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(manifest),
        "files": [{"name": i.name, "bytes": i.bytes, "xxh3_128": i.xxh3_128} for i in manifest.files],
    }
    plain = as_json(content)
    assert isinstance(plain, dict)
    return json.dumps({**plain, "manifest_xxh3_128": _digest(plain)}, indent=1, ensure_ascii=False) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """Return a checkpoint's manifest. Raises CheckpointError when there is none that can be trusted."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{directory} is not a finished checkpoint: it has no {MANIFEST}",
            remedy="`bloomery ckpt list RUN` shows those that are.",
        ) from error
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or "manifest_xxh3_128" not in content:
        raise CheckpointError(
            f"{path} is not the manifest of a bloomery checkpoint", remedy="Is this the right directory?"
        )
    # The hash comes first, in every version of the format: a damaged version number is damage.
    if content.pop("manifest_xxh3_128") != _digest(content):
        raise DamagedCheckpoint(f"{path} is damaged: it does not have the hash it was saved with")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('version')!r}; this bloomery reads version {VERSION}",
            remedy="Read it with the version of bloomery that wrote it, or a newer one.",
        )
    return Manifest(
        step=content["step"],
        incarnation=content["incarnation"],
        time=content["time"],
        world=content["world"],
        about=content["about"],
        values=content["values"],
        files=tuple(FileRecord(**item, blocks="") for item in content["files"]),
        index_bytes=content["index_bytes"],
        index_xxh3_128=content["index_xxh3_128"],
    )


def read_index(directory: Path, manifest: Manifest) -> Index:
    """Return a checkpoint's index, verified against its manifest. Raises CheckpointError."""
    path = directory / INDEX
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    if xxhash.xxh3_128_hexdigest(text) != manifest.index_xxh3_128:
        raise DamagedCheckpoint(f"{path} is damaged: it does not have the hash it was saved with")
    content = json.loads(text)
    sums = {item.name: item.xxh3_128 for item in manifest.files}
    files = {
        name: FileRecord(name=name, bytes=item["bytes"], xxh3_128=sums[name], blocks=item["blocks"])
        for name, item in content["files"].items()
    }
    return Index(boxes=tuple(_box_from_json(item) for item in content["boxes"]), files=files)


def now() -> float:
    """Return the time that a manifest is stamped with: seconds since 1970, to the millisecond."""
    return round(time.time(), 3)


def _digest(content: Mapping[str, Any]) -> str:  # Any: JSON
    """Hash JSON independently of how it was laid out: sorted keys, no spaces, everything escaped."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def _box_to_json(item: IndexedBox) -> dict[str, Any]:
    return {
        "name": item.name,
        "dtype": item.dtype,
        "global_shape": item.global_shape,
        "offset": item.box.offset,
        "shape": item.box.shape,
        "scope": item.scope,
        "file": item.file,
        "begin": item.begin,
        "end": item.end,
    }


def _box_from_json(item: Mapping[str, Any]) -> IndexedBox:
    return IndexedBox(
        name=item["name"],
        dtype=item["dtype"],
        global_shape=tuple(item["global_shape"]),
        box=Box(tuple(item["offset"]), tuple(item["shape"])),
        scope=item["scope"],
        file=item["file"],
        begin=item["begin"],
        end=item["end"],
    )
