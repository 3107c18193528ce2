"""Builds a run's trainer from its recipe, part by part, and closes the parts in reverse order."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import cast

import torch

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.places import CombinedBackups, refuse_changed_url, run_storage, sections
from bloomery.checkpoint.remote.shared_upload import BackupHelper
from bloomery.config.convert import settings_of
from bloomery.config.findings import Finding, refuse
from bloomery.config.load import LoadedRecipe
from bloomery.config.parallel import SPLIT_BACKWARD
from bloomery.config.recipe import Recipe
from bloomery.config.resume import SettingChanges
from bloomery.config.validate_precision import uses_fp8
from bloomery.data.prepare import Prepared, prepare_after_first, prepare_run
from bloomery.errors import RunBusy
from bloomery.events.heartbeat import Heartbeat, RankActivity
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory, prove_shared
from bloomery.events.run_lock import host_name, lock_run
from bloomery.model.fp8_scaling import Scaling
from bloomery.model.fp8_units import lacking_units
from bloomery.parallel.build import TrainingModel, build_training_model
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import Mesh, join_mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.parallel.precision import measure_peak_flops, resolve_precision
from bloomery.parallel.rank_zero_task import ReportProgress
from bloomery.plan.parameters import TokenCost, token_cost
from bloomery.plan.recomputation import AUTO
from bloomery.plan.schedule import phase_at, steps_of_peer
from bloomery.torch_private import can_split_backward
from bloomery.train.attention_kernel import AttentionChoice, decide_attention
from bloomery.train.checkpoint_store import Store
from bloomery.train.control import Control, refuse_when_stopped
from bloomery.train.corruption import CorruptionCheck
from bloomery.train.data_stream import build_data_stream, training_bigrams
from bloomery.train.data_summary import summarise_data
from bloomery.train.held_out import build_held_out
from bloomery.train.lost_ranks import naming_lost_ranks
from bloomery.train.metrics import Metrics
from bloomery.train.observers import Observers
from bloomery.train.peering import announce_interludes, build_outer, peering_of_environment
from bloomery.train.rank_diagnostics import explaining_out_of_memory, make_heartbeat, progress_with_ticks
from bloomery.train.recomputation import AutoRecompute, least_room_bytes
from bloomery.train.run_start import RunStart
from bloomery.train.saver import Learner, begins_with
from bloomery.train.settings import RunSettings, StartOptions, changes_of
from bloomery.train.step import Compilation, decide_compilation, deterministic_kernels
from bloomery.train.trainer import Trainer, backed_up_at_the_end

log = logging.getLogger(__name__)


@contextmanager
def build_trainer(loaded: LoadedRecipe, rundir: RunDirectory, options: StartOptions) -> Iterator[Trainer]:
    """Take the run directory, prepare its data, build the model and everything around it.

    Collective over the peer. The parts are closed in reverse order, also when training fails.
    """
    with ExitStack() as stack:
        recipe = loaded.recipe
        mesh = join_mesh(
            recipe.parallel,
            recipe=settings_of(recipe),
            choices=lambda device: _choices(recipe, device),
            ties_embedding=recipe.model.tied,
        )
        stack.callback(mesh.close)
        stack.enter_context(deterministic_kernels(wanted=recipe.train.deterministic))
        refuse_when_stopped(rundir, recipe.control, mesh)
        if not recipe.checkpoint.url:
            prove_shared(rundir.path, rank=mesh.rank, node=host_name(), gather=mesh.all_gather_object)
        heartbeat = stack.enter_context(make_heartbeat(rundir, mesh))
        changes, prepared = _take_and_prepare(
            loaded, rundir, options, mesh=mesh, heartbeat=heartbeat, stack=stack
        )
        vocabulary = prepared.vocabulary_size
        stack.enter_context(explaining_out_of_memory(loaded, rundir, mesh, vocabulary=vocabulary))
        heartbeat.start().enter(RankActivity.BUILDING)
        control = Control(rundir, mesh, section=recipe.control, ends_process=options.ends_process)
        stack.callback(control.close)
        # What 'auto' recomputes depends on the compilation, which is decided without it.
        asked = "none" if recipe.train.recompute == AUTO else recipe.train.recompute
        compilation = _compilation(recipe, _token_cost(recipe, vocabulary, recompute=asked), mesh)
        auto_recompute = AutoRecompute(
            loaded,
            mesh,
            vocabulary=vocabulary,
            compiled=compilation.on,
            room_bytes=least_room_bytes(mesh),
        )
        _refuse_unsupported_scaling(loaded, mesh)
        _refuse_unsupported_schedule(loaded)
        recomputation = auto_recompute(recipe)
        if not compilation.on and mesh.device.type == "cpu":  # GPUs compile single kernels even then
            heartbeat.expect_no_compilation()
        model = _build_model(recipe, prepared, mesh, compiled=compilation.on)
        attention = AttentionChoice(
            model.decoder,
            decide=lambda saved: decide_attention(recipe, mesh, rundir, vocabulary=vocabulary, saved=saved),
        )
        stack.callback(attention.close)
        data_stream = build_data_stream(recipe, prepared, mesh)
        stack.callback(data_stream.batches.close)
        held_out = build_held_out(recipe, prepared, model, mesh, report_progress=heartbeat.tick)
        journal = stack.enter_context(Journal(rundir.journal(rank=mesh.rank)))
        observers = Observers([])
        stack.callback(observers.close)
        beginning = RunStart(
            loaded=loaded,
            changes=changes,
            mesh=mesh,
            compilation=compilation,
            attention=attention,
            recomputation=recomputation,
            rundir=rundir,
            options=options,
            journal=journal,
            observers=observers,
            heartbeat=heartbeat,
            summarise=lambda: summarise_data(recipe, prepared, data_stream),
            recipe_now=lambda: settings.recipe,
        )
        backup = _build_backup(recipe, rundir, mesh, control, options, stack, heartbeat.tick)
        store = stack.enter_context(_open_store(recipe, rundir, mesh, backup))
        peering = options.peering or peering_of_environment(recipe, mesh, stack)
        settings = RunSettings(
            recipe,
            mesh=mesh,
            data_stream=data_stream,
            store=store,
            held_out=held_out,
            journal=journal,
            say=options.say,
            auto_recompute=auto_recompute,
        )
        check = CorruptionCheck(
            model, mesh=mesh, settings=settings, journal=journal, incarnation=lambda: store.incarnation
        )
        metrics = Metrics(
            mesh=mesh,
            control=control,
            interludes=[*announce_interludes([held_out] if held_out else [], peering), check],
            cost=_token_cost(recipe, vocabulary, recompute=recomputation.mode),
            peak_flops=measure_peak_flops(mesh.device, recipe.train.precision),
            sequence_length=recipe.data.sequence_length,
            queue=lambda: data_stream.batches.queue,
            mixture=lambda: len(data_stream.stream.mixtures),
            enter=heartbeat.enter,
        )
        optimizers = Optimizers(
            model.weights, recipe.optim, precision=resolve_precision(recipe.train.precision, mesh.device)
        )
        stack.enter_context(naming_lost_ranks(rundir, mesh))
        yield Trainer(
            mesh=mesh,
            learner=Learner(
                model=model,
                optimizers=optimizers,
                loss_scale=LossScale(mesh.device),
                bigrams=lambda: training_bigrams(recipe, prepared),
                begin=begins_with(recipe.init, model, mesh, say=options.say),
                attention=attention,
            ),
            data_stream=data_stream,
            settings=settings,
            store=store,
            control=control,
            metrics=metrics,
            held_out=held_out,
            journal=journal,
            observers=observers,
            make_outer=lambda trainer: build_outer(
                recipe, trainer=trainer, model=model, mesh=mesh, data_stream=data_stream, peering=peering
            ),
            on_begin=beginning.begun,
            heartbeat=heartbeat,
            take_fallback=options.take_fallback,
            check=check,
        )


def _take_and_prepare(
    loaded: LoadedRecipe,
    rundir: RunDirectory,
    options: StartOptions,
    *,
    mesh: Mesh,
    heartbeat: Heartbeat,
    stack: ExitStack,
) -> tuple[SettingChanges, Prepared]:
    """Lock the run directory on the first rank, and prepare the data there while the other ranks wait.

    Returns what this start changes in the run's settings, which only the first rank knows, and the data.
    The lock is released when `stack` is closed. Collective over the peer.
    """
    section = loaded.recipe.data

    def begin(tick: ReportProgress) -> tuple[SettingChanges, Prepared]:
        rundir.create()
        on_lost = _end_superseded if options.ends_process else None
        stack.enter_context(lock_run(rundir, on_lost=on_lost))
        heartbeat.start().enter(RankActivity.PREPARING)
        changes = changes_of(loaded, rundir)
        refuse_changed_url(rundir, loaded.recipe.checkpoint)
        with options.data_progress() as progress:
            ticking = progress_with_ticks(progress, tick, heartbeat.tick)
            is_trained_on = bool(loaded.recipe.checkpoint.url or checkpoints(rundir))
            return changes, prepare_run(section, rundir.data, progress=ticking, is_trained_on=is_trained_on)

    # The other ranks wait here: they must find the data prepared, and must not race for the directory.
    begun = mesh.run_on_rank_zero(begin, doing="preparing the data")
    if begun is None and loaded.recipe.checkpoint.url:
        rundir.create()  # of this node's own; its ranks prepare the data once, one after the other
    return begun or (SettingChanges(), prepare_after_first(section, rundir.data))


def _end_superseded(busy: RunBusy) -> None:
    """End this process without another write, which would disturb the process that trains now.

    The other ranks end because this one is lost.
    """
    os.write(2, f"bloomery train: {busy.message}\n".encode())
    os._exit(busy.exit_status)


def _build_model(recipe: Recipe, prepared: Prepared, mesh: Mesh, *, compiled: bool) -> TrainingModel:
    return build_training_model(
        recipe.model,
        vocabulary=prepared.vocabulary_size,
        sequence_length=recipe.data.sequence_length,
        optim=recipe.optim,
        loss=recipe.loss,
        loss_chunk=recipe.train.loss_chunk,
        seed=recipe.run.seed,
        mesh=mesh,
        parallel=recipe.parallel,
        compiled=compiled,
        resets_positions=recipe.data.reset_positions,
        precision=resolve_precision(phase_at(recipe.train, 0).precision, mesh.device),
        fp8_scaling=cast(Scaling, recipe.train.fp8_scaling),  # the setting takes no other texts
    )


def _refuse_unsupported_scaling(loaded: LoadedRecipe, mesh: Mesh) -> None:
    """Raise ConfigError where the run scales 8-bit factors in a way that this GPU has no units for."""
    train = loaded.recipe.train
    lacking = lacking_units(train.fp8_scaling, mesh.device) if uses_fp8(train) else ""
    if lacking:
        remedy = "Set train.fp8_scaling to one that it has: 'tensor' needs the least, then 'row'."
        finding = Finding(key="train.fp8_scaling", problem=lacking, remedy=remedy)
        refuse(loaded.recipe, loaded.sources, [finding])


def _refuse_unsupported_schedule(loaded: LoadedRecipe) -> None:
    """Raise ConfigError where the run's pipeline schedule splits the backward, and this torch cannot."""
    parallel = loaded.recipe.parallel
    if parallel.pipeline == 1 or parallel.schedule not in SPLIT_BACKWARD or can_split_backward():
        return
    finding = Finding(
        key="parallel.schedule",
        problem=f"splits the backward, which torch {torch.__version__} cannot do",
        remedy="Set it to 'interleaved' or '1f1b', or install torch 2.13.",
    )
    refuse(loaded.recipe, loaded.sources, [finding])


def _open_store(recipe: Recipe, rundir: RunDirectory, mesh: Mesh, backup: CombinedBackups | None) -> Store:
    return Store(
        rundir,
        recipe.checkpoint,
        rank=mesh.rank,
        world=mesh.world,
        gather=mesh.all_gather_object,
        exchange=mesh.exchange,
        backup=backup,
        reach_steps=recipe.guard.reach_steps,
        place=run_storage(rundir, recipe.checkpoint, run_name=recipe.run.name),
    )


def _choices(recipe: Recipe, device: torch.device) -> Mapping[str, str]:
    """Return what 'auto' settings become on this device, for settings in which ranks must not differ."""
    precisions = {recipe.train.precision, *(precision for _, precision in recipe.train.precision_changes)}
    return {"train.precision": resolve_precision("auto", device)} if "auto" in precisions else {}


def _token_cost(recipe: Recipe, vocabulary: int, *, recompute: str) -> TokenCost:
    length = recipe.data.sequence_length
    return token_cost(recipe.model, vocabulary=vocabulary, sequence_length=length, recompute=recompute)


def _compilation(recipe: Recipe, cost: TokenCost, mesh: Mesh) -> Compilation:
    if mesh.pipeline.degree > 1 and recipe.parallel.schedule in SPLIT_BACKWARD:
        return Compilation(
            on=False, why=f"parallel.schedule = {recipe.parallel.schedule} splits the backward"
        )
    length = recipe.data.sequence_length
    steps = steps_of_peer(recipe.train, recipe.elastic, sequence_length=length)
    run_flops = cost.hardware * steps * recipe.train.global_batch * length / mesh.world
    return decide_compilation(recipe.train.compile, device=mesh.device, run_flops=run_flops)


def _build_backup(
    recipe: Recipe,
    rundir: RunDirectory,
    mesh: Mesh,
    control: Control,
    options: StartOptions,
    stack: ExitStack,
    on_progress: ReportProgress,
) -> CombinedBackups | None:
    """Return the backups on the rank that holds the run, None on others, which send shares of the files.

    They end after the last save.
    """
    named = sections(recipe)
    if not named:
        return None
    backup = None
    if mesh.is_first:
        backup = CombinedBackups(
            [
                Backup(rundir, section, run_name=recipe.run.name, world=mesh.world, place=place)
                for place, section in named.items()
            ]
        )
    else:
        for place in named:
            stack.callback(BackupHelper(rundir, rank=mesh.rank, world=mesh.world, place=place).close)
    stack.enter_context(
        backed_up_at_the_end(
            backup,
            mesh,
            interruptions=lambda: control.interruptions,
            say=options.say,
            on_progress=on_progress,
        )
    )
    return backup
