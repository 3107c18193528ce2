"""Tracks checkpoint parts in the memory of the nodes, and makes the newest complete set of them readable.

A replica is one rank's part of a checkpoint: a file in a memory file system, and a JSON label beside it that
is written once the bytes are complete. A node holds the parts that its ranks staged, and those that they keep
for partners on other nodes. Replicas outlive the processes of a run, so a restart finds them; a lost node
takes its own with it. The next run on a node removes the replicas of runs that are gone.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import xxhash

from bloomery import durable
from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    Manifest,
    checkpoint_name,
    index_bytes,
    manifest_text,
)
from bloomery.checkpoint.format.source import LOCAL_WINDOW_BYTES
from bloomery.checkpoint.writer.leftover_memory import OWNER, free_left_over, memory_directory
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.events.incarnation import Base

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 60.0
"""Other processes lock the owner file only while they read it."""
SLOTS = 2
"""Replicas of one rank in one directory: the newest complete one, and the one being written."""


@dataclass(frozen=True, kw_only=True)
class MemoryReplica:
    """One rank's part of a checkpoint, in this node's memory.

    path: the file with the part's bytes. offsets: where in it each of the part's data files begins, by name.
    world: how many ranks the checkpoint has parts of. time: of the save, seconds since 1970.
    """

    path: Path
    step: int
    incarnation: int
    rank: int
    world: int
    time: float
    part: Part
    offsets: Mapping[str, int]
    values: Mapping[str, Any]  # Any: JSON
    about: Mapping[str, Any]  # Any: JSON

    @property
    def base(self) -> Base:
        """(step, incarnation) of the checkpoint."""
        return self.step, self.incarnation

    @property
    def held_part(self) -> HeldPart:
        """Which part of which checkpoint it is."""
        return HeldPart(self.step, self.incarnation, self.world, self.rank)

    def to_json(self, *, with_values: bool = True) -> dict[str, Any]:
        """Return the label, which lies beside the bytes, as JSON.

        with_values: whether with the values and facts of the checkpoint, which all its parts have.
        """
        less: dict[str, Any] = {} if with_values else {"values": {}, "about": {}}
        return {**vars(self), "path": str(self.path), "part": self.part.to_json(), **less}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MemoryReplica:
        """Return what `to_json` wrote."""
        part = Part.from_json(content["part"])
        return cls(**{**content, "path": Path(content["path"]), "part": part})


class MemoryReplicas:
    """The replicas of one run in one node's memory.

    root: a directory of a memory file system. run: the run directory.
    identity: distinguishes the run from another that was at the same path before (see `events.incarnation`).
    """

    def __init__(self, root: Path, run: Path, identity: str) -> None:
        self._run, self._identity = run.resolve(), identity
        self.directory = memory_directory(root, self._run, identity)
        self._held: int | None = None

    def slot(self, owner: int, number: int, *, keeper: int | None = None) -> Path:
        """Return the path of one of the SLOTS of rank `owner`.

        keeper: the partner rank that keeps it for `owner`; None for what the owner staged itself.
        """
        whose = f"rank-{owner:05d}" if keeper is None else f"rank-{owner:05d}-by-{keeper:05d}"
        return self.directory / f"{whose}-{number}"

    def create(self) -> None:
        """Create the directory, readable only for this user, and lock it until `release`. Raises OSError."""
        if self._held is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.directory / OWNER
        if not owner.exists():
            durable.write_whole_unsynced(
                owner, json.dumps({"run": str(self._run), "identity": self._identity})
            )
        self._held = os.open(owner, os.O_RDONLY | os.O_CLOEXEC)
        if not durable.wait_for_lock(self._held, shared=True, timeout_s=_LOCK_TIMEOUT_S):
            raise TimeoutError(
                errno.ETIMEDOUT, f"locked by another process for {_LOCK_TIMEOUT_S:.0f} s", str(owner)
            )

    def release(self) -> None:
        """Unlock the directory: it may be removed once its run is gone."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def sweep(self) -> list[Path]:
        """Free what other runs have left on this node; return it: see `free_left_over`."""
        return free_left_over(self.directory.parent, but=self.directory)

    def remove(self, rank: int) -> None:
        """Remove what a rank staged and what it kept for partners, once its run has ended well."""
        for pattern in (f"rank-{rank:05d}-[0-9]*", f"*-by-{rank:05d}-*"):
            for path in self.directory.glob(pattern):
                path.unlink(missing_ok=True)
        try:
            if not any(self.directory.glob("rank-*")):
                (self.directory / OWNER).unlink(missing_ok=True)
            self.directory.rmdir()
        except OSError:  # other ranks of this node still have theirs
            return

    def keep_only(self, owners: Iterable[int], kept: Iterable[tuple[int, int]]) -> list[Path]:
        """Remove the replicas of other ranks, which were on this node before; return them. Raises no error.

        After a restart ranks may be on other nodes, or fewer: what they left would take as much memory again.
        owners: the ranks on this node. kept: (owner, keeper) of what they keep for partners.
        """
        slots = [self.slot(owner, number) for owner in owners for number in range(SLOTS)]
        slots += [self.slot(owner, number, keeper=by) for owner, by in kept for number in range(SLOTS)]
        wanted = {path.name for slot in slots for path in (slot, label_of(slot))}
        others = [path for path in sorted(self.directory.glob("rank-*")) if path.name not in wanted]
        for path in others:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return others

    def complete(self) -> list[MemoryReplica]:
        """Return the replicas whose bytes are complete, sorted by path."""
        replicas = (read_replica(path) for path in sorted(self.directory.glob("rank-*.json")))
        return [replica for replica in replicas if replica is not None]


def label_of(slot: Path) -> Path:
    """Return the path of a slot's label."""
    return slot.with_name(slot.name + ".json")


def read_replica(label: Path) -> MemoryReplica | None:
    """Return the replica that a label describes; None where there is none, or the label is invalid."""
    try:
        replica = MemoryReplica.from_json({**json.loads(label.read_bytes()), "path": label.with_suffix("")})
        return replica if replica.path.is_file() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s was ignored: %s", label, error)
        return None


def write_label(replica: MemoryReplica) -> None:
    """Write the label that says that a slot's bytes are complete. Raises OSError."""
    durable.write_whole_unsynced(label_of(replica.path), json.dumps(replica.to_json()))


def remove_label(slot: Path) -> None:
    """Remove a slot's label, before its bytes change. Raises OSError."""
    label_of(slot).unlink(missing_ok=True)


class HeldPart(NamedTuple):
    """Which part of which checkpoint a replica holds. Ranks tell each other this, and labels only of what is
    taken: the labels of all replicas of hundreds of ranks are gigabytes.
    """

    step: int
    incarnation: int
    world: int
    rank: int

    @property
    def base(self) -> Base:
        """(step, incarnation) of the checkpoint."""
        return self.step, self.incarnation


def newest_complete(parts_by_rank: Iterable[Iterable[HeldPart]], allowed: Iterable[Base]) -> list[HeldPart]:
    """Return the parts, by rank, of the newest checkpoint of which every part is in some node's memory.

    Empty where no checkpoint is complete.
    parts_by_rank: the parts that each of today's ranks finds on its node.
    allowed: the checkpoints that belong to the run.
    """
    permitted = set(allowed)
    ranks_of: dict[tuple[Base, int], set[int]] = {}
    for part in {part for parts in parts_by_rank for part in parts if part.base in permitted}:
        ranks_of.setdefault((part.base, part.world), set()).add(part.rank)
    complete = [key for key, ranks in ranks_of.items() if ranks == set(range(key[1]))]
    if not complete:
        return []
    (step, incarnation), world = max(complete)
    return [HeldPart(step, incarnation, world, rank) for rank in range(world)]


def partners_of(hosts: Sequence[str]) -> list[int]:
    """Return each rank's partner, which keeps a replica of its part: the rank in its place on the next node.

    On a single node it is the next rank; such replicas survive the loss of a process, but not of the node.
    hosts: the node of each rank, by a text that no other node has.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    if len(nodes) == 1:
        return [(rank + 1) % len(hosts) for rank in range(len(hosts))]
    names = list(nodes)
    partners = []
    for rank, host in enumerate(hosts):
        place, following = nodes[host].index(rank), nodes[names[(names.index(host) + 1) % len(names)]]
        partners.append(following[place % len(following)])
    return partners


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A complete checkpoint in memory. readers: for each data file, the ranks that have it on their node."""

    base: Base
    source: MemorySource
    readers: Mapping[str, Sequence[int]]


def find_in_memory(
    replicas: MemoryReplicas, ranks: Ranks, visible: Callable[[Iterable[Base]], Collection[Base]]
) -> InMemory | None:
    """Return the newest checkpoint of which every part is in some node's memory; None for none. Collective.

    visible: returns those checkpoints that belong to the run; called on the first rank.
    """
    local = replicas.complete()
    gathered = ranks.gather([replica.held_part for replica in local])
    parts_by_rank = [{HeldPart(*part) for part in parts} for parts in gathered]
    bases = {part.base for parts in parts_by_rank for part in parts}
    allowed = {
        (step, incarnation) for step, incarnation in ranks.run_on_first(lambda: sorted(visible(bases)))
    }
    chosen = newest_complete(parts_by_rank, allowed)
    if not chosen:
        return None
    seen_by = {part: [rank for rank, parts in enumerate(parts_by_rank) if part in parts] for part in chosen}
    own = {replica.held_part: replica for replica in reversed(local) if replica.held_part in seen_by}
    tells = [part for part in own if ranks.rank == _teller(part, seen_by[part])]
    told = ranks.gather([own[part].to_json(with_values=part.rank == 0) for part in tells])
    labels = [MemoryReplica.from_json(label) for listed in told for label in listed]
    labels.sort(key=lambda replica: replica.rank)
    readers = {file.name: seen_by[replica.held_part] for replica in labels for file in replica.part.files}
    base, local_parts = chosen[0].base, list(own.values())
    return InMemory(base=base, source=MemorySource(labels, local_parts), readers=readers)


def _teller(part: HeldPart, seen_by: Sequence[int]) -> int:
    """Return the rank that tells the others the label of a part: its own, or one of those on a node."""
    return part.rank if part.rank in seen_by else seen_by[part.rank % len(seen_by)]


class MemorySource:
    """A checkpoint in memory, as a `source.Source`.

    Index and manifest are made from the labels of all parts; bytes can be read of the parts on this node.
    parts: one replica of each part, in the order of the ranks. here: those on this node.
    """

    def __init__(self, parts: Sequence[MemoryReplica], local: Sequence[MemoryReplica]) -> None:
        first = parts[0]
        self.name = checkpoint_name(first.step, first.incarnation)
        files = [file for part in parts for file in part.part.files]
        index = index_bytes((box for part in parts for box in part.part.boxes), files)
        manifest = Manifest(
            step=first.step,
            incarnation=first.incarnation,
            time=first.time,
            world=first.world,
            about=first.about,
            values=first.values,
            files=tuple(replace(file, blocks="") for file in files),
            index_bytes=len(index),
            index_xxh3_128=xxhash.xxh3_128_hexdigest(index),
        )
        self._contents = {INDEX: index, MANIFEST: manifest_text(manifest).encode()}
        self._sizes = {file.name: file.bytes for file in files}
        self._places = {
            file.name: (replica.path, replica.offsets[file.name], file.bytes)
            for replica in local
            for file in replica.part.files
        }

    def place(self, file: str = "") -> str:
        """Return where a file, or the checkpoint itself, is."""
        if file in self._places:
            return f"{self._places[file][0]} ({file})"
        return f"{self.name} in memory" + (f" ({file})" if file else "")

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of the index or the manifest."""
        if file not in self._contents:
            raise FileNotFoundError(file)
        return self._contents[file][:at_most]

    def size(self, file: str) -> int:
        """Return a file's bytes."""
        return len(self._contents[file]) if file in self._contents else self._sizes[file]

    def open(self, file: str) -> _FileRange:
        """Open a file that is in this node's memory. Raises FileNotFoundError for any other."""
        if file not in self._places:
            raise FileNotFoundError(file)
        path, offset, bytes = self._places[file]
        return _FileRange(path, offset=offset, bytes=bytes)


class _FileRange:
    """A range of a file, as `source.RangedFile`."""

    window_bytes = LOCAL_WINDOW_BYTES

    def __init__(self, path: Path, *, offset: int, bytes: int) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset, self._bytes = offset, bytes

    def read_into(self, views: Sequence[memoryview], *, begin: int) -> int:
        position = begin
        for view in views:
            wanted = min(len(view), self._bytes - position)
            filled = 0
            while filled < wanted:
                count = os.preadv(self._file, [view[filled:wanted]], self._offset + position + filled)
                if count == 0:
                    return position + filled - begin
                filled += count
            position += filled
        return position - begin

    def __enter__(self) -> _FileRange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
