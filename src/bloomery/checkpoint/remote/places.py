"""Begins incarnations, and lists, marks and removes checkpoints, in the run directory or in a bucket.

The first rank uses it; `checkpoint/save` does the saving itself. A checkpoint in object storage has an entry
`checkpoints/NAME` in the run directory, with a copy of the manifest and the URL, so that code which lists,
judges or shows checkpoints treats both kinds alike.

A run is backed up to all places that its recipe names: each at its own pace, with its own contents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Protocol

from bloomery import durable
from bloomery.checkpoint.format.catalogue import PLACES, CommittedCheckpoint, checkpoints
from bloomery.checkpoint.format.commit import partial_directory, remove_checkpoint, sweep
from bloomery.checkpoint.format.manifest import MANIFEST, parse_name
from bloomery.checkpoint.format.source import (
    CHECKPOINTS,
    RemoteCheckpoint,
    Source,
    is_stored_elsewhere,
    source_of,
    stored_url,
)
from bloomery.checkpoint.format.suspects import SUSPECT, refuse_if_only_suspects
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.backup_duty import due
from bloomery.checkpoint.remote.remote_run import (
    log_backup_used,
    place_at,
    remote_incarnations,
    upload_run_files,
)
from bloomery.checkpoint.writer.store_place import SAVING, enter_stored
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.config.environment import OfflineRefused
from bloomery.config.recipe import Recipe
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import Base, begin, merge_records
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects, storage_failure

log = logging.getLogger(__name__)


class RunStorage(Protocol):
    """The checkpoints of one run, as its first rank sees them.

    url: of the run in object storage; "" for a run that keeps its checkpoints in its directory.
    """

    url: str

    def refresh(self) -> None:
        """Remove what interrupted saves left, and list what other nodes saved. Called at each restore.

        Raises StorageError, and CheckpointError where the place holds another run's checkpoints.
        """

    def begin(self, *, base: Base | None, reason: str) -> int:
        """Begin the next incarnation; return its number. Raises StorageError. See `incarnation.begin`."""

    def source(self, name: str) -> Source:
        """Return a checkpoint, as every rank can read it."""

    def remove(self, directory: Path) -> None:
        """Remove a checkpoint, by its directory. Raises StorageError."""

    def mark(self, names: Sequence[str]) -> Sequence[str]:
        """Copy the suspect marks of these checkpoints to where the checkpoints are kept; return `names`.

        Raises StorageError.
        """

    def saved(self) -> None:
        """Do what follows a commit. Called in the save's thread."""


def run_storage(rundir: RunDirectory, section: CheckpointSection, *, run_name: str) -> RunStorage:
    """Return the storage of a run's checkpoints. Uses no network. Raises StorageError, CheckpointError."""
    url = store_url(section, run_name=run_name)
    return ObjectRunStorage(rundir, url) if url else LocalRunStorage(rundir)


def store_url(section: CheckpointSection, *, run_name: str) -> str:
    """Return the URL of a run in object storage; "" for a run that saves in its directory."""
    return f"{section.url.rstrip('/')}/{run_name}" if section.url else ""


class LocalRunStorage:
    """A run that keeps its checkpoints in its directory: see `RunStorage`."""

    url = ""

    def __init__(self, rundir: RunDirectory) -> None:
        self._rundir = rundir

    def refresh(self) -> None:
        """See `RunStorage`."""
        for leftover in sweep(self._rundir.checkpoints):
            log.info("removed an unfinished checkpoint: %s", leftover.name)

    def begin(self, *, base: Base | None, reason: str) -> int:
        """See `RunStorage`."""
        return begin(self._rundir, base=base, reason=reason)

    def source(self, name: str) -> Source:
        """See `RunStorage`."""
        return source_of(self._rundir.checkpoints / name)

    def remove(self, directory: Path) -> None:
        """See `RunStorage`."""
        remove_checkpoint(directory)

    def mark(self, names: Sequence[str]) -> Sequence[str]:
        """See `RunStorage`. The directories are the checkpoints."""
        return names

    def saved(self) -> None:
        """See `RunStorage`. Nothing follows."""


class ObjectRunStorage:
    """A run that saves straight to object storage; its nodes share no file system: see `RunStorage`.

    Incarnation records are created exclusively in the store before they are made here. So two machines that
    start the same run get different numbers, and what the earlier of them goes on to save is ignored.
    """

    def __init__(self, rundir: RunDirectory, url: str) -> None:
        self.url = url
        self._rundir, self._remote = rundir, place_at(url)

    def refresh(self) -> None:
        """See `RunStorage`. Afterwards the directory has an entry of each checkpoint of the store.

        Only what has a checkpoint's name is removed: people keep other things beside the checkpoints, and a
        console leaves an object for a folder.
        """
        sweep(self._rundir.checkpoints)
        entries = {path for path in self._rundir.checkpoints.glob("step-*") if is_stored_elsewhere(path)}
        with _as_storage_error("Looking for checkpoints"):
            records = remote_incarnations(self._remote)
            if entries and not records:
                self._refuse_empty(max(entries))
            merge_records(self._rundir, records)
            keys = {entry.key for entry in self._remote.entries(f"{CHECKPOINTS}/") if _name_in(entry.key)}
            notes = {entry.key for entry in self._remote.entries(f"{SAVING}/")}
            committed = {_name_in(key) for key in keys if key.endswith(f"/{MANIFEST}")}
            unfinished = {key for key in keys if _name_in(key) not in committed}
            for name in sorted({_name_in(key) for key in unfinished}):
                log.info("removed an unfinished checkpoint: %s", self._remote.place(f"{CHECKPOINTS}/{name}"))
            self._remote.delete_all(unfinished | notes)
            self._remote.remove_unfinished(f"{CHECKPOINTS}/")
            for name in sorted(committed):
                self._enter(name, is_marked=f"{CHECKPOINTS}/{name}/{SUSPECT}" in keys)
        for path in entries:
            if path.name not in committed:
                remove_checkpoint(path)

    def begin(self, *, base: Base | None, reason: str) -> int:
        """See `RunStorage`."""

        def claim(number: int, record: str) -> bool:
            return self._remote.create(f"incarnations/{number:06d}.json", record.encode())

        with _as_storage_error("Beginning an incarnation"):
            return begin(self._rundir, base=base, reason=reason, claim=claim)

    def source(self, name: str) -> Source:
        """See `RunStorage`."""
        return RemoteCheckpoint(self._remote, f"{CHECKPOINTS}/{name}")

    def remove(self, directory: Path) -> None:
        """See `RunStorage`. The manifest goes first: half removed, it must not count as a checkpoint."""
        with _as_storage_error("Removing an old checkpoint"):
            remove_stored(directory)

    def mark(self, names: Sequence[str]) -> Sequence[str]:
        """See `RunStorage`."""
        with _as_storage_error("Marking a checkpoint"):
            for name in names:
                mark = (self._rundir.checkpoints / name / SUSPECT).read_bytes()
                self._remote.put(f"{CHECKPOINTS}/{name}/{SUSPECT}", mark)
        return names

    def saved(self) -> None:
        """See `RunStorage`. Recipe and tokenizer are sent too: the URL is all that another node needs."""
        try:
            upload_run_files(self._rundir, self._remote)
        except OSError as error:  # the checkpoint is there, and the next save sends what is missing
            log.warning("the run's recipe is not beside its checkpoints: %s", error)

    def _refuse_empty(self, entry: Path) -> NoReturn:
        """Raise CheckpointError: a start that took the place for its run's would begin the run anew."""
        raise CheckpointError(
            f"{self.url} holds nothing of this run, which saved {entry.name} to {stored_url(entry)}",
            remedy="Is checkpoint.url as it was, and its disk mounted? To move a run, copy all that is at "
            "the old place first; to begin anew, choose another --run.",
        )

    def _enter(self, name: str, *, is_marked: bool) -> None:
        parsed, entry = parse_name(name), self._rundir.checkpoints / name
        if parsed is None:
            return
        prefix = f"{CHECKPOINTS}/{name}"
        mark = (SUSPECT, self._remote.content(f"{prefix}/{SUSPECT}")) if is_marked else None
        if (entry / MANIFEST).is_file() and not _is_of_another_place(entry, self._remote.place(prefix)):
            if mark is not None and not (entry / SUSPECT).exists():
                durable.write_whole(entry / SUSPECT, mark[1])
            return
        manifest = self._remote.content(f"{prefix}/{MANIFEST}")
        directory = partial_directory(self._rundir.checkpoints, step=parsed[0], incarnation=parsed[1])
        enter_stored(directory, manifest, url=self._remote.place(prefix), mark=mark)


def _is_of_another_place(entry: Path, url: str) -> bool:
    """Whether an entry leads elsewhere, as where the store was moved, or no longer says where."""
    try:
        return is_stored_elsewhere(entry) and stored_url(entry) != url
    except CheckpointError:
        return True


def _name_in(key: str) -> str:
    """Return the name of the checkpoint that an object is of; "" where it is of none."""
    name, _, file = key.removeprefix(f"{CHECKPOINTS}/").partition("/")
    return name if file and parse_name(name) is not None else ""


def remove_kept(directory: Path) -> None:
    """Remove a checkpoint of a run by its directory, wherever it is kept. Raises StorageError."""
    if is_stored_elsewhere(directory):
        with _as_storage_error("Removing an old checkpoint"):
            remove_stored(directory)
    else:
        remove_checkpoint(directory)


def remove_stored(directory: Path) -> None:
    """Remove a checkpoint that is in object storage, and its entry. Raises OSError, StorageError."""
    remote = Objects(stored_url(directory))
    if remote.exists(MANIFEST):
        remote.delete(MANIFEST)
    remote.delete_all(entry.key for entry in remote.entries())
    remove_checkpoint(directory)


def refuse_changed_url(rundir: RunDirectory, section: CheckpointSection) -> None:
    """Raise CheckpointError where a run has checkpoints at another place than the settings now say."""
    for checkpoint in checkpoints(rundir):
        if is_stored_elsewhere(checkpoint.directory) != bool(section.url):
            there = stored_url(checkpoint.directory) if not section.url else str(checkpoint.directory)
            raise CheckpointError(
                f"{checkpoint.name} of this run is kept at {there}, which checkpoint.url does not say",
                remedy="Keep checkpoint.url as it was. To move a run, copy its newest checkpoint to the new "
                "place with `bloomery ckpt copy`, and start with another --run.",
            )


@contextmanager
def _as_storage_error(doing: str) -> Iterator[None]:
    """Raise StorageError for an error of the store."""
    try:
        yield
    except OSError as error:
        raise storage_failure(error, doing=doing) from error


FIRST, SECOND = PLACES


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


class CombinedBackups:
    """The uploaders of one run to several places, used like one `Backup`: wakes, awaits, restores from all.

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

    def wake(self) -> None:
        """Wake all threads to look for checkpoints to upload. Does not wait."""
        for backup in self._backups:
            backup.wake()

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

        A place that cannot be reached, or that holds only the weights, is logged and passed over where
        another has something. What one place still shows may be left behind by a rewind that only another
        knows, or be suspect by a mark that only another bears.
        Raises StorageError, OfflineRefused and CheckpointError where none has.
        """
        copies: list[RemoteCheckpoint] = []
        failures: list[CheckpointError | StorageError | OfflineRefused] = []
        for backup in self._backups:
            try:
                copies += backup.restorable(instead_of=instead_of, up_to_step=up_to_step, warns=False)
            except (CheckpointError, StorageError, OfflineRefused) as error:
                failures.append(error)
        if failures and not copies:
            raise failures[0]
        for failure in failures:
            log.warning("a place of backups was passed over: %s", failure)
        found = self._newest_first(copies)
        if up_to_step is None and not found:
            refuse_if_only_suspects(sorted({copy.name for copy in copies} & self._marked()))
        log_backup_used(found, instead_of=instead_of)
        return found

    def newer(self) -> list[RemoteCheckpoint]:
        """Return the backups in all places that are newer than the newest local checkpoint, newest first."""
        return self._newest_first([copy for backup in self._backups for copy in backup.newer()])

    def close(self, *, wait_s: float | None = None) -> None:
        """Wait until everything is uploaded to every place, then stop the threads: see `Backup.close`."""
        for backup in self._backups:
            backup.close(wait_s=wait_s)

    def _marked(self) -> set[str]:
        return {name for backup in self._backups for name in backup.marked}

    def _newest_first(self, copies: Sequence[RemoteCheckpoint]) -> list[RemoteCheckpoint]:
        """Return one copy of each checkpoint of the run, the first place's where several have it.

        copies: of all places, which were listed before. One that any of them marks is left out: another may
        not have been reached since the mark was made.
        """
        by_name: dict[str, RemoteCheckpoint] = {}
        for copy in copies:
            by_name.setdefault(copy.name, copy)
        for name in self._marked():
            by_name.pop(name, None)
        names = sorted(by_name, key=lambda name: parse_name(name) or (0, 0), reverse=True)
        return self._backups[0].part_of_run(by_name[name] for name in names)
