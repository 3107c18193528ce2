"""Reads JSON files of Hugging Face directories, and makes the locked .partial directory of an export."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from bloomery import durable
from bloomery.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:  # Any: values of JSON
    """Return the JSON object in a file. Raises CheckpointError for anything else."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        refuse_damaged(path, f"cannot be read: {error.strerror}", error)
    except (ValueError, RecursionError) as error:
        refuse_damaged(path, f"is not JSON in UTF-8: {error}", error)
    if not isinstance(content, dict):
        refuse_damaged(path, f"holds a {type(content).__name__}, not an object")
    return content


def refuse_damaged(path: Path, problem: str, error: Exception | None = None) -> NoReturn:
    """Raise CheckpointError for a file that is not what its directory needs. problem: a phrase after its
    path.
    """
    raise CheckpointError(f"{path} {problem}.", remedy="Fetch or copy the directory again.") from error


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """Yield TARGET.partial, empty and locked; the block renames it, or what it wrote is removed.

    What a killed process left in it is removed, because its lock ended with it. Raises CheckpointError where
    a process that is alive writes there.
    """
    partial = target.with_name(target.name + ".partial")
    durable.make_directory(partial)
    opened = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not durable.try_lock(opened):
            raise CheckpointError(
                f"Another process writes to {partial} now.",
                remedy="Wait for it, or choose another directory.",
            )
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already if it was renamed
    finally:
        os.close(opened)
