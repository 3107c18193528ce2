"""Builds the parts of a run from its recipe, in order, once; and closes them in reverse."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from bloomery import __version__
from bloomery.checkpoint.backup import Backup
from bloomery.checkpoint.store import Store
from bloomery.config.dump import settings_of
from bloomery.config.load import LoadedRecipe
from bloomery.config.parallel import SPLIT_BACKWARD
from bloomery.config.recipe import Recipe
from bloomery.config.resume import Changes
from bloomery.data.batches import Batches, MicroBatch, held_out_batches
from bloomery.data.bigrams import count_bigrams
from bloomery.data.prepare import Prepared, prepare
from bloomery.data.tokenize import Progress
from bloomery.events.heartbeat import Heartbeat
from bloomery.events.holder import hold
from bloomery.events.journal import Journal
from bloomery.events.rundir import RunDir
from bloomery.guard.judge import build_guards
from bloomery.parallel.build import TrainingModel, build_training_model
from bloomery.parallel.errands import Tick
from bloomery.parallel.mesh import Mesh, join_mesh
from bloomery.parallel.precision import LossScale, measure_peak_flops, resolve_precision
from bloomery.plan.compute import TokenCost, token_cost
from bloomery.plan.schedule import phase_at, steps_of_peer
from bloomery.train.bubble import bubble_warning
from bloomery.train.compilation import Compilation, decide
from bloomery.train.control import Control
from bloomery.train.corpora import held_out_documents, stream_of_run, training_documents
from bloomery.train.ending import backed_up_at_the_end
from bloomery.train.feed import Feed
from bloomery.train.heldout import HeldOutLoss
from bloomery.train.metrics import Metrics
from bloomery.train.observers import (
    HeartbeatObserver,
    LogLines,
    Observer,
    Observers,
    ProgressBar,
    ReadingWatch,
    TensorBoard,
)
from bloomery.train.optimizers import Optimizers
from bloomery.train.options import StartOptions
from bloomery.train.parts import Parts
from bloomery.train.peering import announced, build_outer, peering_of_environment, serve_outer
from bloomery.train.resume import changes_of, keep_recipe
from bloomery.train.state import TrainState


@contextmanager
def build_parts(loaded: LoadedRecipe, rundir: RunDir, options: StartOptions) -> Iterator[Parts]:
    """Take the run directory, prepare its data, build the model and everything around it.

    Collective over the peer. Closes in reverse order, also when training fails.
    """
    with ExitStack() as stack:
        recipe = loaded.recipe
        mesh = join_mesh(
            recipe.parallel,
            recipe=settings_of(recipe),
            choices=lambda device: _choices(recipe, device),
        )
        stack.callback(mesh.close)

        def begin(tick: Tick) -> tuple[Changes, Prepared]:
            rundir.create()
            stack.enter_context(hold(rundir))
            changes = changes_of(loaded, rundir)
            with options.data_progress() as progress:
                return changes, prepare(recipe.data, rundir.data, progress=_ticking(progress, tick))

        # The others wait here: they must find the data prepared, and must not race for the directory.
        begun = mesh.first(begin, doing="preparing the data")
        changes, prepared = begun or (Changes(), prepare(recipe.data, rundir.data))
        control = Control(rundir, mesh)
        stack.callback(control.close)
        cost = token_cost(
            recipe.model,
            vocabulary=prepared.vocabulary_size,
            sequence_length=recipe.data.sequence_length,
            recompute=recipe.train.recompute,
        )
        total_steps = steps_of_peer(recipe.train, recipe.elastic, sequence_length=recipe.data.sequence_length)
        compilation = _compilation(recipe, cost, mesh, total_steps)
        model = build_training_model(
            recipe.model,
            vocabulary=prepared.vocabulary_size,
            sequence_length=recipe.data.sequence_length,
            optim=recipe.optim,
            loss=recipe.loss,
            loss_chunk=recipe.train.loss_chunk,
            seed=recipe.run.seed,
            mesh=mesh,
            parallel=recipe.parallel,
            compiled=compilation.on,
            resets_positions=recipe.data.reset_positions,
            precision=resolve_precision(phase_at(recipe.train, 0).precision, mesh.device),
        )
        feed = _build_feed(recipe, prepared, mesh)
        stack.callback(feed.data.close)
        held_out = _build_held_out(recipe, prepared, model, mesh)
        journal = stack.enter_context(Journal(rundir.journal(rank=mesh.rank)))
        observers = Observers([])
        stack.callback(observers.close)
        beginning = _Beginning(
            loaded=loaded,
            changes=changes,
            mesh=mesh,
            compilation=compilation,
            rundir=rundir,
            options=options,
            total_steps=total_steps,
            journal=journal,
            observers=observers,
        )
        backup = _build_backup(recipe, rundir, mesh, control, options, stack)
        store = stack.enter_context(
            Store(
                rundir,
                recipe.checkpoint,
                rank=mesh.rank,
                world=mesh.world,
                gather=mesh.gather,
                exchange=mesh.exchange,
                backup=backup,
            )
        )
        peering = options.peering or peering_of_environment(recipe, mesh, stack)
        parts = Parts(
            recipe=recipe,
            mesh=mesh,
            model=model,
            optimizers=Optimizers(
                model.weights,
                recipe.optim,
                precision=resolve_precision(recipe.train.precision, mesh.device),
            ),
            loss_scale=LossScale(mesh.device),
            feed=feed,
            outer=build_outer(recipe, model=model, mesh=mesh, feed=feed, peering=peering),
            store=store,
            guards=build_guards(checkpoint=recipe.checkpoint, guard=recipe.guard),
            control=control,
            metrics=Metrics(
                mesh=mesh,
                control=control,
                interludes=announced([held_out] if held_out else [], peering),
                cost=cost,
                peak_flops=measure_peak_flops(mesh.device, recipe.train.precision),
                sequence_length=recipe.data.sequence_length,
                queue=lambda: feed.data.queue,
            ),
            held_out=held_out,
            journal=journal,
            observers=observers,
            bigrams=lambda: _bigrams(recipe, prepared),
            take_fallback=options.take_fallback,
            begun=beginning.begun,
        )
        serve_outer(parts)
        yield parts


def _ticking(progress: Progress, tick: Tick) -> Progress:
    def told(stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        tick()
        progress(stage, done, total, unit, note)

    return told


def _choices(recipe: Recipe, device: torch.device) -> Mapping[str, str]:
    """What this device makes of settings that say 'auto', where ranks must not differ."""
    precisions = {recipe.train.precision, *(precision for _, precision in recipe.train.precision_changes)}
    return {"train.precision": resolve_precision("auto", device)} if "auto" in precisions else {}


def _compilation(recipe: Recipe, cost: TokenCost, mesh: Mesh, total_steps: int) -> Compilation:
    if recipe.parallel.zero == 3 and mesh.shard.degree > 1:
        return Compilation(on=False, why="parallel.zero = 3 gathers weights block by block")
    if mesh.pipeline.degree > 1 and recipe.parallel.schedule in SPLIT_BACKWARD:
        return Compilation(
            on=False, why=f"parallel.schedule = {recipe.parallel.schedule} splits the backward"
        )
    tokens = total_steps * recipe.train.global_batch * recipe.data.sequence_length
    return decide(recipe.train.compile, device=mesh.device, run_flops=cost.hardware * tokens / mesh.world)


def _build_feed(recipe: Recipe, prepared: Prepared, mesh: Mesh) -> Feed:
    datasets = training_documents(recipe.data, prepared.train)
    stream = stream_of_run(recipe, prepared.train, datasets)
    data = Batches(
        stream.order,
        datasets,
        sequence_length=recipe.data.sequence_length,
        mask_documents=recipe.data.mask_documents,
        rank=mesh.data.index,
        degree=mesh.data.degree,
        eod=prepared.end_of_document_id,
        prefetch=recipe.data.prefetch,
        threads=recipe.data.read_threads,
        vocabulary_size=prepared.vocabulary_size,
        device=mesh.device,
    )
    return Feed(
        stream=stream,
        data=data,
        names=tuple(dataset.name for dataset in prepared.train),
        fingerprint=prepared.fingerprint,
        is_tokenised_here=bool(recipe.data.sources),
    )


def _bigrams(recipe: Recipe, prepared: Prepared) -> torch.Tensor:
    datasets = training_documents(recipe.data, prepared.train)
    return torch.from_numpy(count_bigrams(datasets, prepared.vocabulary_size))


def _build_backup(
    recipe: Recipe, rundir: RunDir, mesh: Mesh, control: Control, options: StartOptions, stack: ExitStack
) -> Backup | None:
    """The backup, on the rank that holds the run. Its end, on all, comes after the store's last save."""
    if not recipe.backup.url:
        return None
    backup = Backup(rundir, recipe.backup, run_name=recipe.run.name) if mesh.is_first else None
    stack.enter_context(
        backed_up_at_the_end(backup, mesh, interruptions=lambda: control.interruptions, say=options.say)
    )
    return backup


def _build_held_out(
    recipe: Recipe, prepared: Prepared, model: TrainingModel, mesh: Mesh
) -> HeldOutLoss | None:
    datasets = held_out_documents(recipe.data, prepared)
    if not datasets:
        return None
    wanted, batches = recipe.evaluate.samples, list[MicroBatch]()
    for dataset in datasets:
        rows = min(wanted, 8)
        found = held_out_batches(
            dataset,
            sequence_length=recipe.data.sequence_length,
            rows=rows,
            eod=prepared.end_of_document_id,
            limit=-(-wanted // len(datasets)),
        )
        batches += found
    if not batches:  # datasets without a document: there is nothing to evaluate on
        return None
    return HeldOutLoss(recipe.evaluate, batches, model=model, mesh=mesh)


@dataclass(kw_only=True)
class _Beginning:
    """What is told once an incarnation has its number and its first step."""

    loaded: LoadedRecipe
    changes: Changes
    mesh: Mesh
    compilation: Compilation
    rundir: RunDir
    options: StartOptions
    total_steps: int
    journal: Journal
    observers: Observers

    def begun(self, state: TrainState, reason: str, incarnation: int) -> None:
        """Journal the start and set up those who watch from this step on."""
        self.journal.write(
            "start",
            incarnation=incarnation,
            step=state.step,
            reason=reason,
            position=state.position.to_json(),
            changes={change.key: [change.old, change.new] for change in self.changes.journalled},
            compiled=self.compilation.on,
            compiled_why=self.compilation.why,
            precision=resolve_precision(self.loaded.recipe.train.precision, self.mesh.device),
            ranks=self.mesh.world,
            device=str(self.mesh.device),
            threads=torch.get_num_threads(),
            versions={"bloomery": __version__, "torch": torch.__version__},
            host=os.uname().nodename,
            pid=os.getpid(),
        )
        if self.mesh.is_first and (self.changes or not self.rundir.recipe.exists()):
            keep_recipe(self.loaded, self.rundir)
        self.changes = Changes()
        if self.mesh.is_first and reason == "start":
            self.observers.join(self._watchers(state, incarnation))

    def _watchers(self, state: TrainState, incarnation: int) -> list[Observer]:
        recipe, say = self.loaded.recipe, self.options.say
        say(
            f"step {state.step} of {self.total_steps}, incarnation {incarnation} of {self.rundir.path}; "
            f"{self.mesh.world} × {self.mesh.device}, "
            f"{resolve_precision(recipe.train.precision, self.mesh.device)}, "
            f"{'compiled' if self.compilation.on else 'eager'} ({self.compilation.why})"
        )
        waits = bubble_warning(recipe.train, recipe.parallel, data_degree=self.mesh.data.degree)
        if waits:
            say(waits)
        heartbeat = Heartbeat(self.rundir.heartbeat(rank=self.mesh.rank), incarnation=incarnation)
        watchers: list[Observer] = [HeartbeatObserver(heartbeat), ReadingWatch(say)]
        if self.options.bar:
            watchers.append(ProgressBar(total_steps=self.total_steps, first_step=state.step))
        else:
            watchers.append(
                LogLines(
                    every_steps=recipe.log.every_steps,
                    total_steps=self.total_steps,
                    say=say,
                    started=self.options.started,
                )
            )
        if recipe.log.tensorboard:
            watchers.append(TensorBoard(self.rundir.tensorboard, first_step=state.step))
        return watchers
