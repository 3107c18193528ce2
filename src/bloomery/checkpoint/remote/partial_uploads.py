"""Removes from a store what was sent of checkpoints that are no longer here: nobody will send the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bloomery.checkpoint.format.catalogue import copies_of, is_copied
from bloomery.checkpoint.format.manifest import MANIFEST, parse_name
from bloomery.checkpoint.format.source import CHECKPOINTS
from bloomery.checkpoint.remote.shared_upload import all_notes, notes_of, urls_of
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects

log = logging.getLogger(__name__)


def left_in_part(rundir: RunDirectory, url: str, *, place: str = "") -> list[str]:
    """Return the names of the checkpoints that were sent in part to `url`, and are no longer here.

    Known by the notes that their upload left (`FileSender`). Uses no network. place: see `Backup`.
    """
    suffix = notes_of(rundir, "", place=place).name
    names = {path.name.partition(suffix)[0] for path in rundir.backups.glob(f"step-*{suffix}*")}
    return sorted(
        name
        for name in names
        if parse_name(name) is not None
        and not (rundir.checkpoints / name).exists()
        and url in urls_of(notes_of(rundir, name, place=place))
        and not is_copied(copies_of(rundir, [name]).get(name, ()), name=name, url=url, what="model")
    )


def remove_left_in_part(
    rundir: RunDirectory, remote: Objects, *, place: str = "", go_on: Callable[[], bool]
) -> None:
    """Remove the objects of `left_in_part`, and the notes of their uploads. go_on: asked before each.

    A checkpoint with a manifest is whole, and stays. Raises OSError.
    """
    for name in left_in_part(rundir, remote.url, place=place):
        if not go_on():
            return
        prefix = f"{CHECKPOINTS}/{name}/"
        keys = [entry.key for entry in remote.entries(prefix)]
        if keys and prefix + MANIFEST not in keys:
            remote.delete_all(keys)
            log.info("%s was removed here before it was backed up, and what was sent of it now too", name)
        for notes in all_notes(notes_of(rundir, name, place=place)):
            notes.unlink(missing_ok=True)
