"""Proves at a start on several nodes that the run directory is one directory, which all nodes see."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.errors import StorageError

SEEN_WITHIN_S = 20.0
"""For a file of one node to be seen by the others. File systems of clusters take far less."""
_POLL_S = 0.1


def prove_shared(
    directory: Path,
    *,
    rank: int,
    node: str,
    gather: Callable[[Any], list[Any]],  # Any: JSON
    within_s: float = SEEN_WITHIN_S,
) -> None:
    """Raise StorageError on every rank unless all nodes see each other's files in `directory`.

    The first rank of each node writes a file into a directory with a name of this start, and looks for the
    files of the other nodes. One node proves nothing and writes nothing. Collective over the peer.

    node: the name of this rank's machine. gather: returns what each rank passed, in the order of the ranks.
    """
    introductions = gather([node, secrets.token_hex(8)])
    first_ranks: dict[str, int] = {}
    for other, (name, _) in enumerate(introductions):
        first_ranks.setdefault(name, other)
    if len(first_ranks) == 1:
        return
    probe, speaks = directory / f".shared-{introductions[0][1]}", first_ranks[node] == rank
    _raise_first(gather(_write(probe, rank, node) if speaks else ""))
    failures = gather(_unseen(probe, node, first_ranks, within_s=within_s) if speaks else "")
    if speaks:
        shutil.rmtree(probe, ignore_errors=True)  # several nodes remove the same directory
    _raise_first(failures)


def _write(probe: Path, rank: int, node: str) -> str:
    """Write this node's file; return why it could not be written, "" where it was."""
    try:
        probe.mkdir(parents=True, exist_ok=True)
        durable.write_whole_unsynced(_file(probe, rank), node)
    except OSError as error:
        return f"node {node} cannot write to the run directory {probe.parent}: {error.strerror or error}"
    return ""


def _unseen(probe: Path, node: str, first_ranks: Mapping[str, int], *, within_s: float) -> str:
    """Wait for the files of all nodes; return what this node does not see, "" where it sees all."""
    deadline = time.monotonic() + within_s
    missing = {name: _file(probe, rank) for name, rank in first_ranks.items()}
    while True:
        missing = {name: path for name, path in missing.items() if not path.exists()}
        if not missing:
            return ""
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    names = ", ".join(sorted(missing)[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return (
        f"{probe.parent} is not one directory on all nodes: node {node} does not see what {names} wrote there"
    )


def _file(probe: Path, rank: int) -> Path:
    return probe / f"{rank:05d}"


def _raise_first(failures: list[str]) -> None:
    failure = next((text for text in failures if text), "")
    if failure:
        raise StorageError(
            failure,
            remedy="Put the run directory on a file system that every node mounts at this path.",
        )
