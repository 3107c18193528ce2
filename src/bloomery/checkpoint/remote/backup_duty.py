"""Which checkpoints of a run wait for their backup, and which peer of a run makes the backups.

The checkpoints of every peer hold the state of the run, so the backups of one peer are enough. Its agent
writes the record of that, and its ranks read it. Each peer that ever made backups has a directory of its own
at the backup URL, since steps and incarnations are counted by each peer for itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bloomery import durable
from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, checkpoints, copies_of, is_copied
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.config.checkpoint import BackupSection
from bloomery.errors import CheckpointError, storage_error
from bloomery.events.run_directory import RunDirectory

_DUTY, _ROUND = "duty.json", "round.json"


@dataclass(frozen=True, kw_only=True)
class Duty:
    """Whether this peer makes the backups of the run, and how far the backups of all peers reach.

    peer: the peer's name. writes: whether this peer makes the backups.
    covered: the newest round of which any peer has a verified backup; -1 for none.
    """

    peer: str
    writes: bool
    covered: int


def read_duty(rundir: RunDirectory) -> Duty | None:
    """Return the record that the agent wrote; None in a run of one peer, which has no agent."""
    try:
        stored = json.loads((rundir.backups / _DUTY).read_bytes())
        return Duty(peer=str(stored["peer"]), writes=stored["writes"] is True, covered=int(stored["covered"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def write_duty(rundir: RunDirectory, duty: Duty) -> None:
    """Record durably whether this peer makes the backups. Raises StorageError."""
    _write(rundir.backups / _DUTY, asdict(duty))


def note_round(rundir: RunDirectory, directory: Path) -> None:
    """Record the round of a checkpoint that was backed up and verified. Raises StorageError."""
    committed = _committed_round(directory)
    if committed is not None and committed[0] > backed_up_round(rundir):
        _write(rundir.backups / _ROUND, {"round": committed[0]})


def backed_up_round(rundir: RunDirectory) -> int:
    """Return the newest round that this directory's peer has backed up; -1 for none."""
    try:
        return int(json.loads((rundir.backups / _ROUND).read_bytes())["round"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1


def is_covered(directory: Path, duty: Duty) -> bool:
    """Say whether some peer's verified backup is as new as this checkpoint, or newer."""
    committed = _committed_round(directory)
    if committed is None:
        return False
    round, is_inside = committed
    return round < duty.covered or (round == duty.covered and not is_inside)


def _committed_round(directory: Path) -> tuple[int, bool] | None:
    """Return the newest committed round in a checkpoint, and whether inner steps of the next one follow it.

    None for a checkpoint of a run without rounds, and for one that cannot be read.
    """
    try:
        outer = read_manifest(directory).values.get("outer", {})
        round, is_inside = outer["round"], outer["inside"] is not False
    except (CheckpointError, KeyError):
        return None
    return (round, is_inside) if isinstance(round, int) else None


def _write(path: Path, content: dict[str, object]) -> None:
    try:
        durable.write_whole(path, json.dumps(content) + "\n")
    except OSError as error:
        raise storage_error(error, path=path, doing="Recording which peer backs the run up") from error


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
