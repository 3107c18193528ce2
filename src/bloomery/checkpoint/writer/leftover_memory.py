"""Frees what runs have left in the memory of a node: of runs that are gone, or went on without the node."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.errors import CheckpointError
from bloomery.events.incarnation import current, identity
from bloomery.events.run_directory import RunDirectory

_PREFIX = "bloomery-"
OWNER = "run.json"
"""The file that says whose a directory is. The processes of the run have it locked while they run."""


def memory_directory(root: Path, run: Path, identity: str) -> Path:
    """Return the directory of a run in one node's memory.

    root: a directory of a memory file system. run: the run directory, resolved. identity: of the run.
    """
    name = hashlib.sha256(f"{run} {identity}".encode()).hexdigest()[:16]
    return root / f"{_PREFIX}{name}"


def free_memory_of(run: RunDirectory, root: Path) -> Path | None:
    """Remove a run's directory from this node's memory; return it.

    None where there is none, or a process has it locked. Called where the run goes on without this node.
    """
    directory = memory_directory(root, run.path.resolve(), identity(run))
    if not _asked_unlocked(directory, lambda owner: True):
        return None
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def free_left_over(root: Path, *, but: Path | None = None) -> list[Path]:
    """Remove the directories of runs that are gone, or have gone on without this node; return them.

    One that a process has locked stays, and so does `but`, that of the run which is about to start here.
    """
    gone = [
        path
        for path in sorted(root.glob(f"{_PREFIX}*"))
        if path != but and _asked_unlocked(path, partial(_is_left_over, path))
    ]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)  # another rank of this node sweeps, too
    return gone


def _asked_unlocked(directory: Path, ask: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Return what `ask` says of the directory's owner; False where a process has the directory locked."""
    try:
        file = os.open(directory / OWNER, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # another user's, or not one of ours
        return False
    try:
        return durable.try_lock(file) and ask(json.loads(os.pread(file, 1 << 16, 0)))
    except (OSError, CheckpointError, ValueError, KeyError, TypeError):  # it cannot be read: leave it alone
        return False
    finally:
        os.close(file)


def _is_left_over(directory: Path, owner: Mapping[str, Any]) -> bool:
    """Say whether the owner of a directory is gone, or has begun anew since, and not on this node.

    A start locks the directories of all its nodes, and its first saves are of the newest incarnation.
    """
    run = RunDirectory(Path(owner["run"]))
    if identity(run) != owner["identity"]:
        return True
    labels = [json.loads(path.read_bytes()) for path in directory.glob("rank-*.json")]
    return current(run) > max((int(label["incarnation"]) for label in labels), default=0)
