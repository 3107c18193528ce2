"""Saves the state of a run, collectively over its ranks: synchronously, or in the background."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bloomery.checkpoint.format.commit import (
    Part,
    final_directory,
    part_or_failure,
    part_record,
    partial_directory,
)
from bloomery.checkpoint.format.deadlines import Deadlines, PartProgress
from bloomery.checkpoint.format.manifest import FileRecord, checkpoint_name, now
from bloomery.checkpoint.format.state import Json, SaveResult, StateEntry, Stateful, StateSnapshot, collect
from bloomery.checkpoint.save.background import BackgroundSaver
from bloomery.checkpoint.save.direct import (
    FILE_BYTES,
    DirectoryBackend,
    ObjectStoreBackend,
    SaveBackend,
    already_saved,
)
from bloomery.checkpoint.save.staging import PendingSave
from bloomery.checkpoint.save.verification import VerificationResults
from bloomery.checkpoint.save.write_plan import WritePlanner
from bloomery.checkpoint.writer.partner import ReplicaSettings, agree_on_partner, memory_shortage
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.checkpoint import BACKGROUND_BYTES, CheckpointSection
from bloomery.errors import StorageError

log = logging.getLogger(__name__)

_BUFFER_SPARE_BYTES = 1 << 20  # headers grow a little when offsets in them get more digits


class Saver:
    """Saves snapshots below `directory`. Methods are collective unless they say "Not collective".

    committed: called on the first rank, perhaps in another thread, with a checkpoint's name and the run's
        length in steps once the checkpoint is committed.
    intact: called on the first rank with a checkpoint's name once every rank has read back its files of it.
        None: nothing is read back.
    store: the run's URL in object storage, for a run that saves there; "" for one that saves in `directory`,
        which all ranks then share.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        section: CheckpointSection,
        *,
        committed: Callable[[str, int | None], None],
        intact: Callable[[str], None] | None,
        store: str = "",
    ) -> None:
        self.committed_step = -1
        """Step of the newest checkpoint that this process saved or restored; -1 for none. Right on rank 0."""
        self._directory, self._ranks, self._section = directory, ranks, section
        self._place: SaveBackend = ObjectStoreBackend(store) if store else DirectoryBackend()
        self._committed = committed
        self._verdicts = None if intact is None else VerificationResults(world=ranks.world, intact=intact)
        self._background: BackgroundSaver | None = None
        self._prepared = False
        self._pending: list[PendingSave] = []
        self._saved, self._degraded = list[SaveResult](), list[str]()
        self._failed_partials: set[Path] = set()
        self._memory: ReplicaSettings | None = None
        self._partner = ranks.rank
        self._given_up = 0
        """How many checks the ranks had given up when the newest save began; equal on all of them."""
        self._planner = WritePlanner(ranks, file_bytes=FILE_BYTES)
        self._deadlines = Deadlines(part_bytes=0, largest_part_bytes=0)

    @property
    def background(self) -> BackgroundSaver | None:
        """The background saver; None where this run saves at once. Not collective."""
        return self._background

    def follow(self, section: CheckpointSection) -> None:
        """Apply changed settings of the checkpoint section. Not collective."""
        self._section = section
        if self._background is not None:
            self._background.throttled = section.throttle

    def prepare(self, parts: Mapping[str, Stateful]) -> None:
        """Decide whether this run saves in the background, and take the memory for it.

        Later calls do nothing.
        Raises StorageError where checkpoint.background is "on" and the memory is not there.
        """
        if self._prepared:
            return
        self._prepared = True
        if self._section.background == "off":
            return
        entries = collect(parts).entries
        plan = self._planner.agree(entries, self._ranks.gather(self._planner.digest(entries)))
        asked = self._section.background == "on" or self._section.partner_copies
        if max(self._planner.file_bytes) < BACKGROUND_BYTES and not asked:
            return
        needed = plan.bytes + _BUFFER_SPARE_BYTES + len(plan.files) * (64 << 10)
        if self._section.partner_copies:
            self._memory, self._partner = agree_on_partner(
                self._ranks,
                Path(self._section.memory_directory),
                run=self._directory.parent,
                bytes=needed,
                boxes=2 * plan.box_count,
            )
        self._update_deadlines()
        refused = memory_shortage(self._ranks, needed, self._memory)
        if refused and self._section.background == "on":
            raise StorageError(refused, remedy="Use checkpoint.background=off on this machine.")
        if refused:
            self._degrade(refused)
            return
        self._background = BackgroundSaver(
            bytes=needed,
            throttled=self._section.throttle,
            device=entries[0].tensor.device if entries else torch.device("cpu"),
            committed=self._on_written,
            memory=self._memory,
        )

    def begin(self, snapshot: StateSnapshot) -> bool:
        """Begin a save, and return whether it was begun: not while every buffer of some rank is busy.

        The save is over when this returns where the run saves at once, or has to from now on because a rank
        cannot save in the background any more. Raises StorageError where the save cannot succeed.
        """
        background = self._background
        if background is None:
            self.save(snapshot)
            return True
        facts = self._ranks.gather(self._gathered_facts(background, snapshot.state.entries))
        intact = self._take_verdicts(facts)
        try:
            return self._begin_beside(background, snapshot, facts)
        finally:
            if intact:  # pruning, in another thread, comes after what the training waits for
                newest, length = max(intact), snapshot.run_length_steps
                background.run_in_save_thread(lambda: self._committed(newest, length))

    def _begin_beside(
        self, background: BackgroundSaver, snapshot: StateSnapshot, facts: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Begin a save in the background; see `begin`. facts: of every rank."""
        entries, name = snapshot.state.entries, checkpoint_name(snapshot.step, snapshot.incarnation)
        plan = self._planner.agree(entries, [fact["layout"] for fact in facts])
        why = [f"rank {rank}: {fact['refusal']}" for rank, fact in enumerate(facts) if fact["refusal"]]
        for rank, (fact, needed) in enumerate(zip(facts, self._planner.buffer_bytes, strict=True)):
            if not fact["refusal"] and fact["buffer_bytes"] < needed:
                why.append(f"rank {rank}: its state has grown to {needed:,} bytes, beyond the memory taken")
        if why:
            self._ranks.poll_on_all(self._drain)
            self._degrade("; ".join(why[:3]))
            self.save(snapshot)
            return True
        under_way = {name for fact in facts for name in fact["under_way"]}
        if any(fact["is_busy"] for fact in facts) or name in under_way:
            return False
        if self._ranks.run_on_first(lambda: self._prepare_partial(snapshot, under_way)):
            self._saved.append(SaveResult(step=snapshot.step, name=name))
            return True
        given_up = sum(fact["given_up"] for fact in facts)
        if given_up > self._given_up:
            background.check.carry_to_end(name)
        self._given_up = given_up
        self._update_deadlines()
        saving = background.begin(
            entries,
            plan,
            step=snapshot.step,
            name=name,
            run_length_steps=snapshot.run_length_steps,
            order=self._order(snapshot),
            # As JSON now, because the run goes on and changes the values.
            texts={"values": json.dumps(snapshot.values), "boxes": plan.boxes},
            deadlines=self._deadlines,
            partner=facts[self._partner]["endpoint"] if self._partner != self._ranks.rank else None,
        )
        self._pending.append(saving)
        return True

    def save(self, snapshot: StateSnapshot) -> Path:
        """Save, and return the checkpoint's directory when everything is durable.

        Raises StorageError on every rank when one could not write; earlier checkpoints are untouched.
        """
        final = self._directory / checkpoint_name(snapshot.step, snapshot.incarnation)
        if self._background is not None:
            self.wait_for_saves()
            self.begin(snapshot)
            self._ranks.poll_on_all(lambda: self._wait_for(final.name))
            return final
        if not self._ranks.run_on_first(lambda: self._is_here(snapshot)):
            written = self._save_directly(snapshot)
            self.committed_step = snapshot.step
            self._update_deadlines()
            if self._verdicts is not None:
                self._read_back(final, written, self._verdicts)
            prune = partial(self._committed, final.name, snapshot.run_length_steps)
            self._ranks.poll_on_first(
                prune, deadline_s=self._deadlines.prune_s, doing=f"pruning after {final.name}"
            )
        self._saved.append(SaveResult(step=snapshot.step, name=final.name))
        return final

    def wait_staged(self) -> None:
        """Return when no save reads the state any more, so that it may be changed. Not collective."""
        if self._background is not None:
            self._background.wait_staged()

    def take_save_results(self) -> list[SaveResult]:
        """Return how the saves ended that ended since the last call, on this rank. Not collective."""
        self._collect_ended()
        ended, self._saved = self._saved, []
        return ended

    def take_background_failures(self) -> list[str]:
        """Return why saving in the background stopped, if it did since the last call. Not collective."""
        reasons, self._degraded = self._degraded, []
        return reasons

    def wait_for_saves(self) -> int:
        """Wait until every save is over, and return the step of the newest checkpoint; -1 for none.

        Raises StorageError where the writers do not finish within the deadline.
        """
        self._ranks.poll_on_all(self._drain)
        self._collect_ended()
        self._clear_failed_partials(())
        return int(self._ranks.gather(self.committed_step)[0])

    def close(self, *, wait_s: float | None = None, remove_replicas: bool = False) -> None:
        """End the writer and release the memory. Not collective.

        wait_s: how long pending saves may take, in seconds; None for the deadline of their size.
        remove_replicas: whether to remove the replicas in memory too, from which a restart could be restored.
        """
        if self._background is not None:
            late = self._background.wait(deadline_s=self._deadlines.finish_s if wait_s is None else wait_s)
            if late:
                log.warning("not saved, because the run ends: %s", ", ".join(late))
            self._background.close()
            if remove_replicas:
                self._background.remove_replicas()
            self._background = None

    def _degrade(self, why: str) -> None:
        """Stop saving in the background: each later save is synchronous, and the training waits for it.

        Called on all ranks in the same save, because saving is collective. why: the reason, for the log.
        """
        if self._background is not None:
            self._background.close()
            self._background = None
        self._collect_ended()
        self._clear_failed_partials(())  # no other save does, until the run ends
        self._degraded.append(why)
        log.warning("saving in the background is not possible; the training waits for each save: %s", why)

    def _gathered_facts(self, background: BackgroundSaver, entries: Sequence[StateEntry]) -> dict[str, Json]:
        """Return what all ranks must know about this one before a save."""
        return {
            "layout": self._planner.digest(entries),
            "refusal": background.unavailable_reason(),
            "buffer_bytes": background.bytes,
            "under_way": list[Json](background.under_way),
            "is_busy": background.is_busy,
            "read_back": dict[str, Json](background.check.take()),
            "given_up": background.check.given_up,
            "endpoint": list[Json](background.endpoint() or ()) or None,
        }

    def _order(self, snapshot: StateSnapshot) -> dict[str, Any]:  # Any: JSON
        about = dict(snapshot.about)
        return {
            "partial": str(self._partial(snapshot)),
            "store": self._place.store,
            "rank": self._ranks.rank,
            "world": self._ranks.world,
            "time": now(),
            "checkpoint": {"step": snapshot.step, "incarnation": snapshot.incarnation, "about": about},
        }

    def _prepare_partial(self, snapshot: StateSnapshot, under_way: Collection[str]) -> bool:
        """Create a save's directory; return True where the checkpoint exists already. Raises StorageError."""
        self._collect_ended()
        self._clear_failed_partials(under_way)
        if self._is_here(snapshot):
            return True
        self._place.begin(self._partial(snapshot), bytes=sum(self._planner.file_bytes))
        return False

    def _collect_ended(self) -> None:
        over = [saving for saving in self._pending if saving.over.is_set()]
        self._pending = [saving for saving in self._pending if saving not in over]
        for saving in over:
            if saving.failure is not None and self._ranks.is_first:
                self._failed_partials.add(Path(saving.order["partial"]))
            self._saved.append(saving.result())

    def _clear_failed_partials(self, under_way: Collection[str]) -> None:
        """Remove the directories of failed saves, once no rank writes there any more."""
        for left in tuple(self._failed_partials):
            if final_directory(left).name not in under_way:
                self._place.clear(left)
                self._failed_partials.discard(left)

    def _update_deadlines(self) -> None:
        sizes = self._planner.file_bytes
        self._deadlines = Deadlines(part_bytes=sizes[self._ranks.rank], largest_part_bytes=max(sizes))

    def _is_here(self, snapshot: StateSnapshot) -> bool:
        saved = already_saved(self._directory, step=snapshot.step, incarnation=snapshot.incarnation)
        return saved is not None

    def _partial(self, snapshot: StateSnapshot) -> Path:
        return partial_directory(self._directory, step=snapshot.step, incarnation=snapshot.incarnation)

    def _save_directly(self, snapshot: StateSnapshot) -> tuple[FileRecord, ...]:
        """Save, and return the records of the files that this rank wrote."""
        partial, entries = self._partial(snapshot), snapshot.state.entries
        self._planner.agree(entries, self._ranks.gather(self._planner.digest(entries)))
        own = self._planner.entries_to_write(entries)
        rank, world, progress = self._ranks.rank, self._ranks.world, PartProgress(lambda count: None)

        def write() -> str:
            part = self._place.write(partial, own, rank=rank, world=world, wrote=progress.add)
            return part_record(part).decode()

        try:
            self._ranks.run_on_first(lambda: self._place.begin(partial, bytes=0))
            # A store may take longer than a collective may wait. The parts travel as texts, since only the
            # first rank makes boxes of all of them: hundreds of ranks have a million.
            written = self._ranks.poll_on_all(
                write, stall_s=self._place.stall_s, progress=progress, doing=f"its part of {partial.stem}"
            )

            def part_of(number: int) -> Part:
                return part_or_failure(written[number], rank=number, place=partial.name)

            self._ranks.poll_on_first(
                lambda: self._place.commit(partial, list(map(part_of, range(world))), snapshot)
            )
            return part_of(rank).files
        except BaseException:
            if self._ranks.is_first:
                self._place.clear(partial)  # an error of the removal must not hide the first
            raise

    def _read_back(self, final: Path, written: Sequence[FileRecord], verdicts: VerificationResults) -> None:
        """Have each rank read back its files of a checkpoint that was saved at once."""
        outcomes = self._ranks.poll_on_all(
            lambda: self._place.read_back(final, written, is_first=self._ranks.is_first),
            deadline_s=self._deadlines.prune_s,
            doing=f"reading back {final.name}",
        )
        for rank, problem in enumerate(outcomes if self._ranks.is_first else ()):
            verdicts.add(rank, {final.name: problem})

    def _take_verdicts(self, facts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Note what all ranks read back since the last save; return what is now known to be intact."""
        if not self._ranks.is_first or self._verdicts is None:
            return []
        return [
            name for rank, fact in enumerate(facts) for name in self._verdicts.add(rank, fact["read_back"])
        ]

    def _on_written(self, saving: PendingSave) -> None:
        """Note that this rank's part was written; on the first rank: committed. Runs in the save's thread."""
        self.committed_step = saving.step
        if self._ranks.is_first:
            self._committed(saving.name, saving.run_length_steps)

    def _drain(self) -> None:
        background = self._background
        late = [] if background is None else background.wait(deadline_s=self._deadlines.finish_s)
        if late:
            raise StorageError(
                f"Saving {', '.join(late)} took longer than {self._deadlines.finish_s:,.0f} s.",
                remedy="Is the disk stuck (dmesg)? Earlier checkpoints are untouched.",
            )

    def _wait_for(self, name: str) -> None:
        self._drain()
        for saving in self._pending:
            if saving.name == name and saving.failure is not None:
                raise saving.failure
