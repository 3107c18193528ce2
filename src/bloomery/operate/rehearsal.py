"""Derives the rehearsal of a run from its own recipe: the same options on two nodes, at tiny sizes."""

from __future__ import annotations

from bloomery.config.convert import toml_value
from bloomery.config.parallel import ParallelSection
from bloomery.config.recipe import Recipe
from bloomery.plan.schedule import total_samples

NODES = 2
STEPS = 20  # of the rehearsal
SEQUENCE_LENGTH = 128
_HEAD = 32
_MINUTES = 20.0


def rehearsal_of(recipe: Recipe, *, nproc: int | None = None) -> list[str]:
    """Return the overrides that make a recipe its own rehearsal.

    Kept are the data, the kind of the model (positions, norms, activations, heads shared or not), optimizer,
    precision, schedule shapes, ZeRO, tensor parallelism, and as much pipeline parallelism as two nodes hold.

    nproc: ranks on each node; None where the launcher decides.
    """
    parallel = recipe.parallel
    pipeline, data = _degrees(recipe, nproc)
    stages = pipeline * parallel.chunks
    batch = (data or NODES) * 2 * pipeline
    samples = STEPS * batch
    settings: dict[str, object] = {"run.name": f"{recipe.run.name}-rehearsal"}
    settings |= _model(recipe, stages=stages)
    settings |= _layout(parallel, pipeline=pipeline, data=data)
    settings |= _length(recipe, batch=batch, samples=samples)
    settings |= {
        "submit.nodes": NODES,
        "submit.spares": 0,
        "submit.tasks": 2,
        "submit.keep_queued": 0,
        "submit.minutes": min(_MINUTES, recipe.submit.minutes),
        "checkpoint.every_steps": 8,
        "checkpoint.every_samples": 0,
        "checkpoint.every_minutes": 0.0,
        "checkpoint.keep_last": 2,
        "checkpoint.keep_every_steps": 0,
        "evaluate.samples": 8,
        "log.every_steps": 1,
        "log.trackers": (),
        "sync.place": "",  # which takes the logs of one run
        "sync.checkpoints": False,
        "guard.stop_after_minutes": 0.0,
        "guard.stop_at_step": 0,
    }
    if recipe.evaluate.every_steps:
        settings["evaluate.every_steps"] = 8
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]


def _degrees(recipe: Recipe, nproc: int | None) -> tuple[int, int | None]:
    """Return the pipeline and the data degree on two nodes; None for the second leaves it 'auto'.

    Without a number of ranks a launcher starts one for each accelerator of its node.
    """
    parallel = recipe.parallel
    usual = recipe.submit.gpus_per_node if parallel.ranks_per_node == "auto" else int(parallel.ranks_per_node)
    ranks = NODES * (nproc or usual)
    if not ranks:
        return parallel.pipeline, None
    fitting = [
        degree for degree in range(1, parallel.pipeline + 1) if ranks % (degree * parallel.tensor) == 0
    ]
    pipeline = max(fitting, default=1)
    return pipeline, max(1, ranks // (pipeline * parallel.tensor))


def _model(recipe: Recipe, *, stages: int) -> dict[str, object]:
    model, tensor = recipe.model, recipe.parallel.tensor
    layers = 2 * stages
    if recipe.parallel.partition == "embeddings" and stages > 1:
        layers -= 2  # the embedding and the head count as a block each
    sizes: dict[str, object] = {"model.layers": layers}
    heads = 2 * tensor
    if model.kv_heads != "auto":
        sizes["model.kv_heads"] = tensor
        heads = heads if model.heads > int(model.kv_heads) else tensor
    hidden = heads * _HEAD
    sizes |= {"model.heads": heads, "model.hidden": hidden}
    if model.ffn != "auto":
        unit = 8 * tensor
        sizes["model.ffn"] = max(1, round(int(model.ffn) / model.hidden * hidden / unit)) * unit
    if isinstance(model.max_positions, int) and model.max_positions > 0:
        sizes["model.max_positions"] = max(SEQUENCE_LENGTH, min(model.max_positions, 2048))
    return sizes


def _layout(parallel: ParallelSection, *, pipeline: int, data: int | None) -> dict[str, object]:
    layout: dict[str, object] = {"parallel.pipeline": pipeline}
    layout |= {"parallel.blocks_per_stage": (), "parallel.recompute_per_stage": ()}
    if pipeline == 1:
        layout |= {"parallel.schedule": "1f1b", "parallel.chunks": 1}
    if data is not None:
        layout["parallel.data"] = data
        if parallel.shard_degree != "auto":
            layout["parallel.shard_degree"] = max(
                degree for degree in range(1, int(parallel.shard_degree) + 1) if data % degree == 0
            )
    elif parallel.data != "auto":
        layout["parallel.data"] = "auto"
    return layout


def _length(recipe: Recipe, *, batch: int, samples: int) -> dict[str, object]:
    train, schedule = recipe.train, recipe.schedule
    before = total_samples(train, sequence_length=recipe.data.sequence_length)
    length: dict[str, object] = {
        "data.sequence_length": SEQUENCE_LENGTH,
        "train.samples": samples,
        "train.tokens": 0,
        "train.steps": 0,
        "train.global_batch": batch,
        "train.micro_batch": 1,
        "train.micro_batch_changes": (),
        "train.ramp_up": (batch // 2, batch // 2, 4 * batch) if train.ramp_up else (),
        "train.precision_changes": tuple(
            ((index + 1) * 4 * batch, precision)
            for index, (_, precision) in enumerate(train.precision_changes)
        ),
    }
    for name in ("warmup", "decay"):
        value = getattr(schedule, name)
        if isinstance(value, (int, float)) and value:
            scale = samples / before
            if schedule.unit == "steps":
                scale *= train.global_batch / batch
            if schedule.unit == "tokens":
                scale *= SEQUENCE_LENGTH / recipe.data.sequence_length
            length[f"schedule.{name}"] = max(1, int(value * scale))
    return length
