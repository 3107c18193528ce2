"""Says which checkpoints of a run wait for their backup, from the records of those that were made."""

from __future__ import annotations

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, checkpoints, copies_of, is_copied
from bloomery.checkpoint.remote.backup_duty import Duty, is_covered, read_duty
from bloomery.config.checkpoint import BackupSection
from bloomery.events.run_directory import RunDirectory


def backup_url(section: BackupSection, run_name: str, duty: Duty | None = None) -> str:
    """Return the URL of a run's backups, or of one of its peers' backups; "" where none are made."""
    peer = f"/{duty.peer}" if duty is not None else ""
    return f"{section.url.rstrip('/')}/{run_name}{peer}" if section.url else ""


def due(
    rundir: RunDirectory, section: BackupSection, *, run_name: str, place: str = ""
) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a run that wait for their backup, oldest first: the uncopied ones that are
    newer than the newest copy. Older ones were passed over, and may be removed. place: see `Backup`.
    """
    left, copied = _sorted_by_copies(rundir, section, run_name=run_name, place=place)
    newest_copy = max(copied, default=None)
    return [item for item in left if newest_copy is None or item > newest_copy]


def uncopied(
    rundir: RunDirectory, section: BackupSection, *, run_name: str, place: str = ""
) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a run that have no backup and are to have one, oldest first.

    A checkpoint is backed up once there is a verified copy at the section's URL with all that the section
    asks for. In a run of several peers, another peer's backup of the same or a later round counts too; to a
    further place only the peer that makes the backups copies anything.
    """
    return _sorted_by_copies(rundir, section, run_name=run_name, place=place)[0]


def _sorted_by_copies(
    rundir: RunDirectory, section: BackupSection, *, run_name: str, place: str
) -> tuple[list[CommittedCheckpoint], list[CommittedCheckpoint]]:
    """Return the checkpoints that are to have a backup and have none, and those that have one.

    Only the records of checkpoints that are here are read: those of removed ones are as many as saves.
    """
    duty = read_duty(rundir)
    url = backup_url(section, run_name, duty)
    if not url or (place and duty is not None and not duty.writes):
        return [], []
    left, copied = list[CommittedCheckpoint](), list[CommittedCheckpoint]()
    here = checkpoints(rundir)
    copies = copies_of(rundir, (item.name for item in here))
    for item in here:
        if is_copied(copies.get(item.name, ()), name=item.name, url=url, what=section.what):
            copied.append(item)
        elif (not section.every_steps or item.step % section.every_steps == 0) and (
            duty is None or place or not is_covered(item.directory, duty)
        ):
            left.append(item)
    return left, copied
