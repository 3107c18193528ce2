"""Holds the directory in which an export or an import is written until it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery import durable
from bloomery.errors import CheckpointError


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
