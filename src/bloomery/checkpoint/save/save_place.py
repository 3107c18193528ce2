"""Where a run saves: into its directory, or straight to object storage, as a rank's trainer sees it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bloomery.checkpoint.format.commit import Part, begin_partial, commit
from bloomery.checkpoint.format.manifest import FileRecord, now
from bloomery.checkpoint.format.read_back import read_back, read_back_index
from bloomery.checkpoint.format.state import StateEntry, StateSnapshot
from bloomery.checkpoint.save.direct import send_part, write_part
from bloomery.checkpoint.writer.part_place import MARGIN_BYTES
from bloomery.checkpoint.writer.store_place import ObjectPlace
from bloomery.errors import require_space
from bloomery.objects import storage_failure


class SavePlace(Protocol):
    """What differs between the places; `partial` is the directory of a save in the run directory.

    store: the run's URL in object storage; "" for a run that saves into its directory.
    """

    store: str

    def begin(self, partial: Path, *, bytes: int) -> None:
        """Make room for a save of so many bytes. Called by the first rank. Raises StorageError."""

    def clear(self, partial: Path) -> None:
        """Remove what a failed save left. Called by the first rank, once no rank writes there any more."""

    def write(self, partial: Path, entries: Sequence[StateEntry], *, rank: int, world: int) -> Part:
        """Write this rank's entries durably, and return the part. Raises StorageError."""

    def commit(self, partial: Path, parts: Sequence[Part], snapshot: StateSnapshot) -> None:
        """Turn what all ranks wrote into a checkpoint. Called by the first rank. Raises as `commit`."""

    def read_back(self, partial: Path, written: Sequence[FileRecord], *, is_first: bool) -> str:
        """Return what is wrong with what this rank wrote; "" for nothing."""


class DirectorySaves:
    """Saves into the run directory, which all ranks share: see `SavePlace`."""

    store = ""

    def begin(self, partial: Path, *, bytes: int) -> None:
        """See `SavePlace`."""
        require_space(partial, doing="Saving a checkpoint", bytes_needed=bytes + MARGIN_BYTES)
        begin_partial(partial)

    def clear(self, partial: Path) -> None:
        """See `SavePlace`."""
        shutil.rmtree(partial, ignore_errors=True)

    def write(self, partial: Path, entries: Sequence[StateEntry], *, rank: int, world: int) -> Part:
        """See `SavePlace`."""
        return write_part(partial, entries, rank=rank, world=world)

    def commit(self, partial: Path, parts: Sequence[Part], snapshot: StateSnapshot) -> None:
        """See `SavePlace`."""
        commit(
            partial,
            parts,
            step=snapshot.step,
            incarnation=snapshot.incarnation,
            time=now(),
            values=snapshot.values,
            about=snapshot.about,
        )

    def read_back(self, partial: Path, written: Sequence[FileRecord], *, is_first: bool) -> str:
        """See `SavePlace`."""
        return (read_back_index(partial) if is_first else "") or read_back(partial, written)


class StoreSaves:
    """Saves to object storage, from every rank: see `SavePlace` and `ObjectPlace`."""

    def __init__(self, url: str) -> None:
        self.store = url

    def begin(self, partial: Path, *, bytes: int) -> None:
        """See `SavePlace`. What an earlier try sent is removed."""
        try:
            ObjectPlace(partial, self.store).clear()
        except OSError as error:
            raise storage_failure(error, doing="Saving a checkpoint") from error
        begin_partial(partial)

    def clear(self, partial: Path) -> None:
        """See `SavePlace`."""
        ObjectPlace(partial, self.store).abandon(0, files=(), why={})

    def write(self, partial: Path, entries: Sequence[StateEntry], *, rank: int, world: int) -> Part:
        """See `SavePlace`."""
        return send_part(ObjectPlace(partial, self.store), entries, rank=rank, world=world)

    def commit(self, partial: Path, parts: Sequence[Part], snapshot: StateSnapshot) -> None:
        """See `SavePlace`."""
        ObjectPlace(partial, self.store).commit_parts(
            parts,
            step=snapshot.step,
            incarnation=snapshot.incarnation,
            time=now(),
            values=snapshot.values,
            about=snapshot.about,
        )

    def read_back(self, partial: Path, written: Sequence[FileRecord], *, is_first: bool) -> str:
        """See `SavePlace`. Each file was verified when it was sent."""
        return ""
