"""Parts of checkpoints that lie in memory: what a rank staged itself, and what it keeps for a partner.

A holding is a file of a memory file system and a JSON beside it, written once its bytes are whole. It
outlives the processes of a run, so that a restart finds it; a node that is lost takes its own with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.checkpoint.commit import Part
from bloomery.events.incarnation import Base

log = logging.getLogger(__name__)

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
    """What lies in one node's memory of one run. root: a directory of a memory file system."""

    def __init__(self, root: Path, run: Path) -> None:
        name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        self.directory = root / f"bloomery-{name}"

    def slot(self, owner: int, number: int, *, keeper: int | None = None) -> Path:
        """Return the path of one of a rank's SLOTS; keeper: the partner who keeps it for `owner`."""
        whose = f"rank-{owner:05d}" if keeper is None else f"rank-{owner:05d}-by-{keeper:05d}"
        return self.directory / f"{whose}-{number}"

    def create(self) -> None:
        """Make the directory, for this user alone. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove(self, rank: int) -> None:
        """Let go of what a rank staged and kept, when its run has ended well."""
        for pattern in (f"rank-{rank:05d}-[0-9]*", f"*-by-{rank:05d}-*"):
            for path in self.directory.glob(pattern):
                path.unlink(missing_ok=True)
        try:
            self.directory.rmdir()
        except OSError:  # other ranks of this node still have theirs
            return

    def listed(self) -> list[Holding]:
        """Return what is whole, sorted by path."""
        found = (read_holding(path) for path in sorted(self.directory.glob("rank-*.json")))
        return [holding for holding in found if holding is not None]


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
