"""Marks checkpoints whose contents a check for silent corruption called into question.

The mark is a file beside the manifest, since a finding comes after the checkpoint was committed. A marked
checkpoint is never chosen to go on from; a person who trusts it removes the file. Backups bear the mark too:
an upload sends it along, and for copies that were made before, `backups/NAME.mark` is sent to each place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from bloomery import durable
from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, copies_of, is_copied, remote_copies
from bloomery.checkpoint.format.manifest import checkpoint_name, now, parse_name
from bloomery.checkpoint.format.source import Source, source_of
from bloomery.errors import CheckpointError, storage_error
from bloomery.events.incarnation import Base, read_incarnations, visible
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects

log = logging.getLogger(__name__)

SUSPECT = "suspect.json"
_BYTES_AT_MOST = 1 << 20
_TO_SEND = ".mark"


def mark_suspects(
    rundir: RunDirectory, checkpoints: Iterable[CommittedCheckpoint], *, clean_step: int, why: str
) -> list[str]:
    """Mark those saved after `clean_step`, the last step found clean; return their names.

    Also notes the marks of backups, whether or not their checkpoints are still here: `send_marks` sends them.
    why: a sentence for people. Raises StorageError.
    """
    doubted = [checkpoint for checkpoint in checkpoints if checkpoint.step > clean_step]
    copies = {parse_name(name): name for name in remote_copies(rundir)}
    shown = visible((base for base in copies if base is not None), read_incarnations(rundir))
    backups = {copies[base] for base in shown if base[0] > clean_step}
    mark = json.dumps({"why": why, "time": now()}, ensure_ascii=False) + "\n"
    paths = [checkpoint.directory / SUSPECT for checkpoint in doubted]
    # One that is being uploaded at this moment may have been read before it was marked.
    paths += [
        rundir.backups / (name + _TO_SEND) for name in sorted(backups | {item.name for item in doubted})
    ]
    for path in paths:
        try:
            durable.write_whole(path, mark)
        except OSError as error:
            raise storage_error(error, path=path, doing="Marking a checkpoint") from error
    return [checkpoint.name for checkpoint in doubted]


def marks_to_send(rundir: RunDirectory, url: str, *, place: str = "") -> dict[str, Path]:
    """Return the notes of marks that the backups at `url` do not bear yet, by the checkpoints' names.

    place: the name of this place among those of the recipe; each notes for itself what it has sent.
    """
    notes = {path.name.removesuffix(_TO_SEND): path for path in rundir.backups.glob(f"step-*{_TO_SEND}")}
    copies = copies_of(rundir, notes)
    return {
        name: note
        for name, note in notes.items()
        if is_copied(copies.get(name, ()), name=name, url=url, what="model")
        and not _is_sent(note, _sent_note(note, place))
    }


def send_marks(rundir: RunDirectory, remote: Objects, *, place: str = "") -> None:
    """Mark the run's backups at `remote` whose marks are noted. Raises OSError."""
    for name, note in marks_to_send(rundir, remote.url, place=place).items():
        mark = note.read_bytes()
        remote.put(f"checkpoints/{name}/{SUSPECT}", mark)
        durable.write_whole(_sent_note(note, place), mark)


def _sent_note(note: Path, place: str) -> Path:
    return note.with_name(f"{note.name}-sent{place and '.'}{place}")


def _is_sent(note: Path, sent: Path) -> bool:
    return sent.exists() and sent.read_bytes() == note.read_bytes()


def mark_of(source: Source) -> bytes | None:
    """Return a checkpoint's mark as it is stored; None for one that is not marked. Raises OSError."""
    try:
        return source.content(SUSPECT, at_most=_BYTES_AT_MOST)
    except FileNotFoundError:
        return None


def why_suspect(where: Path | Source) -> str:
    """Return why a checkpoint is marked, '' where it is not. A mark that cannot be read counts."""
    try:
        mark = mark_of(source_of(where))
        return "" if mark is None else str(json.loads(mark)["why"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its mark cannot be read"


def trusted(checkpoints: Iterable[CommittedCheckpoint], *, warns: bool = False) -> list[CommittedCheckpoint]:
    """Return those that are not marked, in their order. warns: log a warning for each that is left out."""
    trusted_ones = []
    for checkpoint in checkpoints:
        why = why_suspect(checkpoint.directory)
        if not why:
            trusted_ones.append(checkpoint)
        elif warns:
            log.warning("%s is passed over as suspect: %s", checkpoint.name, why)
    return trusted_ones


def unmarked(rundir: RunDirectory, bases: Iterable[Base]) -> set[Base]:
    """Return those of some checkpoints that belong to the run and are not marked in its directory.

    One that is only elsewhere, as in memory, is among them.
    """
    shown = visible(bases, read_incarnations(rundir))
    return {base for base in shown if not why_suspect(rundir.checkpoints / checkpoint_name(*base))}


def newest_trusted(checkpoints: Sequence[CommittedCheckpoint]) -> CommittedCheckpoint | None:
    """Return the newest checkpoint that is not marked, and warn of those passed over; None if there are none.

    checkpoints: oldest first. Raises CheckpointError where all are marked.
    """
    for checkpoint in reversed(checkpoints):
        if trusted([checkpoint], warns=True):
            return checkpoint
    refuse_if_only_suspects(checkpoint.name for checkpoint in checkpoints)
    return None


def refuse_if_only_suspects(names: Iterable[str]) -> None:
    """Raise CheckpointError if there are any; call it where all are marked, so that no run begins anew."""
    names = list(names)
    if names:
        raise CheckpointError(
            f"every checkpoint is suspect of silent corruption: {', '.join(names)}",
            remedy=f"Restore an older backup, use another --run, or remove {SUSPECT} from one you trust.",
        )
