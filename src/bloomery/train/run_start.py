"""Tells the journal and people of the start of an incarnation, and sets up what follows its steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bloomery import __version__
from bloomery.config.convert import dump_recipe, settings_of
from bloomery.config.load import LoadedRecipe
from bloomery.config.recipe import Recipe
from bloomery.config.resume import SettingChanges
from bloomery.events.heartbeat import Heartbeat
from bloomery.events.incarnation import identity
from bloomery.events.journal import Journal, last_step
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.pipeline_schedule import bubble_warning
from bloomery.parallel.precision import resolve_precision
from bloomery.plan.early_warnings import warnings_of
from bloomery.plan.recomputation import Recomputation
from bloomery.plan.request import with_vocabulary
from bloomery.plan.schedule import steps_at_end
from bloomery.train.attention_kernel import AttentionChoice
from bloomery.train.data_summary import DataSummary
from bloomery.train.observers import Observer, Observers, build_observers
from bloomery.train.settings import StartOptions, keep_recipe
from bloomery.train.state import TrainState
from bloomery.train.step import Compilation
from bloomery.train.trackers import TrackedRun

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunStart:
    """Tells the journal and people of the start of an incarnation, once its number and step are known."""

    loaded: LoadedRecipe
    changes: SettingChanges
    mesh: Mesh
    compilation: Compilation
    attention: AttentionChoice
    recomputation: Recomputation
    rundir: RunDirectory
    options: StartOptions
    journal: Journal
    observers: Observers
    heartbeat: Heartbeat
    summarise: Callable[[], DataSummary]
    recipe_now: Callable[[], Recipe]
    """Returns the recipe with the settings that were changed since the start."""

    def begun(self, state: TrainState, reason: str, incarnation: int) -> None:
        """Journal the start, and set up the observers from this step on."""
        if self.mesh.is_first and reason == "start":
            self._tell_of_missing_steps(state, incarnation)
        self.journal.write(
            "start",
            incarnation=incarnation,
            step=state.step,
            reason=reason,
            position=state.position.to_json(),
            changes={change.key: [change.old, change.new] for change in self.changes.journalled},
            compiled=self.compilation.on,
            compiled_why=self.compilation.why,
            attention=self.attention.decision.to_json(),
            precision=resolve_precision(self.loaded.recipe.train.precision, self.mesh.device),
            recompute=self.recomputation.mode,
            recompute_why=self.recomputation.why,
            ranks=self.mesh.world,
            device=str(self.mesh.device),
            threads=torch.get_num_threads(),
            versions={"bloomery": __version__, "torch": torch.__version__},
            host=os.uname().nodename,
            pid=os.getpid(),
            spent=self.heartbeat.take_spent(),
            **({"recipe": dump_recipe(self.loaded.recipe)} if self.mesh.is_first else {}),
        )
        if self.mesh.is_first and (self.changes or not self.rundir.recipe.exists()):
            keep_recipe(self.loaded, self.rundir)
        self.changes = SettingChanges()
        self.heartbeat.at(step=state.step, incarnation=incarnation)
        if reason != "start":
            self.observers.rewound(state.step)
        elif self.mesh.is_first:
            self.observers.join(self._watchers(state))

    def _tell_of_missing_steps(self, state: TrainState, incarnation: int) -> None:
        """Log which steps are in the checkpoint but missing in the journal on this machine."""
        journalled = last_step(self.journal.path)
        if journalled < state.step:
            self.journal.write(
                "journal_gap", incarnation=incarnation, step=state.step, first=journalled + 1, last=state.step
            )
            log.warning(
                "%s does not tell of steps %d to %d, which the checkpoint has: they were made on another "
                "machine, or by the run of which this is a fork, or it was cut. The curve has a gap there.",
                *(self.journal.path, journalled + 1, state.step),
            )

    def _watchers(self, state: TrainState) -> list[Observer]:
        """Say with what the run begins, and return the observers that follow it."""
        recipe, say, consumed = self.loaded.recipe, self.options.say, state.position.consumed
        length, peers = recipe.data.sequence_length, recipe.elastic.peers if recipe.elastic.inner_steps else 1
        last = steps_at_end(
            recipe.train, sequence_length=length, step=state.step, consumed=consumed, peers=peers
        )
        say(
            f"step {state.step} of {last}, incarnation {self.heartbeat.incarnation} of "
            f"{self.rundir.path}; {self.mesh.world} × {self.mesh.device}, "
            f"{resolve_precision(recipe.train.precision, self.mesh.device)}, "
            f"{'compiled' if self.compilation.on else 'eager'} ({self.compilation.why})"
        )
        if self.attention.decision.kernel:
            say(self.attention.decision.line())
        if self.recomputation.why:
            say(f"train.recompute = {self.recomputation.mode}: {self.recomputation.why}")
        degree = self.mesh.data.degree
        if waits := bubble_warning(recipe.train, recipe.parallel, data_degree=degree, consumed=consumed):
            say(waits)
        summary = self.summarise()
        known = with_vocabulary(self.loaded, summary.vocabulary)
        for warning in warnings_of(known, accelerators=self.mesh.world, consumed=consumed):
            say(f"warning: {warning}")
        figures = summary.to_json()
        self.journal.write("data", incarnation=self.heartbeat.incarnation, step=state.step, **figures)
        if self.options.form == "json":
            self.options.emit({"event": "data", **figures})
        else:
            for line in summary.lines():
                say(line)
        return build_observers(
            recipe.log,
            self.options,
            first_step=state.step,
            total_steps=last,
            last_step=self._last_step,
            rundir=self.rundir,
            device=self.mesh.device,
            tracked=TrackedRun(
                name=recipe.run.name, identity=identity(self.rundir), settings=settings_of(recipe)
            ),
        )

    def _last_step(self, report: StepReport) -> int:
        """Return the number of the last step, by the batch and the peers of a report."""
        recipe = self.recipe_now()
        return steps_at_end(
            recipe.train,
            sequence_length=recipe.data.sequence_length,
            step=report.step,
            consumed=report.consumed_samples,
            peers=report.peers,
        )
