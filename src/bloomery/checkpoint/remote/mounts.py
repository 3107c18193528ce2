"""Finds out whether the disk of a file:// place of backups is mounted, by where its earlier backups lay.

Where a disk is not mounted, its mount point is an empty directory of the root disk. Whoever writes below it
fills the root disk, and takes what is there for a backup. So a run records for each file:// place the mount
point of the file system that it lies on.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from bloomery import durable
from bloomery.checkpoint.format.catalogue import newest_copied
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.format.source import CHECKPOINTS
from bloomery.errors import StorageError, storage_error
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import directory_of

log = logging.getLogger(__name__)


def require_mounted(rundir: RunDirectory, url: str, *, place: str = "", records: bool = True) -> None:
    """Raise StorageError where a file:// place lay on a disk of its own that is not mounted now.

    place: see `Backup`. records: whether to record where the place lies now; the first time a warning is
    logged where that is the file system of the run itself.
    """
    if not url.startswith("file://"):
        return
    directory, record = directory_of(url), rundir.backups / f"mounts{place and '.'}{place}.json"
    known, now = _read(record), mount_point(directory)
    before = known.get(url, "")
    if before and Path(now) in Path(before).parents and not _holds_newest(rundir, url, directory):
        raise StorageError(
            f"{url} is not on the disk of its earlier backups: nothing is mounted at {before}",
            remedy=f"Mount the disk. To back up to the file system at {now} instead, remove {record}.",
        )
    if not records or before == now:
        return
    if not before and now == mount_point(rundir.path):
        log.warning(
            "backups to %s go to the file system of the run itself, mounted at %s, and are lost with it. "
            "Is the disk mounted that is meant?",
            url,
            now,
        )
    try:
        durable.write_whole(record, json.dumps({**known, url: now}) + "\n")
    except OSError as error:
        raise storage_error(error, path=record, doing="Recording where backups go") from error


def require_kept(rundir: RunDirectory, url: str) -> None:
    """Raise StorageError where the directory of a file:// place is gone that backups were sent to."""
    if is_unmade(url) and (name := newest_copied(rundir, url)):
        directory = directory_of(url)
        raise StorageError(
            f"{directory} is gone, to which {name} was backed up",
            remedy=f"Is its disk mounted? For a new, empty disk make the directory: mkdir -p {directory}",
        )


def is_unmade(url: str) -> bool:
    """Say whether a URL is that of a directory that is not there."""
    return url.startswith("file://") and not directory_of(url).is_dir()


def mount_point(path: Path) -> str:
    """Return where the file system is mounted on which a path lies, or will lie once it is made.

    A directory that is mounted a second time (a bind mount) counts as part of the file system around it.
    Raises StorageError.
    """
    try:
        below = path.resolve()
        while not below.exists():
            below = below.parent
        device = below.stat().st_dev
        while below != below.parent and below.parent.stat().st_dev == device:
            below = below.parent
    except OSError as error:
        raise storage_error(error, path=path, doing="Looking for the disk of backups") from error
    return str(below)


def _holds_newest(rundir: RunDirectory, url: str, directory: Path) -> bool:
    """Whether the newest backup is there all the same: another node may mount what is above the directory."""
    name = newest_copied(rundir, url)
    return bool(name) and (directory / CHECKPOINTS / name / MANIFEST).is_file()


def _read(record: Path) -> dict[str, str]:
    """Return the mount point of each place; nothing for a record that cannot be read."""
    try:
        content = json.loads(record.read_bytes())
        return {str(url): str(mount) for url, mount in content.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
