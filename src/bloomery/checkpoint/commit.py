"""How a checkpoint becomes one: written in a `.partial` directory, then index, manifest and a rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from bloomery.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    PARTIAL,
    FileRecord,
    IndexedBox,
    Manifest,
    checkpoint_name,
    index_text,
    manifest_text,
)
from bloomery.checkpoint.state import Box, Json
from bloomery.errors import CheckpointError
from bloomery.events.storage import storage_error, sync_directory


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank wrote: files, and the boxes in them. Travels between ranks as JSON."""

    files: tuple[FileRecord, ...]
    boxes: tuple[IndexedBox, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the part as JSON."""
        return {
            "files": [asdict(item) for item in self.files],
            "boxes": [asdict(item) for item in self.boxes],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Part:  # Any: JSON of `to_json`
        """Return what `to_json` wrote."""
        boxes = []
        for item in content["boxes"]:
            box = Box(tuple(item["box"]["offset"]), tuple(item["box"]["shape"]))
            boxes.append(IndexedBox(**{**item, "global_shape": tuple(item["global_shape"]), "box": box}))
        return cls(files=tuple(FileRecord(**item) for item in content["files"]), boxes=tuple(boxes))


def partial_directory(directory: Path, *, step: int, incarnation: int) -> Path:
    """Return where the ranks of one save write."""
    return directory / (checkpoint_name(step, incarnation) + PARTIAL)


def begin_partial(partial: Path) -> None:
    """Make an empty directory for a save; what an interrupted one left there goes. Raises StorageError."""
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint") from error


def commit(
    partial: Path,
    parts: Sequence[Part],
    *,
    step: int,
    incarnation: int,
    time: float,
    values: Mapping[str, Mapping[str, Json]],
    about: Mapping[str, Json],
    notes: Sequence[Path] = (),
) -> Path:
    """Turn what all ranks wrote (and synced) into a checkpoint, and return its directory.

    Called by one rank when all have finished. Until the rename there is no checkpoint; after it there is a
    whole one. notes: files in `partial` that are no part of it; they stay until the manifest is durable, so
    that whoever finds the work of one that died here has them, or can `publish`.
    Raises CheckpointError when the boxes do not make up their tensors, and StorageError.
    """
    files = [item for part in parts for item in part.files]
    boxes = [item for part in parts for item in part.boxes]
    check_coverage(boxes)
    text = index_text(boxes, files).encode()
    manifest = Manifest(
        step=step,
        incarnation=incarnation,
        time=time,
        world=len(parts),
        about=about,
        values=values,
        files=tuple(replace(item, blocks="") for item in files),
        index_bytes=len(text),
        index_xxh3_128=xxhash.xxh3_128_hexdigest(text),
    )
    try:
        _write_durably(partial / INDEX, text)
        _write_durably(partial / MANIFEST, manifest_text(manifest).encode())
        sync_directory(partial)
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint") from error
    return publish(partial, notes=notes)


def publish(partial: Path, *, notes: Sequence[Path] = ()) -> Path:
    """Give what has a durable manifest the name of a checkpoint: a commit's last act. Raises StorageError."""
    final = final_directory(partial)
    try:
        for note in notes:
            note.unlink(missing_ok=True)
        if final.exists():
            shutil.rmtree(final)  # the caller saw that it was damaged
        partial.rename(final)
        sync_directory(final.parent)
    except OSError as error:
        raise storage_error(error, path=partial, doing="Saving a checkpoint") from error
    return final


def final_directory(partial: Path) -> Path:
    """Return what a `.partial` directory is called once it is a checkpoint."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def check_coverage(boxes: Iterable[IndexedBox]) -> None:
    """Raise CheckpointError unless the boxes of each tensor fill it exactly, each element once."""
    tensors: dict[str, list[IndexedBox]] = {}
    for item in boxes:
        tensors.setdefault(item.name, []).append(item)
    for name, pieces in tensors.items():
        first = pieces[0]
        if any(
            (i.global_shape, i.dtype, i.scope) != (first.global_shape, first.dtype, first.scope)
            for i in pieces
        ):
            raise _incomplete(name, "is declared differently by different ranks")
        whole = Box((0,) * len(first.global_shape), first.global_shape)
        if sum(item.box.size for item in pieces) != whole.size:
            raise _incomplete(name, f"of shape {first.global_shape} is not filled exactly by its boxes")
        if _overlap(sorted((item.box for item in pieces), key=lambda box: box.offset)):
            raise _incomplete(name, "has boxes that overlap")


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint. A crash on the way leaves a `.partial`, never a damaged checkpoint."""
    doomed = directory.with_name(directory.name + PARTIAL)
    try:
        if doomed.exists():
            shutil.rmtree(doomed)
        directory.rename(doomed)
        sync_directory(directory.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise storage_error(error, path=directory, doing="Removing an old checkpoint") from error


def sweep(directory: Path) -> list[Path]:
    """Remove what interrupted saves and removals left. Only for whoever holds the run."""
    leftovers = sorted(directory.glob(f"step-*{PARTIAL}"))
    for path in leftovers:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise storage_error(error, path=path, doing="Sweeping an unfinished checkpoint") from error
    return leftovers


def _overlap(boxes: Sequence[Box]) -> bool:
    """Say whether two boxes share an element. They are sorted, so that few pairs need comparing."""
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box.offset and other.offset[0] >= box.offset[0] + box.shape[0]:
                break
            if box.size and other.size and box.intersection(other) is not None:
                return True
    return False


def _incomplete(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint was not saved: {name} {what}",
        remedy="This is a mistake in bloomery, not in your run: please report it with the recipe.",
    )


def _write_durably(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
        os.fsync(file)
    finally:
        os.close(file)
