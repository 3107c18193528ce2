"""Writes smaller copies: a checkpoint without its optimizer, a torch.save file without unused storage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bloomery import durable
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.source import source_of
from bloomery.checkpoint.format.state import StateEntry
from bloomery.checkpoint.format.suspects import SUSPECT, mark_of
from bloomery.checkpoint.load.loader import read_in_pieces
from bloomery.checkpoint.save.direct import save_streamed
from bloomery.config.find import is_run
from bloomery.errors import CheckpointError, storage_error
from bloomery.events.records import ProgressCallback, counting, ignore_progress
from bloomery.interchange.foreign_files import load_plain

PIECE_BYTES = 256 << 20
MODEL = "model."
KEPT_VALUES = ("train", "data")
"""The parts whose small values are kept: the position of the run and of its data."""


@dataclass(frozen=True, kw_only=True)
class Slimmed:
    """The smaller copy that was written.

    before, after: bytes of the original and of the copy.
    repaired: number of tensors that were saved with a larger storage than their own elements.
    """

    path: Path
    before: int
    after: int
    repaired: int = 0


def slim_checkpoint(
    checkpoint: Path, directory: Path, *, progress: ProgressCallback = ignore_progress
) -> Slimmed:
    """Write the model of a checkpoint, without optimizer and guards, below `directory`, under the same name.

    It holds at most 1 GiB of tensors in memory, whatever the size of the largest, and verifies every byte
    that it reads. The copy of a checkpoint that is marked as suspect is marked, too.
    Raises CheckpointError and StorageError.
    """
    place = directory.resolve()  # of `.` within a run's checkpoints the parent is `.` again
    if is_run(place) or is_run(place.parent):
        raise CheckpointError(
            f"{directory} belongs to a run, which would take the copy for one of its checkpoints.",
            remedy="Choose a directory of its own.",
        )
    manifest = read_manifest(checkpoint)
    final = directory / checkpoint.name
    if final.exists():
        raise CheckpointError(f"{final} exists already.", remedy="Choose another directory, or remove it.")
    total = sum(file.bytes for file in manifest.files if file.name.startswith(MODEL.rstrip(".") + "-"))
    read = counting(progress, "slimming", total)

    def pieces() -> Iterator[StateEntry]:
        for piece in read_in_pieces(checkpoint, prefix=MODEL, piece_bytes=PIECE_BYTES):
            read(piece.nbytes)
            yield piece
            del piece  # or it would be held while the next one is read

    is_new = not directory.exists()
    try:
        written = save_streamed(
            directory,
            pieces(),
            step=manifest.step,
            incarnation=manifest.incarnation,
            time=manifest.time,
            values={part: manifest.values[part] for part in KEPT_VALUES if part in manifest.values},
            about=manifest.about,
        )
        with _removed_on_error(written):  # a suspect without its mark would pass for a good one
            mark = mark_of(source_of(checkpoint))
            if mark is not None:
                durable.write_whole(written / SUSPECT, mark)
    except BaseException as error:
        if is_new:
            with suppress(OSError):  # it is not there, or holds something by now
                directory.rmdir()
        if isinstance(error, OSError):
            raise storage_error(error, path=final, doing="Marking a slim copy") from error
        raise
    return Slimmed(path=written, before=manifest.bytes, after=read_manifest(written).bytes)


@contextmanager
def _removed_on_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def slim_file(source: Path, target: Path) -> Slimmed:
    """Write a torch.save file again, each tensor with only its own elements.

    torch.save stores a view with the whole storage behind it, so each shard of a buffer can take the buffer's
    size on disk. Tensors that share all of one storage still share it. Raises CheckpointError.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already.", remedy="Choose another file, or remove it.")
    repaired = [0]
    slim = _without_surplus(load_plain(source), repaired)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save(slim, file)
        durable.publish(partial, target)
    except (OSError, RuntimeError) as error:
        refused = (
            error if isinstance(error, OSError) else error.__context__
        )  # torch tells it in its own words
        if not isinstance(refused, OSError):
            raise
        raise storage_error(refused, path=target, doing="Writing a slimmed file") from error
    finally:
        partial.unlink(missing_ok=True)
    return Slimmed(
        path=target, before=source.stat().st_size, after=target.stat().st_size, repaired=repaired[0]
    )


def _without_surplus(value: object, repaired: list[int]) -> object:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:  # a sparse one is saved by its parts
            return value
        own = value.numel() * value.element_size()
        if value.untyped_storage().nbytes() <= own:
            return value
        repaired[0] += 1
        return value.clone()
    if isinstance(value, dict):
        slim = type(value)()
        for key, item in value.items():  # a Counter, of a learning rate's milestones, would count pairs
            slim[key] = _without_surplus(item, repaired)
        return slim
    if isinstance(value, list | tuple):
        return type(value)(_without_surplus(item, repaired) for item in value)
    return value
