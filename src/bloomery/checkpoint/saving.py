"""Saving a run's state: at once, or in the background; by one rank or by all that hold it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bloomery.checkpoint.background import BackgroundSaver, Saving
from bloomery.checkpoint.commit import Part, begin_partial, commit, final_directory, partial_directory
from bloomery.checkpoint.deadlines import Deadlines
from bloomery.checkpoint.manifest import checkpoint_name, now
from bloomery.checkpoint.ranks import Ranks
from bloomery.checkpoint.room import MemoryCopies, find_partner, refusal
from bloomery.checkpoint.save import FILE_BYTES, finished, write_part
from bloomery.checkpoint.share import Shares
from bloomery.checkpoint.state import Collected, Json, StateEntry, Stateful, collect
from bloomery.config.keeping import CheckpointSection
from bloomery.errors import BloomeryError, StorageError
from bloomery.events.storage import free_bytes, no_space

log = logging.getLogger(__name__)

SMALL_BYTES = 64 << 20
"""With background = "auto", ranks that write less than this write it at once, which takes as little time."""
_MARGIN_BYTES = 1 << 20
_ARENA_SPARE_BYTES = 1 << 20  # headers may grow with the digits of what they tell


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
        self._pending: list[Saving] = []
        self._saved: list[Saved] = []
        self._degraded: list[str] = []
        self._given_up: set[Path] = set()
        self._memory: MemoryCopies | None = None
        self._partner = ranks.rank
        self._shares = Shares(ranks, file_bytes=FILE_BYTES)
        self._deadlines = Deadlines(bytes=0, part_bytes=0)

    @property
    def background(self) -> BackgroundSaver | None:
        """What saves beside the training, where something does. Local."""
        return self._background

    def follow(self, section: CheckpointSection) -> None:
        """Take other free settings. Local."""
        self._section = section
        if self._background is not None:
            self._background.throttled = section.throttle

    def prepare(self, parts: Mapping[str, Stateful]) -> None:
        """Decide how this run saves, once, and take the memory for it. Raises StorageError."""
        if self._prepared:
            return
        self._prepared = True
        if self._section.background == "off":
            return
        entries = collect(parts).entries
        share = self._shares.agree(entries, self._ranks.gather(self._shares.digest(entries)))
        asked = self._section.background == "on" or self._section.partner_copies
        if max(self._shares.file_bytes) < SMALL_BYTES and not asked:
            return
        room = share.bytes + _ARENA_SPARE_BYTES + len(share.files) * (64 << 10)
        if self._section.partner_copies:
            self._memory, self._partner = find_partner(
                self._ranks,
                Path(self._section.memory_directory),
                run=self._directory.parent,
                bytes=room,
                boxes=2 * share.box_count,
            )
        self._follow_size()
        refused = refusal(self._ranks, room, self._memory)
        if refused and self._section.background == "on":
            raise StorageError(refused, remedy="Use checkpoint.background=off on this machine.")
        if refused:
            self._degrade(refused)
            return
        self._background = BackgroundSaver(
            bytes=room,
            throttled=self._section.throttle,
            device=entries[0].tensor.device if entries else torch.device("cpu"),
            committed=self._over,
            memory=self._memory,
        )

    def begin(self, snapshot: Snapshot) -> bool:
        """Begin a save, and return whether that was done: not while two are on their way.

        Without a background it is over when this returns, and where one rank has lost its own. Raises
        StorageError when it is known to fail.
        """
        background = self._background
        if background is None:
            self.save(snapshot)
            return True
        entries, name = snapshot.state.entries, checkpoint_name(snapshot.step, snapshot.incarnation)
        ranks = self._ranks.gather(self._facts(background, entries))
        share = self._shares.agree(entries, [one["form"] for one in ranks])
        why = [f"rank {rank}: {one['refusal']}" for rank, one in enumerate(ranks) if one["refusal"]]
        for rank, (one, needed) in enumerate(zip(ranks, self._shares.arena_bytes, strict=True)):
            if not one["refusal"] and one["room"] < needed:
                why.append(f"rank {rank}: its state has grown to {needed:,} bytes, beyond the memory taken")
        if why:
            self._ranks.patiently(self._drain)
            self._degrade("; ".join(why[:3]))
            self.save(snapshot)
            return True
        under_way = {name for one in ranks for name in one["under_way"]}
        if any(one["is_busy"] for one in ranks) or name in under_way:
            return False
        if self._ranks.first(lambda: self._make_way(snapshot, under_way)):
            self._saved.append(Saved(step=snapshot.step, name=name))
            return True
        self._follow_size()
        partner = ranks[self._partner]["endpoint"] if self._partner != self._ranks.rank else None
        saving = background.begin(
            entries,
            share,
            step=snapshot.step,
            name=name,
            run_length_steps=snapshot.run_length_steps,
            order=self._order(snapshot),
            # As it is now: the run goes on, and changes it.
            texts={"values": json.dumps(snapshot.values), "boxes": share.boxes},
            deadlines=self._deadlines,
            partner=partner,
        )
        self._pending.append(saving)
        return True

    def save(self, snapshot: Snapshot) -> Path:
        """Save, and return the checkpoint's directory when everything is durable.

        Raises StorageError on every rank when one could not write; earlier checkpoints are untouched.
        """
        final = self._directory / checkpoint_name(snapshot.step, snapshot.incarnation)
        if self._background is not None:
            self.finish()
            self.begin(snapshot)
            self._ranks.patiently(lambda: self._wait_for(final.name))
            return final
        if not self._is_there(snapshot):
            self._save_at_once(snapshot)
            self.committed_step = snapshot.step
            prune = partial(self._committed, final.name, snapshot.run_length_steps)
            self._follow_size()
            self._ranks.first_patiently(
                prune, deadline_s=self._deadlines.prune_s, doing=f"reading back {final.name}"
            )
        self._saved.append(Saved(step=snapshot.step, name=final.name))
        return final

    def settle(self) -> None:
        """Return when no save reads the state any more. Local."""
        if self._background is not None:
            self._background.settle()

    def saved(self) -> list[Saved]:
        """Return the saves of this rank that ended since the last call. Local."""
        self._note_ended()
        ended, self._saved = self._saved, []
        return ended

    def degraded(self) -> list[str]:
        """Return why the run no longer saves beside the training, if that is new. Local."""
        reasons, self._degraded = self._degraded, []
        return reasons

    def finish(self) -> int:
        """Wait until every save is over, and return the step of the newest checkpoint, -1 for none.

        Raises StorageError when the writers do not end in time.
        """
        self._ranks.patiently(self._drain)
        self._note_ended()
        self._clear_given_up(())
        return int(self._ranks.gather(self.committed_step)[0])

    def close(self, *, wait_s: float | None = None, forget: bool = False) -> None:
        """Let go of memory and writer; what is being saved has so long to end. Local.

        forget: also of what would let a restart do without the disk.
        """
        if self._background is not None:
            late = self._background.wait(deadline_s=self._deadlines.finish_s if wait_s is None else wait_s)
            if late:
                log.warning("not saved, for the run ends: %s", ", ".join(late))
            self._background.close()
            if forget:
                self._background.forget()
            self._background = None

    def _degrade(self, why: str) -> None:
        """Save without a background from now on: all ranks together, or they would wait for each other."""
        if self._background is not None:
            self._background.close()
            self._background = None
        self._degraded.append(why)
        log.warning("The training waits for each save instead of going on beside it: %s", why)

    def _facts(self, background: BackgroundSaver, entries: Sequence[StateEntry]) -> dict[str, Json]:
        """Return what all ranks must know of this one before a save."""
        return {
            "form": self._shares.digest(entries),
            "refusal": background.refusal(),
            "room": background.bytes,
            "under_way": list[Json](background.under_way),
            "is_busy": background.is_busy,
            "endpoint": list[Json](background.endpoint() or ()) or None,
        }

    def _order(self, snapshot: Snapshot) -> dict[str, Any]:  # Any: JSON
        return {
            "partial": str(self._partial(snapshot)),
            "rank": self._ranks.rank,
            "world": self._ranks.world,
            "time": now(),
            "checkpoint": {
                "step": snapshot.step,
                "incarnation": snapshot.incarnation,
                "about": dict(snapshot.about),
            },
        }

    def _make_way(self, snapshot: Snapshot, under_way: Collection[str]) -> bool:
        """Make a save's directory; True when what it is to save is there already. Raises StorageError."""
        self._note_ended()
        self._clear_given_up(under_way)
        if finished(self._directory, step=snapshot.step, incarnation=snapshot.incarnation) is not None:
            return True
        _make_room(self._partial(snapshot), bytes=sum(self._shares.file_bytes))
        return False

    def _note_ended(self) -> None:
        over = [saving for saving in self._pending if saving.over.is_set()]
        self._pending = [saving for saving in self._pending if saving not in over]
        for one in over:
            if one.failure is not None and self._ranks.is_first:
                self._given_up.add(Path(one.order["partial"]))
            self._saved.append(
                Saved(step=one.step, name=one.name, failure=one.failure, seconds=one.seconds, bytes=one.bytes)
            )

    def _clear_given_up(self, under_way: Collection[str]) -> None:
        """Remove what saves that failed have left, once no rank writes there any more."""
        for left in tuple(self._given_up):
            if final_directory(left).name not in under_way:
                shutil.rmtree(left, ignore_errors=True)
                self._given_up.discard(left)

    def _follow_size(self) -> None:
        mine = self._shares.file_bytes[self._ranks.rank]
        self._deadlines = Deadlines(bytes=sum(self._shares.file_bytes), part_bytes=mine)

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
        partial, entries = self._partial(snapshot), snapshot.state.entries
        self._shares.agree(entries, self._ranks.gather(self._shares.digest(entries)))
        mine = self._shares.pieces(entries)
        try:
            self._ranks.first(lambda: begin_partial(partial))
            written = self._ranks.together(lambda: self._write(partial, mine).to_json())
            self._ranks.first(lambda: _commit(partial, written, snapshot))
        except BaseException:
            if self._ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)  # the error that flies is the one that counts
            raise

    def _write(self, partial: Path, entries: Sequence[StateEntry]) -> Part:
        return write_part(partial, entries, rank=self._ranks.rank, world=self._ranks.world)

    def _over(self, saving: Saving) -> None:
        """A save of this rank was written; the first rank has committed it. In the save's thread."""
        self.committed_step = saving.step
        if self._ranks.is_first:
            self._committed(saving.name, saving.run_length_steps)

    def _drain(self) -> None:
        background = self._background
        late = [] if background is None else background.wait(deadline_s=self._deadlines.finish_s)
        if late:
            raise StorageError(
                f"Saving {', '.join(late)} does not come to an end.",
                remedy="Is the disk stuck (dmesg)? Earlier checkpoints are untouched.",
            )

    def _wait_for(self, name: str) -> None:
        self._drain()
        for saving in self._pending:
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
