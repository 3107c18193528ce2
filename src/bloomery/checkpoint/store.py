"""The store of a run: saves its state, brings it back, and keeps what should be kept."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.checkpoint.catalogue import Found, abandoned_checkpoints, checkpoints, newest_intact
from bloomery.checkpoint.commit import (
    Part,
    begin_partial,
    commit,
    partial_directory,
    remove_checkpoint,
    sweep,
)
from bloomery.checkpoint.load import load_checkpoint
from bloomery.checkpoint.manifest import DamagedCheckpoint, checkpoint_name, now, read_manifest
from bloomery.checkpoint.retention import keep
from bloomery.checkpoint.save import finished, write_part
from bloomery.checkpoint.state import Collected, Json, Stateful, collect
from bloomery.checkpoint.verify import verify
from bloomery.config.keeping import CheckpointSection
from bloomery.errors import BloomeryError, CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.rundir import RunDir

log = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
"""Returns the JSON value of every rank, in their order, on every rank. Collective over the peer."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What came back. `step` and `incarnation` name the checkpoint; tensors and parts are already filled."""

    step: int
    incarnation: int
    directory: Path
    values: Mapping[str, Mapping[str, Any]]  # Any: JSON
    about: Mapping[str, Json]


def alone(value: Any) -> list[Any]:  # Any: JSON
    """Gather where there is one rank."""
    return [value]


class Store:
    """Saves and restores the state of one run. The process (group) that owns it holds the run directory.

    incarnation: the life of the run that saves are marked with; 0 until the first `restore`.
    section: may be replaced while running.
    """

    def __init__(
        self,
        rundir: RunDir,
        section: CheckpointSection,
        *,
        rank: int = 0,
        world: int = 1,
        gather: Gather = alone,
    ) -> None:
        self.section = section
        self.incarnation = 0
        self._rundir, self._rank, self._world, self._gather = rundir, rank, world, gather
        self._intact: set[str] = set()

    def save(
        self,
        parts: Mapping[str, Stateful],
        *,
        step: int,
        values: Mapping[str, Mapping[str, Json]] | None = None,
        about: Mapping[str, Json] | None = None,
        run_length_steps: int | None = None,
    ) -> Path:
        """Save the state after `step`, drop what need not be kept, and return the checkpoint's directory.

        Collective: each rank passes the parts whose tensors it is to write; replicas are written by one. The
        values are the first rank's: those of its parts, and `values`. When it returns, everything is durable.
        Raises StorageError on every rank when one could not write; earlier checkpoints are untouched.
        """
        directory = self._rundir.checkpoints
        present = finished(directory, step=step, incarnation=self.incarnation) if self._rank == 0 else None
        if self._gather(present is not None)[0]:
            return self._path(step)
        state = collect(parts)
        partial = partial_directory(directory, step=step, incarnation=self.incarnation)
        try:
            self._together(lambda: begin_partial(partial) if self._rank == 0 else None)
            written = self._together(lambda: self._write(partial, state))
            merged = {**state.values, **(values or {})}
            self._together(
                lambda: self._commit(partial, written, step=step, values=merged, about=about or {})
            )
        except BaseException:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # the error that flies is the one that counts
            raise
        self._together(lambda: self._prune(run_length_steps) if self._rank == 0 else None)
        return self._path(step)

    def restore(
        self,
        parts: Mapping[str, Stateful],
        *,
        reason: str = "start",
        up_to_step: int | None = None,
        fallback: bool = False,
    ) -> Restored | None:
        """Fill `parts` from the newest checkpoint (at or before `up_to_step`), then begin a new incarnation.

        Collective; call it once at each start and once at each rewind. Returns None where there is nothing to
        restore: the new incarnation then starts from nothing, and the parts are as they were.
        Raises CheckpointError when the newest is damaged, naming it and the newest intact one; `fallback`
        takes that one instead. Raises it, too, for a checkpoint of another model.
        """
        self._together(lambda: self._sweep() if self._rank == 0 else None)
        names = [item.name for item in self._candidates(up_to_step)] if self._rank == 0 else []
        names = self._gather(names)[0]
        restored = self._first_that_loads(names, parts, fallback=fallback)
        base = None if restored is None else (restored.step, restored.incarnation)
        numbers = self._together(
            lambda: begin(self._rundir, base=base, reason=reason) if self._rank == 0 else None
        )
        self.incarnation = numbers[0]
        return restored

    def settle(self) -> None:
        """Return when no save reads the state any more. Every writer of state calls it just before it writes.

        Saving is synchronous, so the state is always settled.
        """

    def checkpoints(self) -> tuple[Found, ...]:
        """Return the checkpoints that are part of the run, oldest first."""
        return checkpoints(self._rundir)

    def newest(self, *, up_to_step: int | None = None) -> Found | None:
        """Return the newest checkpoint at or before a step; None when there is none."""
        return next(iter(self._candidates(up_to_step)), None)

    def _sweep(self) -> None:
        for leftover in sweep(self._rundir.checkpoints):
            log.info("removed an unfinished checkpoint: %s", leftover.name)

    def _write(self, partial: Path, state: Collected) -> dict[str, Json]:
        return write_part(partial, state.entries, rank=self._rank, world=self._world).to_json()

    def _commit(
        self,
        partial: Path,
        written: list[Any],
        *,
        step: int,
        values: Mapping[str, Mapping[str, Json]],
        about: Mapping[str, Json],
    ) -> None:
        if self._rank == 0:
            commit(
                partial,
                [Part.from_json(part) for part in written],
                step=step,
                incarnation=self.incarnation,
                time=now(),
                values=values,
                about=about,
            )

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        """Do something on each rank and return all results; what fails on one raises on all."""
        result, failure = None, None
        try:
            result = act()
        except BloomeryError as error:
            failure = error
        outcomes = self._gather({"result": result, "failure": None if failure is None else _told(failure)})
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome["failure"] is not None:
                raise _retold(outcome["failure"], rank=rank)
        return [outcome["result"] for outcome in outcomes]

    def _candidates(self, up_to_step: int | None) -> list[Found]:
        found = reversed(self.checkpoints())
        return [item for item in found if up_to_step is None or item.step <= up_to_step]

    def _first_that_loads(
        self, names: list[str], parts: Mapping[str, Stateful], *, fallback: bool
    ) -> Restored | None:
        damage: CheckpointError | None = None
        for name in names:
            try:
                return self._load(self._rundir.checkpoints / name, parts)
            except DamagedCheckpoint as error:
                damage = error
                if not fallback:
                    break
                log.warning("%s was passed over: %s", name, error.message)
        if damage is None:
            return None
        raise self._refusal(damage, names) from damage

    def _load(self, directory: Path, parts: Mapping[str, Stateful]) -> Restored:
        values: dict[str, Any] = {}

        def fill() -> None:
            values.update(load_checkpoint(directory, collect(parts).entries))

        self._together(fill)
        manifest = read_manifest(directory)
        for part, stateful in parts.items():
            if part not in values:
                raise CheckpointError(
                    f"{directory} holds nothing of {part!r}, which this run has",
                    remedy="It was saved by another version, or with another recipe: use another --run.",
                )
            stateful.load_state_values(values[part])
        self._intact.add(directory.name)
        return Restored(
            step=manifest.step,
            incarnation=manifest.incarnation,
            directory=directory,
            values=values,
            about=manifest.about,
        )

    def _refusal(self, damage: CheckpointError, names: list[str]) -> CheckpointError:
        """Return the message for a damaged checkpoint, with the way on."""
        found = {item.name: item for item in self._candidates(None)}
        intact = newest_intact(found[name] for name in names[1:] if name in found)
        if intact is None:
            remedy = (
                "No older checkpoint is intact: restore one from a backup, or start anew in another --run."
            )
        else:
            remedy = (
                f"The newest intact one is {intact.name}: continue from it with --fallback. "
                "Look at the disk before you trust it again."
            )
        return CheckpointError(damage.message, remedy=remedy)

    def _prune(self, run_length_steps: int | None) -> None:
        """Remove what need not be kept, once the newest is known to be intact on the disk."""
        found = self.checkpoints()
        intact = next((item for item in reversed(found) if self._is_intact(item)), None)
        if intact is None:
            log.warning("no checkpoint of the run is intact: none is removed")
            return
        kept = keep(
            (item.step for item in found),
            section=self.section,
            run_length_steps=run_length_steps,
            newest_intact=intact.step,
        )
        newest_of_step = {item.step: item for item in found}
        surplus = [item for item in found if item.step not in kept or newest_of_step[item.step] != item]
        overtaken = [item for item in abandoned_checkpoints(self._rundir) if item.step <= intact.step]
        for item in (*surplus, *overtaken):
            if item != intact:
                remove_checkpoint(item.directory)

    def _is_intact(self, found: Found) -> bool:
        if found.name not in self._intact:
            problems = verify(found.directory)
            if problems:
                log.warning("%s is damaged: %s", found.name, problems[0])
                return False
            self._intact.add(found.name)
        return True

    def _path(self, step: int) -> Path:
        return self._rundir.checkpoints / checkpoint_name(step, self.incarnation)


def _told(error: BloomeryError) -> dict[str, str]:
    kinds = {DamagedCheckpoint: "damaged", StorageError: "storage"}
    return {"kind": kinds.get(type(error), ""), "message": error.message, "remedy": error.remedy}


def _retold(failure: Mapping[str, str], *, rank: int) -> BloomeryError:
    """Return another rank's error as this rank's."""
    message = f"rank {rank}: {failure['message']}"
    if failure["kind"] == "damaged":
        return DamagedCheckpoint(message)
    kind = StorageError if failure["kind"] == "storage" else CheckpointError
    return kind(message, remedy=failure["remedy"])
