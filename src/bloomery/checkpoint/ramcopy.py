"""Parts of checkpoints that lie in memory: what a rank staged itself, and what it keeps for a partner.

A holding is a file of a memory file system and a JSON beside it, written once its bytes are whole. It
outlives the processes of a run, so that a restart finds it; a node that is lost takes its own with it.
What is left of runs that are gone, and of another run that was at the same path, is removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.checkpoint.commit import Part
from bloomery.events.incarnation import Base, identity
from bloomery.events.rundir import RunDir

log = logging.getLogger(__name__)

_PREFIX, _OWNER = "bloomery-", "run.json"
SLOTS = 2
"""Holdings of one rank at one place: the newest whole one, and the one that is being made."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One rank's part of a checkpoint, in memory here. offsets: where each of its files begins in `path`."""

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
        """The checkpoint that it is a part of."""
        return self.step, self.incarnation

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON: what lies beside its bytes."""
        return {**vars(self), "path": str(self.path), "part": self.part.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Holding:
        """Return what `to_json` wrote."""
        part = Part.from_json(content["part"])
        return cls(**{**content, "path": Path(content["path"]), "part": part})


class Holdings:
    """What lies in one node's memory of one run. root: a directory of a memory file system.

    identity: what tells the run from another that was at the same path (see `events.incarnation`).
    """

    def __init__(self, root: Path, run: Path, identity: str) -> None:
        self._run, self._identity = run.resolve(), identity
        name = hashlib.sha256(f"{self._run} {identity}".encode()).hexdigest()[:16]
        self.directory = root / f"{_PREFIX}{name}"
        self._held: int | None = None

    def slot(self, owner: int, number: int, *, keeper: int | None = None) -> Path:
        """Return the path of one of a rank's SLOTS; keeper: the partner who keeps it for `owner`."""
        whose = f"rank-{owner:05d}" if keeper is None else f"rank-{owner:05d}-by-{keeper:05d}"
        return self.directory / f"{whose}-{number}"

    def create(self) -> None:
        """Make the directory, for this user alone, and hold it until `release`. Raises OSError."""
        if self._held is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.directory / _OWNER
        if not owner.exists():
            new = owner.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"run": str(self._run), "identity": self._identity}))
            new.rename(owner)
        self._held = os.open(owner, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_SH)

    def release(self) -> None:
        """Hold it no longer: it may be swept once its run is gone."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def sweep(self) -> list[Path]:
        """Remove what lies beside it for runs that are gone and that nobody holds; return what went."""
        gone = [path for path in sorted(self.directory.parent.glob(f"{_PREFIX}*")) if _is_left_over(path)]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)  # another rank of this node sweeps, too
        return gone

    def remove(self, rank: int) -> None:
        """Let go of what a rank staged and kept, when its run has ended well."""
        for pattern in (f"rank-{rank:05d}-[0-9]*", f"*-by-{rank:05d}-*"):
            for path in self.directory.glob(pattern):
                path.unlink(missing_ok=True)
        try:
            if not any(self.directory.glob("rank-*")):
                (self.directory / _OWNER).unlink(missing_ok=True)
            self.directory.rmdir()
        except OSError:  # other ranks of this node still have theirs
            return

    def listed(self) -> list[Holding]:
        """Return what is whole, sorted by path."""
        found = (read_holding(path) for path in sorted(self.directory.glob("rank-*.json")))
        return [holding for holding in found if holding is not None]


def _is_left_over(directory: Path) -> bool:
    """Say whether a directory of holdings is of a run that is not there any more, and held by nobody."""
    try:
        file = os.open(directory / _OWNER, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # another user's, or not one of ours
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = json.loads(os.pread(file, 1 << 16, 0))
        return bool(identity(RunDir(Path(owner["run"]))) != owner["identity"])
    except (OSError, ValueError, KeyError, TypeError):  # it is held, or says nothing: not ours to take
        return False
    finally:
        os.close(file)


def label_of(slot: Path) -> Path:
    """Return the path of the JSON that says what a slot holds."""
    return slot.with_name(slot.name + ".json")


def read_holding(label: Path) -> Holding | None:
    """Return a holding by its label; None where there is none, or none that can be understood."""
    try:
        holding = Holding.from_json({**json.loads(label.read_bytes()), "path": label.with_suffix("")})
        return holding if holding.path.is_file() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s was passed over: %s", label, error)
        return None


def write_label(holding: Holding) -> None:
    """Say that a slot's bytes are whole. Raises OSError."""
    label = label_of(holding.path)
    new = label.with_suffix(".new")
    new.write_text(json.dumps(holding.to_json()))
    new.rename(label)


def remove_label(slot: Path) -> None:
    """Say that a slot's bytes will change. Raises OSError."""
    label_of(slot).unlink(missing_ok=True)


def newest_complete(everyones: Sequence[Iterable[Holding]], allowed: Iterable[Base]) -> list[Holding]:
    """Return one holding of each rank's part of the newest checkpoint that all parts are there of.

    everyones: the holdings that each rank of today sees. allowed: the checkpoints that are part of the run.
    Empty where no checkpoint is complete. Which ranks see a part is `readers_of`'s.
    """
    parts: dict[tuple[Base, int], dict[int, Holding]] = {}
    permitted = set(allowed)
    for holdings in everyones:
        for holding in holdings:
            if holding.base in permitted:
                parts.setdefault((holding.base, holding.world), {}).setdefault(holding.rank, holding)
    complete = [key for key, found in parts.items() if set(found) == set(range(key[1]))]
    if not complete:
        return []
    chosen = parts[max(complete)]
    return [chosen[rank] for rank in sorted(chosen)]


def partners_of(hosts: Sequence[str]) -> list[int]:
    """Return for each rank who keeps a copy of its part: the rank of its place on the next node.

    hosts: of each rank. On a single node it is the next rank, which survives the loss of a process alone.
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


def make_room(slot: Path) -> None:
    """Forget what a slot held, so that its memory can be used for something else. Raises OSError."""
    remove_label(slot)
    if slot.is_dir():
        shutil.rmtree(slot)
    slot.unlink(missing_ok=True)
