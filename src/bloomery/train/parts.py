"""Everything a run is made of: built once, in order, and what the loop asks of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bloomery.checkpoint.state import Json, Stateful
from bloomery.checkpoint.store import Restored, Store
from bloomery.config.recipe import Recipe
from bloomery.config.resume import apply_free
from bloomery.data.batches import Batches
from bloomery.data.megatron import MegatronOrder
from bloomery.data.order import Order
from bloomery.elastic.outer import Outer
from bloomery.errors import BloomeryError, ConfigError, DataError, StorageError
from bloomery.events.journal import Journal
from bloomery.events.records import Facts, StepReport
from bloomery.guard.judge import Guards, build_guards
from bloomery.guard.verdict import Verdict
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import LossScale, resolve_precision
from bloomery.plan.schedule import (
    Phase,
    learning_rate,
    length_in_unit,
    phase_at,
    progress,
    steps_of_peer,
    total_samples,
)
from bloomery.train.control import Control
from bloomery.train.corpora import demand_of, indices_left
from bloomery.train.feed import Feed
from bloomery.train.heldout import HeldOutLoss
from bloomery.train.metrics import Metrics
from bloomery.train.observers import Observers
from bloomery.train.optimizers import Optimizers
from bloomery.train.state import Goal, Outcome, TrainState
from bloomery.train.step import StepParts

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""How long after a save that failed the next one is tried."""
BUSY_S = 1.0
"""How long after one that found both arenas taken."""


@dataclass(kw_only=True)
class Parts:
    """The parts of a run. Methods are collective over the peer: every rank calls them alike."""

    recipe: Recipe
    mesh: Mesh
    model: TrainingModel
    optimizers: Optimizers
    loss_scale: LossScale
    feed: Feed
    outer: Outer
    store: Store
    guards: Guards
    control: Control
    metrics: Metrics
    held_out: HeldOutLoss | None
    journal: Journal
    observers: Observers
    bigrams: Callable[[], Tensor]
    take_fallback: bool
    begun: Callable[[TrainState, str, int], None]
    """Called once for each incarnation, when its number is known."""
    _steps: dict[Phase, StepParts] = field(default_factory=dict)
    _last_report: StepReport | None = None

    @property
    def order(self) -> Order | MegatronOrder:
        """Which samples come next."""
        return self.feed.stream.order

    @property
    def data(self) -> Batches:
        """Reads them."""
        return self.feed.data

    @property
    def stateful(self) -> Mapping[str, Stateful]:
        """Every part with state, by the prefix of its names."""
        return {
            "model": self.model.weights,
            "optim": self.optimizers,
            "loss_scale": self.loss_scale,
            "guards": self.guards,
            "outer": self.outer,
        }

    def restore(self) -> TrainState:
        """The newest checkpoint's state, or a fresh one. Begins an incarnation."""
        return self._restore(reason="start", up_to_step=None)

    def phase(self, state: TrainState) -> Phase:
        """What the position says about batch and precision, with 'auto' resolved for this device."""
        phase = phase_at(self.recipe.train, state.consumed())
        return replace(phase, precision=resolve_precision(phase.precision, self.mesh.device))

    def for_phase(self, phase: Phase) -> StepParts:
        """The step of a phase, with the model computing as it says."""
        self.model.set_phase(precision=phase.precision, recompute=phase.recompute)
        if phase not in self._steps:
            self._steps[phase] = StepParts(
                phase=phase,
                model=self.model,
                optimizers=self.optimizers,
                loss_scale=self.loss_scale if phase.precision == "fp16" else None,
                clip=self.recipe.optim.clip,
                sequence_length=self.recipe.data.sequence_length,
                learning_rate=self._learning_rate,
                average_gradients=self.outer.average_gradients,
                settle=self.store.settle,
            )
            self._journal("phase", self._last_report.step if self._last_report else 0, **_described(phase))
        return self._steps[phase]

    def expect(self, state: TrainState) -> None:
        """Let the data be read ahead for the steps after this one."""
        self.feed.expect(state, phase_of=self.phase, share=self.outer.share)

    def save(self, state: TrainState) -> None:
        """Take a checkpoint of `state`, beside the training where this run saves so.

        One that the disk refuses is told and tried again; the training goes on.
        """
        try:
            begun = self.store.begin_save(self.stateful, **self._snapshot(state))
        except StorageError as refused:
            self._save_failed(state.step, refused)
            return
        if begun:
            self.control.saved()
        else:
            log.warning(
                "no checkpoint at step %d: two are still being written, and a third comes as soon as it can. "
                "Save less often (control/set), or to a faster disk.",
                state.step,
            )
            self.control.save_in(BUSY_S)
        self._tell_saves()

    def _snapshot(self, state: TrainState) -> dict[str, Any]:  # Any: keywords of Store.save
        report, position = self._last_report, state.position
        about: dict[str, Json] = {
            "consumed_samples": position.consumed,
            "consumed_tokens": position.consumed * self.recipe.data.sequence_length,
            "loss": report.loss if report else None,
            **self.feed.about(position.cursor, below=self._stream_end(position.cursor, position.consumed)),
        }
        length = self.recipe.data.sequence_length
        return {
            "step": state.step,
            "values": {"train": state.to_json(), "data": self.feed.to_json()},
            "about": about,
            "run_length_steps": steps_of_peer(self.recipe.train, self.recipe.elastic, sequence_length=length),
        }

    def _save_now(self, state: TrainState) -> None:
        """Take a checkpoint and wait until it is durable. Raises StorageError."""
        try:
            self.store.save(self.stateful, **self._snapshot(state))
        finally:
            self._tell_saves()
        self.control.saved()

    def _tell_saves(self) -> None:
        """Journal what became of the saves that ended since the last call."""
        for saved in self.store.saved():
            if saved.failure is not None:
                self._save_failed(saved.step, saved.failure)
            elif self.mesh.is_first:
                self._journal("checkpoint", saved.step, path=saved.name)
        for why in self.store.degraded():
            step = self._last_report.step if self._last_report else 0
            self._journal("checkpoint_degraded", step, why=why)

    def _save_failed(self, step: int, failure: BloomeryError) -> None:
        log.warning("no checkpoint at step %d, training goes on: %s", step, failure)
        self._journal("checkpoint_failed", step, why=failure.message)
        self.control.save_in(RETRY_S)

    def rewind(self, state: TrainState, *, to_step: int, skip: range, reason: str) -> TrainState:
        """Go back to the newest checkpoint at or before `to_step`, and never use the samples of `skip`."""
        before, skips = self.guards.state_values(), (*state.position.skips, skip)
        self._journal("rewind", state.step, to_step=to_step, skip=[skip.start, skip.stop], reason=reason)
        restored = self._restore(reason=f"rewind: {reason}", up_to_step=to_step)
        position = restored.position
        for one in skips:
            position = position.skipping(one)
        self.guards.rewound(before)
        restored = replace(restored, position=position)
        self._spread_budgets(self.recipe, restored)
        self.observers.rewound(restored.step)
        # At once, so that a crash cannot bring the skipped samples back.
        try:
            self._save_now(restored)
        except StorageError as refused:
            self._save_failed(restored.step, refused)
        return restored

    def adopt(self, directory: Path, why: str) -> TrainState:
        """Go on from a checkpoint that another peer made."""
        reason = f"replaced: {why}"
        restored = self.store.adopt(self.stateful, directory, reason=reason)
        state = self._go_on_from(restored, reason=reason)
        self.observers.rewound(state.step)
        return state

    def offer(self, state: TrainState) -> Path | None:
        """Copy the state into memory, as a checkpoint that other peers may fetch."""
        return self.store.offer(self.stateful, **self._snapshot(state))

    def honour(self, state: TrainState, facts: Facts) -> TrainState:
        """Apply what control files asked for: skips, and changes of free settings."""
        if not (facts.skip_requested or facts.settings_requested):
            return state
        for first, end in facts.skip_requested:
            state = self.outer.skipping(state, range(first, end))
            skips: list[Json] = [[skip.start, skip.stop] for skip in state.position.skips]
            self._journal("skip", state.step, first=first, end=end, skips=skips)
            self._spread_budgets(self.recipe, state)
        for key, value in facts.settings_requested:
            try:
                self._adopt(apply_free(self.recipe, key, value, data_degree=self.mesh.data.degree), state)
            except (ConfigError, DataError) as refused:
                log.warning("control/set was refused: %s", refused)
                self._journal("setting_refused", state.step, key=key, value=value, why=str(refused))
            else:
                self._journal("setting", state.step, key=key, value=value)
        return replace(state, goal=goal_of(self.recipe))

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Journal the step, and show it to the observers."""
        self._last_report = report
        told = report.to_json()
        del told["step"]
        self._journal("step", report.step, **told)
        end = self._stream_end(report.cursor, report.consumed_samples)
        for ended in self.feed.passed(report.cursor, below=end):
            self._journal("epoch_end", report.step, **ended)
        self._tell_saves()
        self.observers.tell(report, verdict)

    def conclude(self, state: TrainState) -> Outcome:
        """Save what is not saved yet, and say how it ended."""
        outcome = state.stopped or Outcome(reason="the samples are done", step=state.step, finished=True)
        if outcome.finished and self._last_report and self.held_out and self.held_out.is_owed(state):
            self._journal("evaluation", state.step, **self.held_out.run(state))
        newest = self.store.finish()
        self._tell_saves()
        if self.recipe.checkpoint.at_end and not outcome.failed and newest != state.step:
            self._save_now(state)
        self._journal(
            "end", state.step, reason=outcome.reason, finished=outcome.finished, failed=outcome.failed
        )
        return outcome

    def _restore(self, *, reason: str, up_to_step: int | None) -> TrainState:
        restored = self.store.restore(
            self.stateful, reason=reason, up_to_step=up_to_step, fallback=self.take_fallback
        )
        if restored is None:
            self.model.initialise(seed=self.recipe.run.seed, bigrams=self.bigrams)
            self.optimizers.reset()
            self.guards.load_state_values({})
            self.outer.load_state_values({})
            state = TrainState(goal=goal_of(self.recipe))
            self.begun(state, reason, self.store.incarnation)
            return state
        return self._go_on_from(restored, reason=reason)

    def _go_on_from(self, restored: Restored, *, reason: str) -> TrainState:
        """The state that a checkpoint holds, in its order of samples."""
        state = TrainState.from_json(restored.values["train"], goal=goal_of(self.recipe))
        mixed = self.feed.follow(
            restored.values["data"],
            restored.directory.name,
            at=state.position.cursor,
            left=indices_left(self.recipe, step=state.step, position=state.position),
        )
        self.begun(state, reason, self.store.incarnation)
        if mixed is not None:
            self._journal("mixture", state.step, **mixed)
        return state

    def _stream_end(self, cursor: int, consumed: int) -> int:
        """The stream index at which the run ends, as far as skips are passed."""
        samples = total_samples(self.recipe.train, sequence_length=self.recipe.data.sequence_length)
        return samples + cursor - consumed

    def _adopt(self, recipe: Recipe, state: TrainState) -> None:
        """Make a recipe with other free settings the run's. Raises DataError for a length against budgets."""
        self._spread_budgets(recipe, state)
        guards = build_guards(checkpoint=recipe.checkpoint, guard=recipe.guard)
        guards.load_state_values(self.guards.state_values())
        self.guards = guards
        self.store.section = recipe.checkpoint
        if self.held_out is not None:
            self.held_out.section = recipe.evaluate
        self.recipe = recipe
        self._steps.clear()

    def _spread_budgets(self, recipe: Recipe, state: TrainState) -> None:
        """Let budgets be spent just when the run of this recipe and position ends. Raises DataError."""
        mixed = self.feed.demand(
            demand_of(recipe, self.feed.stream.demand.claims),
            at=state.position.cursor,
            left=indices_left(recipe, step=state.step, position=state.position),
        )
        if mixed is not None:
            self._journal("mixture", state.step, **mixed)

    def _learning_rate(self, state: TrainState) -> float:
        """Of the step that starts from `state`: schedules are read at the step's end."""
        recipe, batch = self.recipe, self.phase(state).global_batch
        at = progress(
            recipe.schedule,
            step=state.step + 1,
            consumed=state.consumed(beyond=batch),
            sequence_length=recipe.data.sequence_length,
        )
        length = length_in_unit(recipe.train, recipe.schedule, sequence_length=recipe.data.sequence_length)
        return learning_rate(recipe.optim, recipe.schedule, at=at, length=length)

    def _journal(self, event: str, step: int, **fields: Json) -> None:
        self.journal.write(event, incarnation=self.store.incarnation, step=step, **fields)


def goal_of(recipe: Recipe) -> Goal:
    """Where the recipe says the run ends."""
    if recipe.train.steps:
        return Goal(steps=recipe.train.steps)
    return Goal(samples=total_samples(recipe.train, sequence_length=recipe.data.sequence_length))


def _described(phase: Phase) -> dict[str, Json]:
    return {
        "global_batch": phase.global_batch,
        "micro_batch": phase.micro_batch,
        "precision": phase.precision,
        "recompute": phase.recompute,
    }
