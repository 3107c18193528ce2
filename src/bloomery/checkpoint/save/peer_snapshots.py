"""Copies the run's state into checkpoints in memory (tmpfs), for joining peers to download."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from bloomery.checkpoint.format.state import StateSnapshot
from bloomery.checkpoint.save.saver import Saver
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.checkpoint import CheckpointSection
from bloomery.durable import hold_directory, remove_abandoned
from bloomery.errors import StorageError, storage_error

log = logging.getLogger(__name__)

_PREFIX = "bloomery-offered-"


class PeerSnapshots:
    """The snapshots of one run, in a directory of a memory file system below `root`.

    The directory is created for the first snapshot, and locked while its process lives. Those that killed
    processes left, of this run or of any other beside it, are removed when this object is made and at the
    first snapshot, since each takes as much memory as a state.

    `add` is collective over the ranks. The owner of this object holds the run directory.
    """

    def __init__(self, root: Path, run: Path, ranks: Ranks) -> None:
        name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        self.directory = root / f"{_PREFIX}{name}"
        self._ranks = ranks
        self._offered = 0
        self._held: int | None = None
        self._saver: Saver | None = None
        if ranks.is_first:
            self._remove_abandoned()

    def add(self, snapshot: StateSnapshot) -> Path | None:
        """Write a snapshot, and return the new checkpoint's directory.

        Returns None, and logs a warning, where there is not enough memory. Each snapshot has a directory of
        its own, because two of them may have the same step: this peer may take part in a round without a
        step.
        """
        self._offered += 1
        place = self.directory / f"{self._offered}"
        try:
            saved = self._ensure_saver().save(snapshot)
            self._ranks.run_on_first(lambda: _move(saved, place))
        except StorageError as refused:
            log.warning("joining peers cannot fetch the state of step %d here: %s", snapshot.step, refused)
            return None
        return place / saved.name

    def remove(self, directory: Path) -> None:
        """Remove a snapshot that `add` returned. Not collective, but every rank calls it."""
        if self._ranks.is_first:
            shutil.rmtree(directory.parent, ignore_errors=True)

    def close(self) -> None:
        """Remove the snapshots and release the directory. Not collective."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None
            if self._ranks.is_first:
                shutil.rmtree(self.directory, ignore_errors=True)
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def _ensure_saver(self) -> Saver:
        if self._saver is None:
            self._ranks.run_on_first(self._create)
            section = CheckpointSection(background="off")
            self._saver = Saver(
                self.directory, self._ranks, section, committed=lambda name, steps: None, intact=None
            )
        return self._saver

    def _create(self) -> None:
        """Create the empty directory, readable only for this user, and lock it. Raises StorageError."""
        try:
            self._remove_abandoned()
            self.directory.mkdir(mode=0o700, parents=True)
            self._held = hold_directory(self.directory)
        except OSError as error:
            raise storage_error(error, path=self.directory, doing="Taking memory for newcomers") from error

    def _remove_abandoned(self) -> None:
        """Remove what an earlier life of this run left, and old directories of others that nobody locks."""
        shutil.rmtree(self.directory, ignore_errors=True)
        remove_abandoned(self.directory.parent, _PREFIX)


def _move(saved: Path, place: Path) -> None:
    """Move a checkpoint into a directory that is not there yet. Raises StorageError."""
    try:
        place.mkdir(mode=0o700)
        saved.rename(place / saved.name)
    except OSError as error:
        shutil.rmtree(saved, ignore_errors=True)  # the next snapshot of this step would be taken for saved
        raise storage_error(error, path=place, doing="Taking memory for newcomers") from error
