"""A checkpoint of some parts of another: the same data files, with an index and a manifest of their own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import xxhash

from bloomery.checkpoint.manifest import (
    FileRecord,
    Index,
    Manifest,
    index_text,
    manifest_text,
)
from bloomery.checkpoint.state import Json
from bloomery.errors import CheckpointError

SUBSET = "parts"
"""The key of a subset's `about` that lists the parts it holds."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What a checkpoint is beside its data files: those of `files`."""

    files: tuple[FileRecord, ...]
    index: bytes
    manifest: bytes


def subset(manifest: Manifest, index: Index, *, parts: Collection[str]) -> Texts:
    """Return the checkpoint of `parts` alone. Each data file holds one part, so none need be rewritten.

    Raises CheckpointError where a file holds several, or there is nothing of them.
    """
    boxes = tuple(box for box in index.boxes if box.name.partition(".")[0] in parts)
    names = {box.file for box in boxes}
    mixed = {box.file for box in index.boxes if box.file in names} & {
        box.file for box in index.boxes if box.name.partition(".")[0] not in parts
    }
    if not boxes or mixed:
        what = f"holds nothing of {', '.join(sorted(parts))}" if not boxes else f"mixes parts in {min(mixed)}"
        raise CheckpointError(
            f"step {manifest.step}'s checkpoint {what}", remedy="Copy it whole, or take another."
        )
    records = tuple(index.files[name] for name in sorted(names))
    text = index_text(boxes, records).encode()
    about: dict[str, Json] = {**manifest.about, SUBSET: list[Json](sorted(parts))}
    smaller = replace(
        manifest,
        about=about,
        files=tuple(replace(record, blocks="") for record in records),
        index_bytes=len(text),
        index_xxh3_128=xxhash.xxh3_128_hexdigest(text),
    )
    return Texts(files=records, index=text, manifest=manifest_text(smaller).encode())
