"""The checkpoints of a run: those that are part of it, and those that are not any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.manifest import MANIFEST, parse_name
from bloomery.checkpoint.verify import verify
from bloomery.events.incarnation import Base, read_incarnations, visible
from bloomery.events.rundir import RunDir


@dataclass(frozen=True, kw_only=True, order=True)
class Found:
    """A committed checkpoint. Ordered by step, then incarnation: the last is the newest."""

    step: int
    incarnation: int
    directory: Path

    @property
    def base(self) -> Base:
        """Its name, as incarnations refer to it."""
        return self.step, self.incarnation

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.name


def checkpoints(rundir: RunDir) -> tuple[Found, ...]:
    """Return the committed checkpoints that are part of the run, oldest first. Nothing is verified."""
    found = _committed(rundir)
    shown = visible((item.base for item in found), read_incarnations(rundir))
    return tuple(item for item in found if item.base in shown)


def abandoned_checkpoints(rundir: RunDir) -> tuple[Found, ...]:
    """Return the committed checkpoints that a later incarnation went back behind, oldest first."""
    found = _committed(rundir)
    shown = visible((item.base for item in found), read_incarnations(rundir))
    return tuple(item for item in found if item.base not in shown)


def newest_intact(found: Iterable[Found]) -> Found | None:
    """Return the newest of these whose every byte is right. Reads them, newest first, until one is."""
    return next((item for item in sorted(found, reverse=True) if not verify(item.directory)), None)


def _committed(rundir: RunDir) -> list[Found]:
    found = []
    for path in rundir.checkpoints.glob("step-*"):
        name = parse_name(path.name)
        if name is not None and (path / MANIFEST).is_file():
            found.append(Found(step=name[0], incarnation=name[1], directory=path))
    return sorted(found)
