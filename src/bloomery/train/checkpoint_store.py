"""Saves, restores and prunes the checkpoints of a run, in the run directory, in memory and in the backup."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    checkpoints,
    listing_changed,
    newest_intact,
    refusal_of_damage,
)
from bloomery.checkpoint.format.deadlines import ABORT_S, LOST_RANK_S
from bloomery.checkpoint.format.manifest import DamagedCheckpoint, Manifest, parse_name, read_manifest
from bloomery.checkpoint.format.retention import prune_plan
from bloomery.checkpoint.format.source import RemoteCheckpoint, Source, source_of
from bloomery.checkpoint.format.state import SaveResult, Stateful, StateSnapshot, collect
from bloomery.checkpoint.format.suspects import mark_suspects, refuse_if_only_suspects, trusted, unmarked
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.places import CombinedBackups, LocalRunStorage, RunStorage
from bloomery.checkpoint.remote.remote_run import place_at, tell_of_newer
from bloomery.checkpoint.save.peer_snapshots import PeerSnapshots
from bloomery.checkpoint.save.saver import Saver
from bloomery.checkpoint.writer.memory_replica import MemoryReplicas, find_in_memory
from bloomery.checkpoint.writer.ranks import Exchange, Gather, Ranks, alone
from bloomery.config.checkpoint import CheckpointSection
from bloomery.config.environment import OfflineRefused
from bloomery.errors import CheckpointError, RankLost, ReportedElsewhere, StorageError
from bloomery.events.incarnation import identity
from bloomery.events.run_directory import RunDirectory
from bloomery.train.saved_state import Restored, RunStateToSave

log = logging.getLogger(__name__)


class Store:
    """Saves and restores the state of one run. The process (group) that owns it holds the run directory.

    incarnation: the life of the run that saves are marked with; 0 until the first `restore`.
    section, reach_steps (see `prune_plan`): may be replaced while running.
    backup: copies what is saved; the store does not close it.
    place: where the run keeps its checkpoints; None for its directory, which all ranks then share.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        section: CheckpointSection,
        *,
        rank: int = 0,
        world: int = 1,
        gather: Gather = alone,
        exchange: Exchange | None = None,
        backup: Backup | CombinedBackups | None = None,
        reach_steps: Collection[int] = (),
        place: RunStorage | None = None,
    ) -> None:
        self.incarnation = 0
        self.reach_steps: Collection[int] = reach_steps
        self._rundir, self._section = rundir, section
        self._place = LocalRunStorage(rundir) if place is None else place
        self._ranks = Ranks(rank=rank, world=world, gather=gather, exchange=exchange)
        self._intact: set[str] = set()
        self._backup = backup if rank == 0 else None
        self._run_length_steps: int | None = None
        if self._backup is not None:
            self._backup.on_all_copied = lambda: self._prune_or_tell("older checkpoints were not removed")
        self._pruning = threading.Lock()
        self._saver = Saver(
            rundir.checkpoints,
            self._ranks,
            section,
            committed=self._committed,
            intact=self._intact.add,
            store=self._place.url,
        )
        self._peer_snapshots = PeerSnapshots(Path(section.memory_directory), rundir.path, self._ranks)

    @property
    def section(self) -> CheckpointSection:
        """The settings that say when to save and what to keep. They may be replaced while running."""
        return self._section

    @section.setter
    def section(self, section: CheckpointSection) -> None:
        self._section = section
        self._saver.follow(section)

    def save(self, state: RunStateToSave) -> Path:
        """Save the state, remove checkpoints that need not be kept, and return the new one's directory.

        Collective: each rank passes the parts whose tensors it shall write; of replicas one rank writes. The
        values are the first rank's: those of its parts, and `values`. When it returns, everything is durable.
        Raises StorageError on every rank if one rank could not write; earlier checkpoints are untouched.
        """
        return self._saver.save(self._snapshot(state))

    def begin_save(self, state: RunStateToSave) -> bool:
        """Begin a `save` that continues beside the training, and return whether it was begun.

        It is not begun while two others are being written. `take_save_results` returns how it ended. Nobody
        may write the state until `wait_staged` returns. If this run saves without a background, the save is
        over when this returns. Collective. Raises StorageError if it cannot succeed: no space, no directory.
        """
        return self._saver.begin(self._snapshot(state))

    def copy_for_peers(self, state: RunStateToSave) -> Path | None:
        """Copy the state into memory for other peers until `remove_copy`; see `PeerSnapshots.add`."""
        return self._peer_snapshots.add(self._snapshot(state))

    def remove_copy(self, directory: Path) -> None:
        """Remove a copy that `copy_for_peers` made."""
        self._peer_snapshots.remove(directory)

    def take_save_results(self) -> list[SaveResult]:
        """Return the saves that this rank has seen end since the last call. Not collective."""
        return self._saver.take_save_results()

    def take_background_failures(self) -> list[str]:
        """Return why this run no longer saves beside the training, if that is new. Not collective."""
        return self._saver.take_background_failures()

    def wait_for_saves(self) -> int:
        """Wait until every save is over, and return the step of the newest checkpoint, -1 for none.

        Collective. Raises StorageError when they do not come to an end.
        """
        return self._saver.wait_for_saves()

    def close(self, *, wait_s: float | None = None) -> None:
        """Release the writer and its memory after at most `wait_s` seconds for saves. Not collective."""
        self._saver.close(wait_s=wait_s)
        self._peer_snapshots.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error somebody will start again, perhaps from memory.
        is_lost = isinstance(error, RankLost) and not isinstance(error, ReportedElsewhere)
        abort_s = LOST_RANK_S if is_lost else ABORT_S
        self._saver.close(wait_s=None if error is None else abort_s, remove_replicas=error is None)
        self._peer_snapshots.close()

    def restore(
        self,
        parts: Mapping[str, Stateful],
        *,
        reason: str = "start",
        up_to_step: int | None = None,
        fallback: bool = False,
    ) -> Restored | None:
        """Fill `parts` from the newest checkpoint (at or before `up_to_step`), then begin a new incarnation.

        Collective; call it once at each start and each rewind. Returns None, with the parts unchanged, if
        there is no checkpoint. A start takes a newer backup, a rewind only if nothing is here; suspects are
        passed over. fallback: take the newest intact one if the newest is damaged. Raises CheckpointError
        for that otherwise, for a checkpoint of another model, or where all are suspect.
        """
        self._saver.wait_for_saves()
        self._ranks.poll_on_first(self._place.refresh)
        names = self._ranks.poll_on_first(lambda: self._restorable(up_to_step))
        restored = self._from_memory(names, parts) if up_to_step is None else None
        restored = restored or self._first_that_loads(names, parts, up_to_step=up_to_step, fallback=fallback)
        base = None if restored is None else (restored.step, restored.incarnation)
        self.incarnation = self._ranks.poll_on_first(lambda: self._place.begin(base=base, reason=reason))
        if self._backup is not None:
            self._backup.wake()
        self._saver.committed_step = -1 if restored is None else restored.step
        self._saver.prepare(parts)
        return restored

    def adopt(
        self, parts: Mapping[str, Stateful], directory: Path, *, reason: str, check: Callable[[], None]
    ) -> Restored:
        """Fill `parts` from a checkpoint that another peer made, then begin a new incarnation from there.

        Steps that this run directory holds beyond it are no longer part of the run. Collective.
        check: called with `parts` filled. If it raises, loading fails with a CheckpointError; the run's
        incarnations stay as they were, but the parts must be restored.
        """
        self._saver.wait_for_saves()
        restored = self._load(source_of(directory), parts, is_ours=False)
        check()
        base = (restored.step, self.incarnation)
        self.incarnation = self._ranks.poll_on_first(lambda: self._place.begin(base=base, reason=reason))
        self._saver.committed_step = -1
        return restored

    def wait_staged(self) -> None:
        """Wait until no save reads the state; code that writes state calls it first. Not collective."""
        self._saver.wait_staged()

    def checkpoints(self) -> tuple[CommittedCheckpoint, ...]:
        """Return the checkpoints that are part of the run, oldest first."""
        return checkpoints(self._rundir)

    def listing_changed(self) -> tuple[int, ...]:
        """Return when `checkpoints` may last have changed; the value is equal while they have not."""
        return listing_changed(self._rundir)

    def newest(self, *, up_to_step: int | None = None) -> CommittedCheckpoint | None:
        """Return the newest checkpoint at or before a step; None if there is none."""
        return next(iter(self._candidates(up_to_step)), None)

    def reaches_back_to(self, step: int) -> bool:
        """Whether `restore(up_to_step=step)` would find a checkpoint, here or in the backup. Collective."""
        self._saver.wait_for_saves()
        return bool(self._ranks.poll_on_first(lambda: self._restorable(step)))

    def oldest_name(self) -> str:
        """Return the name of the oldest checkpoint that is here and trusted; '' for none. Collective."""
        names = self._ranks.poll_on_first(lambda: [item.name for item in self._candidates(None)])
        return names[-1] if names else ""

    def mark_suspects(self, *, clean_step: int, why: str) -> list[str]:
        """Mark the checkpoints after a step as not to be gone on from; return their names. Collective."""
        self._saver.wait_for_saves()
        mark = partial(mark_suspects, self._rundir, clean_step=clean_step, why=why)
        marked = self._ranks.poll_on_first(lambda: self._place.mark(mark(self.checkpoints())))
        if self._backup is not None:
            self._backup.wake()
        return list(marked)

    def _snapshot(self, state: RunStateToSave) -> StateSnapshot:
        collected = collect(state.parts)
        return StateSnapshot(
            step=state.step,
            incarnation=self.incarnation,
            state=collected,
            values={**collected.values, **state.values},
            about=state.about,
            run_length_steps=state.run_length_steps,
        )

    def _candidates(self, up_to_step: int | None, *, warns: bool = False) -> list[CommittedCheckpoint]:
        last = float("inf") if up_to_step is None else up_to_step
        return trusted([item for item in reversed(self.checkpoints()) if item.step <= last], warns=warns)

    def _restorable(self, up_to_step: int | None) -> list[list[str]]:
        """Return [its URL, name] of what can be restored, newest first; a local checkpoint has the URL ''."""
        local = [["", item.name] for item in self._candidates(up_to_step, warns=True)]
        here = [item.name for item in self.checkpoints()]
        is_start = up_to_step is None
        if self._backup is None or (local and not is_start):
            refuse_if_only_suspects(here if is_start and not local else ())
            return local
        if local:  # at a start, others may have gone on with the run while this machine was away
            newer = self._backup.newer()
            tell_of_newer(newer, here=local[0][1])
            return [[source.place(), source.name] for source in newer] + local
        copies = self._backup.restorable(instead_of=here, up_to_step=up_to_step)
        return [[source.place(), source.name] for source in copies]

    def _in_turn(
        self, names: list[list[str]], up_to_step: int | None, *, with_backups: bool
    ) -> Iterator[list[str]]:
        """Yield these checkpoints, then perhaps what backups hold beside them. Collective."""
        yield from names
        if names and with_backups:
            yield from self._ranks.poll_on_first(partial(self._backed_up, names, up_to_step))

    def _backed_up(self, tried: Sequence[Sequence[str]], up_to_step: int | None) -> list[list[str]]:
        """Return what `_restorable` does of the backups that were not tried yet, also of what is here."""
        if self._backup is None:
            return []
        try:
            copies = self._backup.restorable(up_to_step=up_to_step)
        except (CheckpointError, StorageError, OfflineRefused) as error:  # what is damaged is told too
            log.warning("no backup could be taken instead: %s", error)
            return []
        found = [[copy.place(), copy.name] for copy in copies]
        return [item for item in found if item not in tried]

    def _source(self, url: str, name: str) -> Source:
        return RemoteCheckpoint(place_at(url), "") if url else self._place.source(name)

    def _from_memory(self, names: list[list[str]], parts: Mapping[str, Stateful]) -> Restored | None:
        """Fill `parts` from the nodes' memory, if that is at least as new as what is on disk."""
        if not self._section.partner_copies:
            return None
        life = self._ranks.run_on_first(lambda: identity(self._rundir))
        if not life:  # what memory holds for this path belongs to another run
            return None
        replicas = MemoryReplicas(Path(self._section.memory_directory), self._rundir.path, life)
        newest = find_in_memory(replicas, self._ranks, partial(unmarked, self._rundir))
        if newest is None or (names and newest.base < (parse_name(names[0][1]) or newest.base)):
            return None
        try:
            restored = self._load(newest.source, parts, readers=newest.readers)
        except DamagedCheckpoint as error:
            log.warning("the copy in memory was passed over: %s", error.message)
            return None
        log.info("%s was restored from memory", newest.source.name)
        return restored

    def _first_that_loads(
        self,
        names: list[list[str]],
        parts: Mapping[str, Stateful],
        *,
        up_to_step: int | None,
        fallback: bool,
    ) -> Restored | None:
        """Load the newest of these, or the newest that is intact; a fallback also tries their backups."""
        damage: CheckpointError | None = None
        for url, name in self._in_turn(names, up_to_step, with_backups=fallback):
            try:
                return self._load(self._source(url, name), parts)
            except DamagedCheckpoint as error:
                damage = error
                if not fallback:
                    break
                log.warning("%s was passed over: %s", name, error.message)
        if damage is None:
            return None
        raise refusal_of_damage(
            damage, self._ranks.poll_on_first(lambda: self._newest_intact([name for _, name in names[1:]]))
        ) from damage

    def _load(
        self,
        source: Source,
        parts: Mapping[str, Stateful],
        *,
        readers: Mapping[str, Sequence[int]] | None = None,
        is_ours: bool = True,
    ) -> Restored:
        values = load_checkpoint(source, collect(parts).entries, ranks=self._ranks, readers=readers)
        read: list[Manifest] = []
        self._ranks.poll_on_all(lambda: read.append(read_manifest(source)))
        (manifest,) = read
        for part, stateful in parts.items():
            if part not in values:
                raise CheckpointError(
                    f"{source.place()} holds nothing of {part!r}, which this run has",
                    remedy="It was saved by another version, or with another recipe: use another --run.",
                )
            stateful.load_state_values(values[part])
        if readers is None and is_ours:  # data read from memory says nothing about the disk
            self._intact.add(source.name)
        return Restored(
            step=manifest.step,
            incarnation=manifest.incarnation,
            directory=self._rundir.checkpoints / source.name,
            values=values,
            about=manifest.about,
        )

    def _newest_intact(self, names: Sequence[str]) -> str:
        """Return the newest of these checkpoints whose every byte is right; '' if there is none."""
        by_name = {item.name: item for item in self._candidates(None)}
        intact = newest_intact(by_name[name] for name in names if name in by_name)
        return "" if intact is None else intact.name

    def _committed(self, name: str, run_length_steps: int | None) -> None:
        if self._backup is not None:
            self._backup.wake()
        self._run_length_steps = run_length_steps
        self._place.saved()
        self._prune_or_tell(f"{name} is there, but older checkpoints were not removed")

    def _prune_or_tell(self, otherwise: str) -> None:
        try:
            with self._pruning:
                self._prune(self._run_length_steps)
        except (StorageError, OSError) as error:  # OSError: the directory cannot be listed for a moment
            log.warning("%s: %s", otherwise, error)

    def _prune(self, run_length_steps: int | None) -> None:
        """Remove the checkpoints that the retention rules do not keep; no file's contents are read.

        The newest known to be intact is always kept: all ranks have read it back, or it was restored.
        """
        not_backed_up = {item.name for item in self._backup.in_use()} if self._backup else ()
        decided = prune_plan(
            self._rundir,
            section=self._section,
            run_length_steps=run_length_steps,
            is_intact=lambda item: item.name in self._intact,
            not_backed_up=not_backed_up,
            reach_steps=self.reach_steps,
        )
        for fate in decided:
            if not fate.why:
                self._place.remove(fate.checkpoint.directory)
