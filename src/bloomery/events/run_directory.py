"""The run directory: the paths of its files, and the proof that all nodes of a run see the same directory."""

from __future__ import annotations

import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.errors import StorageError, storage_error
from bloomery.events.machine import machine_id

CONTROLS = ("save", "stop", "skip", "rewind", "set")


@dataclass(frozen=True)
class RunDirectory:
    """The paths of the files of one run. Only `create` touches the disk."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def create(self) -> RunDirectory:
        """Make the directories that are missing and return self. Raises StorageError."""
        for directory in (
            self.incarnations,
            self.checkpoints,
            self.control_dir,
            self.logs,
            self.tensorboard,
            self.path / "journal",
            self.path / "heartbeat",
        ):
            try:
                durable.make_directory(directory)
            except OSError as error:
                raise storage_error(error, path=directory, doing="Making the run directory") from error
        return self

    @property
    def name(self) -> str:
        """The directory's own name, also where it was given as `.` or `..`."""
        name = self.path.absolute().name  # a link's own name stays
        return self.path.resolve().name if name == ".." else name

    def as_word(self) -> str:
        """The path as one word of a shell, for a command that a message names."""
        return shlex.quote(str(self.path))

    def exists(self) -> bool:
        """Whether a run was started in this directory, finished or not."""
        return self.recipe.exists() or self.incarnations.is_dir()

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def sources(self) -> Path:
        """The file that says where each value of the recipe came from."""
        return self.path / "sources.toml"

    @property
    def incarnations(self) -> Path:
        """The directory with one file for each incarnation of the run."""
        return self.path / "incarnations"

    def incarnation(self, number: int) -> Path:
        """The file of one incarnation."""
        return self.incarnations / f"{number:06d}.json"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints, and of the `.partial` directories of unfinished ones."""
        return self.path / "checkpoints"

    @property
    def control_dir(self) -> Path:
        """The directory in which people and supervisors write requests."""
        return self.path / "control"

    @property
    def backups(self) -> Path:
        """The directory with a record of each checkpoint that has a verified copy elsewhere."""
        return self.path / "backups"

    def control(self, request: str) -> Path:
        """The file that makes a request. request: one of CONTROLS."""
        if request not in CONTROLS:
            raise ValueError(f"no such request: {request!r} (there are {', '.join(CONTROLS)})")
        return self.control_dir / request

    def journal(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The journal of the events that one rank wrote."""
        return self.path / "journal" / f"{peer}-{rank}.jsonl"

    @property
    def operations(self) -> Path:
        """The journal of the run's supervisors: attempts, and diagnoses of failures."""
        return self.path / "operations.jsonl"

    @property
    def watch(self) -> Path:
        """The file in which a watcher keeps open incidents, and the free space over time."""
        return self.path / "watch.json"

    @property
    def chronicle(self) -> Path:
        """The chronicle of the run, as Markdown."""
        return self.path / "chronicle.md"

    @property
    def evaluations(self) -> Path:
        """The journal of scores on tasks, written by `bloomery evaluate` beside the training."""
        return self.path / "evaluations.jsonl"

    @property
    def attention(self) -> Path:
        """The file in which a run keeps the kernel of attention that was the quickest when it began."""
        return self.path / "attention.json"

    @property
    def rounds(self) -> Path:
        """The journal of rounds that a peer's agent writes."""
        return self.path / "rounds.jsonl"

    @property
    def known(self) -> Path:
        """The file in which a peer's agent keeps the newest round and epoch that it knows."""
        return self.path / "known.json"

    def journals(self) -> list[Path]:
        """The journals of all ranks that have written one, sorted by name."""
        return sorted((self.path / "journal").glob("*.jsonl"))

    def heartbeat(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The file that says what one rank does, at which step and since when."""
        return self.path / "heartbeat" / f"{peer}-{rank}"

    def stacks(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The file into which SIGUSR2 makes one rank write the stacks of its threads."""
        return self.path / "stacks" / f"{peer}-{rank}.txt"

    @property
    def memory(self) -> Path:
        """The directory with what each rank's device held when its memory ran out."""
        return self.path / "memory"

    @property
    def lock(self) -> Path:
        """The empty file that the process which holds the run has locked."""
        return self.path / "holder.lock"

    @property
    def holder(self) -> Path:
        """The file that names the holder; its modification time is refreshed while the holder lives."""
        return self.path / "holder.json"

    @property
    def logs(self) -> Path:
        """The directory of the text logs of all processes."""
        return self.path / "logs"

    def log(self, *, host: str, rank: int) -> Path:
        """The text log of one process."""
        return self.logs / f"{host}-{rank}.log"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def profiles(self) -> Path:
        """The directory of what `log.profile_steps` recorded."""
        return self.path / "profiles"

    @property
    def data(self) -> Path:
        """The directory of the prepared tokenizer and datasets, unless the recipe puts them elsewhere."""
        return self.path / "data"

    @property
    def export(self) -> Path:
        """The directory of the exported model."""
        return self.path / "export"


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

    node: the name of this rank's machine. Ranks are of one node where the name, the machine itself and what
        lies at the directory's path are the same: clones of one image often have equal names.
    gather: returns what each rank passed, in the order of the ranks.
    """
    introductions = gather([node, f"{machine_id()} {_found_at(directory)}", secrets.token_hex(8)])
    nodes: dict[tuple[str, str], int] = {}
    for other, (name, seen, _) in enumerate(introductions):
        nodes.setdefault((name, seen), other)
    if len(nodes) == 1:
        return
    names = [name for name, _ in nodes]
    first_ranks = {
        name if names.count(name) == 1 else f"{name} (rank {first})": first
        for (name, _), first in nodes.items()
    }
    probe, speaks = directory / f".shared-{introductions[0][2]}", rank in first_ranks.values()
    node = next((name for name, first in first_ranks.items() if first == rank), node)
    failures = gather(_write(probe, rank, node) if speaks else "")
    if not any(failures):
        failures = gather(_unseen(probe, node, first_ranks, within_s=within_s) if speaks else "")
    if speaks:
        shutil.rmtree(probe, ignore_errors=True)  # several nodes remove the same directory
    _raise_first(failures)


def _found_at(directory: Path) -> str:
    """Return which directory lies at a path, or is the nearest above it, and what of the path is below it."""
    above, below = directory.absolute(), list[str]()
    while True:
        try:
            status = above.stat()
            return f"{status.st_dev}:{status.st_ino}/{'/'.join(reversed(below))}"
        except OSError:
            if above == above.parent:
                return ""
            below.append(above.name)
            above = above.parent


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
