"""Saving a run's state: at once, or in the background; by one rank or by all that hold it."""

from __future__ import annotations

import copy
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from bloomery.checkpoint.assignment import Key, assign, from_json, held, key_of
from bloomery.checkpoint.background import BackgroundSaver, MemoryCopies, Saving
from bloomery.checkpoint.commit import Part, begin_partial, commit, partial_directory
from bloomery.checkpoint.datafile import in_pieces, lay_out
from bloomery.checkpoint.manifest import checkpoint_name, now
from bloomery.checkpoint.ramcopy import partners_of
from bloomery.checkpoint.ranks import Ranks
from bloomery.checkpoint.save import FILE_BYTES, finished, write_part
from bloomery.checkpoint.state import Collected, Json, StateEntry, Stateful, collect
from bloomery.config.keeping import CheckpointSection
from bloomery.errors import BloomeryError, StorageError
from bloomery.events.incarnation import identity
from bloomery.events.rundir import RunDir
from bloomery.events.storage import free_bytes, no_space

log = logging.getLogger(__name__)

SMALL_BYTES = 64 << 20
"""With background = "auto", ranks that write less than this write it at once, which takes as little time."""
_MARGIN_BYTES = 1 << 20
_ARENA_SPARE_BYTES = 1 << 20  # headers may grow with the digits of what they tell
_SLOWEST_BYTES_PER_S = 20e6
_LEAST_DEADLINE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How one save ended. failure: None when it is committed, as far as this rank knows."""

    step: int
    name: str
    failure: BloomeryError | None = None
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is to be saved: tensors by reference, the rest as it is now. run_length_steps: for retention."""

    step: int
    incarnation: int
    state: Collected
    values: Mapping[str, Mapping[str, Json]]
    about: Mapping[str, Json]
    run_length_steps: int | None


class Saver:
    """Saves for a store. Methods are collective over the ranks, but for those that say otherwise.

    committed: called on the first rank, perhaps in another thread, when a checkpoint is there.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        section: CheckpointSection,
        *,
        committed: Callable[[str, int | None], None],
    ) -> None:
        self.committed_step = -1
        """Of the newest checkpoint that this process saved or restored, as the first rank knows it."""
        self._directory, self._ranks, self._section = directory, ranks, section
        self._committed = committed
        self._background: BackgroundSaver | None = None
        self._prepared = False
        self._pending: list[tuple[Saving, int | None]] = []
        self._saved: list[Saved] = []
        self._memory: MemoryCopies | None = None
        self._partner = ranks.rank
        self._fingerprints: list[str] = []
        self._mine: set[Key] = set()

    @property
    def background(self) -> BackgroundSaver | None:
        """What saves beside the training, where something does. Local."""
        return self._background

    def follow(self, section: CheckpointSection) -> None:
        """Take other free settings. Local."""
        self._section = section
        if self._background is not None:
            self._background.pace.throttled = section.throttle

    def prepare(self, parts: Mapping[str, Stateful]) -> None:
        """Decide how this run saves, once, and take the memory for it. Raises StorageError."""
        if self._prepared:
            return
        self._prepared = True
        if self._section.background == "off":
            return
        entries = self._share(collect(parts).entries)
        files = self._lay_out(entries)
        bytes = sum(file.bytes for file in files)
        asked = self._section.background == "on" or self._section.partner_copies
        if max(self._ranks.gather(bytes)) < SMALL_BYTES and not asked:
            return
        if self._section.partner_copies:
            self._find_partner()
        device = entries[0].tensor.device if entries else torch.device("cpu")
        failure: StorageError | None = None
        try:
            self._background = BackgroundSaver(
                bytes=bytes + _ARENA_SPARE_BYTES + len(files) * (64 << 10),
                throttled=self._section.throttle,
                deadline_s=_deadline_s(bytes),
                device=device,
                committed=self._over,
                memory=self._memory,
            )
        except StorageError as error:
            failure = error
        refused = self._ranks.gather(None if failure is None else failure.message)
        if any(refused):
            self._give_up_background(refused, failure)

    def begin(self, snapshot: Snapshot) -> bool:
        """Begin a save, and return whether that was done: not while two are on their way.

        Without a background it is over when this returns. Raises StorageError when it is known to fail.
        """
        background = self._background
        if background is None:
            self.save(snapshot)
            return True
        if any(self._ranks.gather(background.is_busy)):
            return False
        name = checkpoint_name(snapshot.step, snapshot.incarnation)
        if self._is_there(snapshot):
            self._saved.append(Saved(step=snapshot.step, name=name))
            return True
        partial = self._partial(snapshot)
        files = self._lay_out(self._share(snapshot.state.entries))
        told = self._ranks.gather([sum(file.bytes for file in files), background.endpoint()])
        total = sum(bytes for bytes, _ in told)
        self._ranks.first(lambda: _make_room(partial, bytes=total))
        boxes = tuple(box for file in files for box in file.boxes)
        order = {
            "partial": str(partial),
            "rank": self._ranks.rank,
            "world": self._ranks.world,
            "time": now(),
            "deadline_s": _deadline_s(total),
            "boxes": Part(files=(), boxes=boxes).to_json()["boxes"],
            "checkpoint": {
                "step": snapshot.step,
                "incarnation": snapshot.incarnation,
                "values": copy.deepcopy(snapshot.values),
                "about": dict(snapshot.about),
            },
        }
        partner = told[self._partner][1] if self._partner != self._ranks.rank else None
        saving = background.begin(step=snapshot.step, name=name, files=files, order=order, partner=partner)
        self._pending.append((saving, snapshot.run_length_steps))
        return True

    def save(self, snapshot: Snapshot) -> Path:
        """Save, and return the checkpoint's directory when everything is durable.

        Raises StorageError on every rank when one could not write; earlier checkpoints are untouched.
        """
        final = self._directory / checkpoint_name(snapshot.step, snapshot.incarnation)
        if self._background is not None:
            self.finish()
            self.begin(snapshot)
            self._ranks.together(lambda: self._wait_for(final.name))
            return final
        if not self._is_there(snapshot):
            self._save_at_once(snapshot)
            self.committed_step = snapshot.step
            self._ranks.first(lambda: self._committed(final.name, snapshot.run_length_steps))
        self._saved.append(Saved(step=snapshot.step, name=final.name))
        return final

    def settle(self) -> None:
        """Return when no save reads the state any more. Local."""
        if self._background is not None:
            self._background.settle()

    def saved(self) -> list[Saved]:
        """Return the saves of this rank that ended since the last call. Local."""
        over = [saving for saving, _ in self._pending if saving.over.is_set()]
        self._pending = [item for item in self._pending if not item[0].over.is_set()]
        ended, self._saved = self._saved, []
        return ended + [
            Saved(step=one.step, name=one.name, failure=one.failure, seconds=one.seconds, bytes=one.bytes)
            for one in over
        ]

    def finish(self) -> int:
        """Wait until every save is over, and return the step of the newest checkpoint, -1 for none.

        Raises StorageError when the writers do not end in time.
        """
        self._ranks.together(self._drain)
        return int(self._ranks.gather(self.committed_step)[0])

    def close(self, *, wait_s: float | None = None, forget: bool = False) -> None:
        """Let go of memory and writer; what is being saved has so long to end. Local.

        forget: also of what would let a restart do without the disk.
        """
        if self._background is not None:
            wait_s = _deadline_s(self._background.bytes) if wait_s is None else wait_s
            late = self._background.wait(deadline_s=wait_s)
            if late:
                log.warning("not saved, for the run ends: %s", ", ".join(late))
            self._background.close()
            if forget:
                self._background.forget()
            self._background = None

    def _find_partner(self) -> None:
        """Agree on who keeps whose part in memory."""
        host = os.uname().nodename
        nodes = self._ranks.gather(f"{host} {Path(self._section.memory_directory).resolve()}")
        self._partner = partners_of(nodes)[self._ranks.rank]
        one_machine = len({node.partition(" ")[0] for node in nodes}) == 1
        run = self._directory.parent
        self._memory = MemoryCopies(
            root=Path(self._section.memory_directory),
            run=run,
            identity=self._ranks.first(lambda: identity(RunDir(run))),
            rank=self._ranks.rank,
            token=self._ranks.first(lambda: secrets.token_hex(16)),
            host="127.0.0.1" if one_machine else host,
        )
        for path in self._memory.holdings.sweep():
            log.info("memory of a run that is gone was freed: %s", path)

    def _give_up_background(self, refused: Sequence[str | None], failure: StorageError | None) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None
        message = next(message for message in refused if message)
        if self._section.background == "on":
            raise failure or StorageError(message, remedy="Use checkpoint.background=off on this machine.")
        log.warning("%s The training waits for each save instead.", message)

    def _is_there(self, snapshot: Snapshot) -> bool:
        step, incarnation = snapshot.step, snapshot.incarnation
        return bool(
            self._ranks.first(
                lambda: finished(self._directory, step=step, incarnation=incarnation) is not None
            )
        )

    def _partial(self, snapshot: Snapshot) -> Path:
        return partial_directory(self._directory, step=snapshot.step, incarnation=snapshot.incarnation)

    def _save_at_once(self, snapshot: Snapshot) -> None:
        partial = self._partial(snapshot)
        entries = self._share(snapshot.state.entries)
        try:
            self._ranks.first(lambda: begin_partial(partial))
            written = self._ranks.together(lambda: self._write(partial, entries).to_json())
            self._ranks.first(lambda: _commit(partial, written, snapshot))
        except BaseException:
            if self._ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)  # the error that flies is the one that counts
            raise

    def _write(self, partial: Path, entries: Sequence[StateEntry]) -> Part:
        return write_part(partial, entries, rank=self._ranks.rank, world=self._ranks.world)

    def _lay_out(self, entries: Sequence[StateEntry]) -> Any:
        return lay_out(entries, rank=self._ranks.rank, world=self._ranks.world, file_bytes=FILE_BYTES)

    def _share(self, entries: Sequence[StateEntry]) -> list[StateEntry]:
        """Return the boxes that this rank is to write, of those it holds."""
        pieces = list(in_pieces(entries, piece_bytes=FILE_BYTES))
        if self._ranks.world == 1:
            return pieces
        listed = [item.to_json() for item in held(pieces)]
        # A layout stays what it is for a whole run: its long list crosses once, then its hash alone.
        digest = xxhash.xxh3_128_hexdigest(json.dumps(listed).encode())
        digests = self._ranks.gather(digest)
        if digests != self._fingerprints:
            everyones = self._ranks.gather(listed)
            self._mine = assign([from_json(boxes) for boxes in everyones])[self._ranks.rank]
            self._fingerprints = digests
        return [piece for piece in pieces if key_of(piece) in self._mine]

    def _over(self, saving: Saving) -> None:
        """A save of this rank was written; the first rank has committed it. In the save's thread."""
        self.committed_step = saving.step
        if self._ranks.is_first:
            length = next((length for one, length in self._pending if one is saving), None)
            self._committed(saving.name, length)

    def _drain(self) -> None:
        background = self._background
        late = [] if background is None else background.wait(deadline_s=_deadline_s(background.bytes))
        if late:
            raise StorageError(
                f"Saving {', '.join(late)} does not come to an end.",
                remedy="Is the disk stuck (dmesg)? Earlier checkpoints are untouched.",
            )

    def _wait_for(self, name: str) -> None:
        self._drain()
        for saving, _ in self._pending:
            if saving.name == name and saving.failure is not None:
                raise saving.failure


def _make_room(partial: Path, *, bytes: int) -> None:
    """Refuse a save that cannot fit; make its directory. Raises StorageError."""
    needed = bytes + _MARGIN_BYTES
    if free_bytes(partial) < needed:
        raise no_space(partial, doing="Saving a checkpoint", bytes_needed=needed)
    begin_partial(partial)


def _commit(partial: Path, written: Sequence[Any], snapshot: Snapshot) -> None:
    commit(
        partial,
        [Part.from_json(part) for part in written],
        step=snapshot.step,
        incarnation=snapshot.incarnation,
        time=now(),
        values=snapshot.values,
        about=snapshot.about,
    )


def _deadline_s(bytes: int) -> float:
    """Return how long writing so much may take before something is wrong."""
    return _LEAST_DEADLINE_S + bytes / _SLOWEST_BYTES_PER_S
