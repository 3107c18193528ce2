"""Copies of a run's state in memory, as whole checkpoints that other peers may fetch."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

from bloomery.checkpoint.ranks import Ranks
from bloomery.checkpoint.saving import Saver, Snapshot
from bloomery.config.keeping import CheckpointSection
from bloomery.errors import StorageError
from bloomery.events.storage import storage_error

log = logging.getLogger(__name__)

KEPT = 2
"""The newest, and the one before, which somebody may still be reading."""


class Offers:
    """Checkpoints of one run in a memory file system below `root`, made when the first is offered.

    Methods are collective over the ranks, but for `close`.
    """

    def __init__(self, root: Path, run: Path, ranks: Ranks) -> None:
        name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        self.directory = root / f"bloomery-offers-{name}"
        self._ranks = ranks
        self._offered = 0
        self._kept: list[Path] = []
        self._saver: Saver | None = None

    def offer(self, snapshot: Snapshot) -> Path | None:
        """Make a copy, and forget the last but one. None, and a warning, where there is no room.

        Each copy has a directory of its own: rounds may pass without a step of this peer's, and then the
        state of another round has the same step.
        """
        self._offered += 1
        place = self.directory / f"{self._offered}"
        try:
            saved = self._made().save(snapshot)
            self._ranks.first(lambda: _move(saved, place))
        except StorageError as refused:
            log.warning("newcomers cannot fetch the state of step %d here: %s", snapshot.step, refused)
            return None
        self._kept.append(place)
        while len(self._kept) > KEPT:
            old = self._kept.pop(0)
            if self._ranks.is_first:
                shutil.rmtree(old, ignore_errors=True)
        return place / saved.name

    def close(self) -> None:
        """Let the memory go."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None
            if self._ranks.is_first:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _made(self) -> Saver:
        if self._saver is None:
            self._ranks.first(self._create)
            at_once = CheckpointSection(background="off")
            self._saver = Saver(self.directory, self._ranks, at_once, committed=lambda name, steps: None)
        return self._saver

    def _create(self) -> None:
        """An empty directory, for this user alone. Raises StorageError."""
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise storage_error(error, path=self.directory, doing="Taking memory for newcomers") from error


def _move(saved: Path, place: Path) -> None:
    """Move a checkpoint into a directory that is not there yet. Raises StorageError."""
    try:
        place.mkdir(mode=0o700)
        saved.rename(place / saved.name)
    except OSError as error:
        raise storage_error(error, path=place, doing="Taking memory for newcomers") from error
