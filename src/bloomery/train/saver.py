"""Saves a run's state, offers it to other peers, and restores it: at a start, a rewind, or from a peer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from bloomery.checkpoint.format.manifest import checkpoint_name
from bloomery.checkpoint.format.retention import BEFORE_CLIMB
from bloomery.checkpoint.format.state import Json, Stateful
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.recipe import InitSection
from bloomery.diloco.outer import Outer
from bloomery.errors import BloomeryError, RunBusy, StorageError
from bloomery.events.heartbeat import RankActivity, ignore_activity
from bloomery.events.journal import Journal
from bloomery.events.records import StepReport
from bloomery.guard.corruption import CLEAN_STEP
from bloomery.guard.verdict import Rewind, Stop
from bloomery.interchange.initial_weights import load_initial_weights
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.train.attention_kernel import NOTHING_SAVED, AttentionChoice
from bloomery.train.checkpoint_store import Store
from bloomery.train.control import Control
from bloomery.train.data_stream import DataStream
from bloomery.train.receipts import PROMISE, Receipts
from bloomery.train.saved_state import Restored, RunStateToSave
from bloomery.train.settings import RunSettings
from bloomery.train.state import TrainState

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""Seconds after a failed save until the next one is tried."""
BUSY_S = 1.0
"""Seconds until the next try if two earlier saves were still being written."""
ATTENTION = "attention"
"""The name of the values that a checkpoint has of the kernel of attention, where it was measured."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The model that is trained, with its optimizer state.

    bigrams: returns how often each token follows each other one, for an initial embedding made from counts.
    attention: chooses the kernel of attention when the run's state is restored.
    begin: fills the weights of a run that begins with weights of a directory, collectively; None draws them.
    """

    model: TrainingModel
    optimizers: Optimizers
    loss_scale: LossScale
    bigrams: Callable[[], Tensor]
    attention: AttentionChoice
    begin: Callable[[], None] | None = None

    def initialise(self, *, seed: int) -> None:
        """Give the weights and the loss scale their initial values and clear every moment. Collective over
        the peer.
        """
        if self.begin is None:
            self.model.initialise(seed=seed, bigrams=self.bigrams)
        else:
            self.begin()
        self.optimizers.reset()
        self.loss_scale.reset()


class RunSaver:
    """Saves and restores what training changes. Methods are collective over the peer: every rank calls them.

    last_report: the report of the last step of this process; None before the first.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        outer: Outer,
        settings: RunSettings,
        data_stream: DataStream,
        store: Store,
        control: Control,
        journal: Journal,
        mesh: Mesh,
        on_begin: Callable[[TrainState, str, int], None],
        take_fallback: bool,
        enter: Callable[[RankActivity], None] = ignore_activity,
    ) -> None:
        """on_begin: called with the state, the reason and the number of each incarnation when it begins.

        take_fallback: restore from the newest intact checkpoint where the newest of all is damaged.
        enter: records in the heartbeat the activity that this rank begins.
        """
        self._learner, self._outer, self._settings = learner, outer, settings
        self._data_stream, self._store, self._control = data_stream, store, control
        self._journal, self._mesh = journal, mesh
        self._on_begin, self._take_fallback, self._enter = on_begin, take_fallback, enter
        self._receipts = Receipts(
            settings=settings,
            data_stream=data_stream,
            optimizers=learner.optimizers,
            mesh=mesh,
            journal=journal,
        )
        self._promises: dict[str, Json] = {}
        """What the checkpoints promise that are being saved, by name, for the journal."""
        self.last_report: StepReport | None = None

    @property
    def stateful(self) -> Mapping[str, Stateful]:
        """Return every part whose state a checkpoint holds, by the prefix of its tensors' names."""
        return {
            "model": self._learner.model.weights,
            "optim": self._learner.optimizers,
            "loss_scale": self._learner.loss_scale,
            "guards": self._settings.guards,
            "outer": self._outer,
        }

    def restore(self) -> TrainState:
        """Return the state of the newest checkpoint, or a fresh one, and begin an incarnation."""
        state = self._restore(reason="start", up_to_step=None)
        self._settings.guards.resumed()
        return state

    def reload(self, why: str) -> TrainState:
        """Go back to this run's newest checkpoint, or to its beginning, in a new incarnation."""
        return self._restore(reason=why, up_to_step=None)

    def adopt(self, directory: Path, why: str, check: Callable[[], None]) -> TrainState:
        """Go on from a checkpoint that another peer made. check: see `Store.adopt`."""
        reason = f"replaced: {why}"
        restored = self._store.adopt(self.stateful, directory, reason=reason, check=check)
        return self._go_on_from(restored, reason=reason)

    def rewind(self, state: TrainState, wanted: Rewind) -> TrainState:
        """Return the state of a checkpoint that is early enough, without the samples that are to be skipped.

        Where there is no such checkpoint, it is the state of a run that stops here, or that goes on as if
        nothing had been asked, as the rewind says.
        """
        reason = wanted.reason
        to_step = self._reachable_step(wanted)
        if to_step is None:
            latest = wanted.to_step if wanted.latest_step is None else wanted.latest_step
            why = f"{reason}; but no checkpoint at or before step {latest} is there to go back to"
            if oldest := self._store.oldest_name():
                why = f"{why}, here or in a backup: the oldest here is {oldest}"
                if wanted.latest_step is not None:
                    why = f"{why}, which was saved after the problem began"
            self._record("rewind_impossible", state.step, to_step=wanted.to_step, reason=why)
            if wanted.may_go_on:
                log.warning("%s: the run goes on", why)
                return state
            return state.halting(why, failed=True)
        self.journal_ended_saves()
        histories, skips = self._settings.guards.state_values(), (*state.position.skips, wanted.skip)
        skip: list[Json] = [wanted.skip.start, wanted.skip.stop]
        rung = wanted.rung.name.lower()
        self._record("rewind", state.step, to_step=to_step, skip=skip, rung=rung, reason=reason)
        # An older one than the damaged one is early enough too; between peers all go back to the same round.
        takes_older = not self._settings.recipe.elastic.inner_steps
        restored = self._restore(reason=f"rewind: {reason}", up_to_step=to_step, takes_older=takes_older)
        position = restored.position
        for samples in skips:
            position = position.skipping(samples)
        self._settings.guards.rewound(histories, rung=wanted.rung)
        restored = replace(restored, position=position)
        restored = self._restraining(restored, state, wanted)
        if wanted.skip or restored.restraints:
            self._receipts.expect_another_loss()
        self._settings.spread_budgets(restored)
        # At once, so that a crash cannot bring the skipped samples back.
        try:
            self._save_and_wait(restored)
        except StorageError as refused:
            self._note_failed_save(restored.step, refused)
        return restored

    def _restraining(self, restored: TrainState, before: TrainState, wanted: Rewind) -> TrainState:
        """Return the restored state with the restraints of before the rewind, and with this rewind's own."""
        restraints = (*restored.restraints, *before.restraints)
        new = self._settings.restraint(wanted.rung, restored, before=before)
        if new is not None:
            self._record("restraint", restored.step, **new.to_json())
            restraints = (*restraints, new)
        return replace(restored, restraints=tuple(dict.fromkeys(restraints)))

    def suspect(self, finding: Rewind | Stop, *, step: int) -> None:
        """Mark the checkpoints that silent corruption may have spoiled, and journal their names."""
        clean_step = int(finding.numbers[CLEAN_STEP])
        names = self._store.mark_suspects(clean_step=clean_step, why=finding.reason)
        self._record("suspect_checkpoints", step, clean_step=clean_step, names=[*names])

    def save(self, state: TrainState) -> None:
        """Save `state`, while the training goes on where this run saves in the background.

        A save that the disk refuses is logged, journalled and tried again later; the training goes on.
        """
        self._enter(RankActivity.SAVING)
        try:
            begun = self._store.begin_save(self._promising(state))
        except StorageError as refused:
            self._note_failed_save(state.step, refused)
            return
        finally:
            self._enter(RankActivity.BETWEEN_STEPS)
        if begun:
            self._control.restart_save_clock()
        else:
            log.warning(
                "no checkpoint at step %d: two are still being written, and a third comes as soon as it can. "
                "Save less often (control/set), or to a faster disk.",
                state.step,
            )
            self._control.save_in(BUSY_S)
        self.journal_ended_saves()

    def copy_for_peers(self, state: TrainState) -> Path | None:
        """Copy the state into memory as a checkpoint that other peers may fetch, and return its directory.

        The result is None if there is no room for it.
        """
        return self._store.copy_for_peers(self._to_save(state))

    def finish(self, state: TrainState, *, save: bool) -> None:
        """Wait until every save has ended. Raises StorageError.

        save: take a checkpoint of `state`, unless the newest is of its step.
        """
        newest = self._store.wait_for_saves()
        self.journal_ended_saves()
        if save and newest != state.step:
            self._save_and_wait(state)

    def journal_ended_saves(self) -> None:
        """Journal how the saves ended that have ended since the last call. Not collective.

        Raises RunBusy where another process has gone on with the run: nothing that is saved here counts.
        """
        for saved in self._store.take_save_results():
            promise = self._promises.pop(saved.name, None)
            if isinstance(saved.failure, RunBusy):
                raise saved.failure
            if saved.failure is not None:
                self._note_failed_save(saved.step, saved.failure)
            elif self._mesh.is_first:
                self._record("checkpoint", saved.step, path=saved.name, promise=promise)
        for why in self._store.take_background_failures():
            step = self.last_report.step if self.last_report else 0
            self._record("checkpoint_degraded", step, why=why)

    def _to_save(self, state: TrainState) -> RunStateToSave:
        position, sequence_length = state.position, self._settings.recipe.data.sequence_length
        end = self._settings.stream_end(cursor=position.cursor, consumed=position.consumed)
        attention = self._learner.attention.to_json()
        return RunStateToSave(
            parts=self.stateful,
            step=state.step,
            values={
                "train": state.to_json(),
                "data": self._data_stream.to_json(),
                **({ATTENTION: attention} if attention else {}),
            },
            about={
                "consumed_samples": position.consumed,
                "consumed_tokens": position.consumed * sequence_length,
                "loss": self.last_report.loss if self.last_report else None,
                "held_out_loss": self._held_out_loss_at(state.step),
                BEFORE_CLIMB: self._settings.guards.step_before_climb(),
                **self._data_stream.about(position.cursor, below=end, skips=position.skips),
            },
            run_length_steps=self._settings.run_length_steps,
        )

    def _held_out_loss_at(self, step: int) -> float | None:
        report = self.last_report
        return report.held_out_loss if report and report.step == step else None

    def _promising(self, state: TrainState) -> RunStateToSave:
        """Return the state with what it promises of the step after it."""
        promise = self._receipts.promise(state).to_json()
        self._promises[checkpoint_name(state.step, self._store.incarnation)] = promise
        to_save = self._to_save(state)
        return replace(to_save, about={**to_save.about, PROMISE: promise})

    def _save_and_wait(self, state: TrainState) -> None:
        """Take a checkpoint and wait until it is durable. Raises StorageError."""
        self._enter(RankActivity.SAVING)
        try:
            self._store.save(self._promising(state))
        finally:
            self.journal_ended_saves()
        self._control.restart_save_clock()

    def _note_failed_save(self, step: int, failure: BloomeryError) -> None:
        log.warning("no checkpoint at step %d, training goes on: %s", step, failure)
        self._record("checkpoint_failed", step, why=failure.message)
        self._control.save_in(RETRY_S)

    def _reachable_step(self, wanted: Rewind) -> int | None:
        """Return the step at or before which a checkpoint is restored; None if there is none."""
        later = () if wanted.latest_step is None else (wanted.latest_step,)
        for step in (wanted.to_step, *later):
            if self._store.reaches_back_to(step):
                return step
        return wanted.to_step if wanted.may_start_anew else None

    def _restore(self, *, reason: str, up_to_step: int | None, takes_older: bool = False) -> TrainState:
        """Restore the newest checkpoint up to a step. takes_older: or, where it is damaged, an older one."""
        self._enter(RankActivity.LOADING)
        fallback = takes_older or self._take_fallback
        restored = self._store.restore(self.stateful, reason=reason, up_to_step=up_to_step, fallback=fallback)
        # Older checkpoints, and those of runs whose recipe names the kernel, say nothing of it.
        saved = NOTHING_SAVED if restored is None else restored.values.get(ATTENTION, NOTHING_SAVED)
        self._learner.attention.begin(saved)
        if restored is not None:
            return self._go_on_from(restored, reason=reason)
        self._learner.initialise(seed=self._settings.recipe.run.seed)
        self._settings.guards.load_state_values({})
        self._outer.load_state_values({})
        state = TrainState(goal=self._settings.goal)
        self._on_begin(state, reason, self._store.incarnation)
        return state

    def _go_on_from(self, restored: Restored, *, reason: str) -> TrainState:
        """Return the state that a checkpoint holds, with the data stream set to the order it was saved in."""
        state = TrainState.from_json(restored.values["train"], goal=self._settings.goal)
        mixture = self._data_stream.follow(
            restored.values["data"],
            restored.directory.name,
            at=state.position.cursor,
            left=self._settings.indices_left(state),
        )
        self._on_begin(state, reason, self._store.incarnation)
        if mixture is not None:
            self._record("mixture", state.step, **mixture)
        self._receipts.check(
            restored, state, other_mixture=mixture is not None, incarnation=self._store.incarnation
        )
        return state

    def complete_receipt(self, report: StepReport) -> None:
        """Journal the receipt of a resume with its first step. Not collective."""
        self._receipts.complete(report, incarnation=self._store.incarnation)

    def _record(self, event: str, step: int, **fields: Json) -> None:
        self._journal.write(event, incarnation=self._store.incarnation, step=step, **fields)


def begins_with(
    init: InitSection, model: TrainingModel, mesh: Mesh, *, say: Callable[[str], None]
) -> Callable[[], None] | None:
    """Return what fills the masters and the working weights from `init.from`; None if that is empty.

    It is collective over the peer, and may be called again, where a run goes back to its beginning.
    say: prints a line for people.
    """
    if not init.from_:
        return None
    ranks = Ranks(rank=mesh.rank, world=mesh.world, gather=mesh.all_gather_object, exchange=mesh.exchange)

    def begin() -> None:
        entries = model.weights.state_entries()
        origin = load_initial_weights(init.from_, entries, model=model.decoder.model, ranks=ranks)
        model.weights.copy_masters_to_working()
        say(f"the weights are those of {origin}; optimizer, schedule and data begin anew")

    return begin
