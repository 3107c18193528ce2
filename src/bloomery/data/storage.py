"""Writes a dataset's files durably under a lock, and shares large arrays between a node's processes.

Errors carry a remedy. One process computes the file of a large array, and all processes map it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery import durable
from bloomery.errors import StorageError, storage_error

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 3600.0


@contextmanager
def as_storage_error(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names `path` and says what to do."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path=path, doing="Writing data") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file durably: afterwards it is there whole, or not at all. Raises StorageError."""
    with as_storage_error(path):
        durable.write_whole(path, content)


@contextmanager
def open_new(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing as `durable.open_new` does; what the disk refuses is a StorageError.

    A BrokenPipeError is not the disk's: whoever was told of the work is gone.
    """
    try:
        with durable.open_new(path) as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise storage_error(error, path=path, doing="Writing data") from error


@contextmanager
def locked_directory(directory: Path, *, name: str) -> Iterator[int]:
    """Hold a directory's lock, which the kernel releases when its holder and all its heirs have ended.

    Yields the descriptor of the lock's file, which names the holder. Other processes log whom they wait for,
    and get a StorageError that names the holder after an hour.
    """
    path = directory / name
    owner = f"process {os.getpid()} on {os.uname().nodename}"

    def say(holder: str) -> None:
        log.warning(
            "waiting for %s, which works in %s (at most %.0f s)",
            holder or "another process",
            directory,
            _LOCK_TIMEOUT_S,
        )

    with ExitStack() as stack:
        try:
            with as_storage_error(path):
                lock = durable.locked(path, owner=owner, timeout_s=_LOCK_TIMEOUT_S, on_wait=say)
                file = stack.enter_context(lock)
        except durable.LockHeld as held:
            raise StorageError(
                f"Waited {_LOCK_TIMEOUT_S:.0f} s for {held.owner or 'another process'}, which works in "
                f"{directory}.",
                remedy=f"Find out what holds {path} (fuser -v), or choose another directory.",
            ) from held
        yield file


Arrays = dict[str, npt.NDArray[Any]]
Shapes = Mapping[str, tuple[int, npt.DTypeLike]]
"""The length and the type of each array, by name."""

AT_LEAST_BYTES = 32 << 20
"""The size from which arrays are shared by files; computing smaller ones takes no longer than reading."""
_PATIENCE_S = 3600.0
_KEPT_FILES = 4
_READ_BYTES = 1 << 20
_ALIGNMENT = 64


def shared_arrays(directory: Path | None, key: str, shapes: Shapes, fill: Callable[[Arrays], None]) -> Arrays:
    """Return the arrays that `fill` writes: computed before and read-only, or else computed now.

    directory: where they are kept; None keeps none. key: names all that they depend on. A file whose bytes
    are not those that were written is made again. While one process computes, the others wait for it. Where
    the directory cannot be written to, or has no room, each process computes them in its own memory.
    """
    if directory is None or _end_of(shapes) < AT_LEAST_BYTES:
        return _in_memory(shapes, fill)
    try:
        durable.make_directory(directory)
        with durable.locked(
            directory / "lock", owner=f"process {os.getpid()}", timeout_s=_PATIENCE_S, on_wait=_tell_of_wait
        ):
            path = directory / f"{key}.arrays"
            if not _is_whole(path, shapes):
                _write(path, shapes, fill)
                _remove_old(directory)
            return _mapped(path, shapes, mode="r")
    except (OSError, durable.LockHeld) as error:
        log.warning("the order of samples is computed in memory: %s cannot keep it: %s", directory, error)
        return _in_memory(shapes, fill)


def digest_of(parts: Sequence[npt.NDArray[Any]], facts: str, *, at_once: int = 1 << 20) -> str:
    """Return a name for arrays that depend on these parts and facts."""
    digest = xxhash.xxh3_128(facts.encode())
    for part in parts:
        for start in range(0, len(part), at_once):
            digest.update(np.ascontiguousarray(part[start : start + at_once]).data)
    return digest.hexdigest()


def _in_memory(shapes: Shapes, fill: Callable[[Arrays], None]) -> Arrays:
    arrays: Arrays = {name: np.empty(size, dtype) for name, (size, dtype) in shapes.items()}
    fill(arrays)
    return arrays


def _write(path: Path, shapes: Shapes, fill: Callable[[Arrays], None]) -> None:
    size = _end_of(shapes)
    if shutil.disk_usage(path.parent).free < size:
        raise OSError(28, f"{size:,} bytes do not fit on its disk")
    durable.remove_drafts(path.parent)
    draft, record = path.with_name(f".{path.name}.draft"), path.with_suffix(".json")
    record.unlink(missing_ok=True)
    with durable.open_new(draft) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a hole that finds no room later would kill the process
        arrays = _mapped(draft, shapes, mode="r+")
        fill(arrays)
        for array in arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
    durable.replace(draft, path)
    durable.write_whole(record, json.dumps({"bytes": size, "xxh3_128": _digest(path)}))


def _is_whole(path: Path, shapes: Shapes) -> bool:
    try:
        record = json.loads(path.with_suffix(".json").read_bytes())
        size = path.stat().st_size
        return bool(size == record["bytes"] == _end_of(shapes) and _digest(path) == record["xxh3_128"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _mapped(path: Path, shapes: Shapes, *, mode: Any) -> Arrays:  # Any: one of NumPy's literals
    arrays: Arrays = {}
    for name, (begin, size, dtype) in _places(shapes).items():
        if size:
            arrays[name] = np.memmap(path, dtype=dtype, mode=mode, offset=begin, shape=(size,))
        else:
            arrays[name] = np.empty(0, dtype)
    return arrays


def _places(shapes: Shapes) -> dict[str, tuple[int, int, np.dtype[Any]]]:
    """Return (first byte, length, type) of each array in the file."""
    places, begin = {}, 0
    for name, (size, kind) in shapes.items():
        dtype = np.dtype(kind)
        places[name] = (begin, size, dtype)
        begin += -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places


def _end_of(shapes: Shapes) -> int:
    return max((begin + size * dtype.itemsize for begin, size, dtype in _places(shapes).values()), default=0)


def _remove_old(directory: Path) -> None:
    """Leave the newest files; a process that has mapped an older one keeps what it mapped."""
    kept = sorted(directory.glob("*.arrays"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[_KEPT_FILES:]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)


def _tell_of_wait(owner: str) -> None:
    log.info("waiting for %s, which computes the order of the samples", owner)
