"""Backs a run up to all places that its recipe names: each at its own pace, with its own contents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
from bloomery.checkpoint.format.manifest import parse_name
from bloomery.checkpoint.format.source import RemoteCheckpoint
from bloomery.checkpoint.remote.backup import Backup, due
from bloomery.config.checkpoint import BackupSection
from bloomery.config.recipe import Recipe
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)

FIRST, SECOND = "", "second"


def sections(recipe: Recipe) -> dict[str, BackupSection]:
    """Return the sections of the recipe that name a place, by the place's name (see `Backup`)."""
    named = {FIRST: recipe.backup, SECOND: recipe.second_backup}
    return {place: section for place, section in named.items() if section.url}


def waiting_for_copies(rundir: RunDirectory, recipe: Recipe) -> set[str]:
    """Return the names of the checkpoints that pruning leaves until they are copied somewhere."""
    return {
        checkpoint.name
        for place, section in sections(recipe).items()
        if section.prune_waits
        for checkpoint in due(rundir, section, run_name=recipe.run.name, place=place)
    }


class BackupPlaces:
    """The backups of one run to several places, used like one `Backup`.

    backups: one for each place, in the order in which they are asked for a checkpoint to go on from.
    """

    def __init__(self, backups: Sequence[Backup]) -> None:
        self._backups = tuple(backups)

    @property
    def on_all_copied(self) -> Callable[[], None]:
        """What `close` calls for each place to which nothing is due any more."""
        return self._backups[0].on_all_copied

    @on_all_copied.setter
    def on_all_copied(self, call: Callable[[], None]) -> None:
        for backup in self._backups:
            backup.on_all_copied = call

    def look(self) -> None:
        """Wake all threads to look for checkpoints to upload. Does not wait."""
        for backup in self._backups:
            backup.look()

    def due(self) -> list[CommittedCheckpoint]:
        """Return the checkpoints that are due to any place, oldest first."""
        return sorted({item for backup in self._backups for item in backup.due()})

    def in_use(self) -> list[CommittedCheckpoint]:
        """Return the checkpoints that must stay here for now, for any place."""
        return sorted({item for backup in self._backups for item in backup.in_use()})

    def restorable(
        self, *, instead_of: Collection[str] = (), up_to_step: int | None = None
    ) -> list[RemoteCheckpoint]:
        """Return the backups from which a run can go on, newest first: see `Backup.restorable`.

        A place that cannot be reached, or that holds the weights alone, is told and passed over where another
        has something. Raises StorageError and CheckpointError where none has.
        """
        copies: list[RemoteCheckpoint] = []
        failures: list[CheckpointError | StorageError] = []
        for backup in self._backups:
            try:
                copies += backup.restorable(instead_of=instead_of, up_to_step=up_to_step)
            except (CheckpointError, StorageError) as error:
                failures.append(error)
        if failures and not copies:
            raise failures[0]
        for failure in failures:
            log.warning("a place of backups was passed over: %s", failure)
        return _newest_first(copies)

    def newer(self) -> list[RemoteCheckpoint]:
        """Return the backups in all places that are newer than the newest local checkpoint, newest first."""
        return _newest_first(copy for backup in self._backups for copy in backup.newer())

    def close(self, *, wait_s: float | None = None) -> None:
        """Wait until everything is uploaded to every place, then stop the threads: see `Backup.close`."""
        for backup in self._backups:
            backup.close(wait_s=wait_s)


def _newest_first(copies: Iterable[RemoteCheckpoint]) -> list[RemoteCheckpoint]:
    """Return one copy of each checkpoint, the first place's where several have it."""
    by_name: dict[str, RemoteCheckpoint] = {}
    for copy in copies:
        by_name.setdefault(copy.name, copy)
    return [
        by_name[name] for name in sorted(by_name, key=lambda name: parse_name(name) or (0, 0), reverse=True)
    ]
