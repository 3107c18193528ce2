"""Makes a step of a published run at full size on 'meta', and compares its exchanges with the plan.

Sizes and layouts are those of the recipes. What has no part in exchanges and would take minutes is replaced
by operators of the same shapes: attention scores, norms, and the hashes of dropout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from tests.layouts.counting import reduce_report
from tests.layouts.training import step_parts
from tests.parallel.counted_exchanges import (
    CountedExchanges,
    Exchanges,
    differences,
    planned,
    zeros_for_tolist,
)
from tests.parallel.fake_worlds import degrees_at, fake_world
from torch import Tensor

from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data_loader.batches import MicroBatch
from bloomery.model import decoder
from bloomery.model.attention import Attention, AttentionContext
from bloomery.model.decoder import Decoder
from bloomery.model.dropout import BlockDropout
from bloomery.model.fp8_scaling import Scaling
from bloomery.model.layers import LayerNorm, RMSNorm
from bloomery.parallel.build import build_training_model
from bloomery.parallel.fused_vocabulary_loss import begin_gather, compute_by_chunks
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.collectives import StepShape, step_shape
from bloomery.plan.schedule import Phase, phase_at, phases
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import train_step

FIRST, LAST = 0, -1
"""The first phase of a run, with its smallest batch, and the last, which llmjp-172b trains in fp8."""


def step_differences(
    name: str, *, world: int, phase: int, stage: int, micro_batches: int | None = None
) -> dict[Any, tuple[int, int]]:
    """(kind, axis, bytes) → (seen, planned) of an eager step, where they differ, on tensor rank 0 of a stage.

    micro_batches: of each rank; None: as many as the recipe's phase has.
    """
    recipe, degrees = load_recipe(name).recipe, degrees_at(name, world)
    settings = phases(recipe.train)[phase][1]
    if micro_batches is not None:
        settings = replace(settings, global_batch=micro_batches * settings.micro_batch * degrees.data)
    assert isinstance(recipe.model.vocabulary, int)
    planned_for = step_shape(recipe, degrees, settings, vocabulary=recipe.model.vocabulary)
    shape = replace(planned_for, compiles=False)
    rank = degrees.rank_at(pipeline=stage, data=0, tensor=0)
    with small_operators(), fake_world(degrees, rank=rank, parallel=recipe.parallel) as mesh:
        seen = exchanged(recipe, mesh, settings, shape)
        assert seen.total() > shape.micro_batches, "each micro-batch exchanges something"
        return differences(seen, planned(shape, mesh))


def exchanged(recipe: Recipe, mesh: Mesh, phase: Phase, shape: StepShape) -> Exchanges:
    """Build this rank's part of a model and make a step, without a byte of memory."""
    model = build_training_model(
        recipe.model,
        vocabulary=shape.vocabulary,
        sequence_length=shape.sequence_length,
        optim=recipe.optim,
        loss=recipe.loss,
        loss_chunk=shape.loss_chunk,
        seed=recipe.run.seed,
        mesh=mesh,
        parallel=recipe.parallel,
        compiled=False,
        fp8_scaling=cast(Scaling, shape.fp8_scaling),
    )
    optimizers = Optimizers(model.weights, recipe.optim)
    parts = step_parts(recipe, phase, model, optimizers, LossScale(mesh.device))
    tokens = torch.empty(phase.micro_batch, shape.sequence_length, dtype=torch.int64, device="meta")
    micro_batch = MicroBatch(
        tokens=tokens,
        targets=tokens,
        documents=tokens if recipe.data.mask_documents else None,
        samples=torch.empty(phase.micro_batch, dtype=torch.int64, device="meta"),
    )
    state = TrainState(goal=Goal(steps=100))
    with CountedExchanges(mesh) as counted:
        reduce_report(mesh, train_step(parts, [micro_batch] * shape.micro_batches, state))
    return counted.exchanges


def exchanged_by_fused_loss(name: str, *, world: int) -> tuple[Exchanges, Exchanges]:
    """(what the loss of a GPU's kernels exchanges for one micro-batch, what the plan says of the loss)."""
    recipe, degrees = load_recipe(name).recipe, degrees_at(name, world)
    phase = phase_at(recipe.train, 0)
    assert isinstance(recipe.model.vocabulary, int)
    shape = step_shape(recipe, degrees, phase, vocabulary=recipe.model.vocabulary)
    rank = degrees.rank_at(pipeline=degrees.pipeline - 1, data=0, tensor=0)
    tokens, columns = phase.micro_batch * shape.sequence_length, shape.vocabulary // degrees.tensor
    with fake_world(degrees, rank=rank, parallel=recipe.parallel) as mesh:
        assert mesh.tensor.group is not None
        hidden, weight = (
            torch.empty(rows, shape.model.hidden, dtype=torch.bfloat16, device="meta")
            for rows in (tokens, columns)
        )
        with CountedExchanges(mesh) as counted:
            compute_by_chunks(
                hidden,
                weight,
                torch.empty(tokens, dtype=torch.int64, device="meta"),
                z_loss=0.0,
                chunk=shape.loss_chunk,
                rows=range(columns),
                gather=partial(begin_gather, group=mesh.tensor.group.group_name, degree=degrees.tensor),
            )
        expected = planned(shape, mesh)
    of_loss = Counter(
        {
            (kind, axis, size): times // shape.micro_batches
            for (kind, axis, size), times in expected.items()
            if (kind, axis) == ("all_gather", "tensor") and size != shape.activation_bytes
        }
    )
    return counted.exchanges, of_loss


@contextmanager
def small_operators() -> Iterator[None]:
    """Replace what has no part in exchanges by operators that give the same shapes and gradients."""

    def attend(attention: Attention, query: Tensor, *_others: object) -> Tensor:
        return query * query

    def drop(x: Tensor, *_how: object) -> Tensor:
        return x * torch.empty_like(x)  # kept for the backward, as the mask is

    def block_dropout(*_where: object, outputs: bool, **_sizes: object) -> BlockDropout:
        keys: Any = "of a block" if outputs else None
        return BlockDropout(weights=None, attention_output=keys, mlp_output=keys)

    plain = AttentionContext(mask=None, is_causal=True, rotary=None)
    with ExitStack() as stack:
        for owner, name, replacement in (
            (Attention, "attend", attend),
            (Decoder, "_attention_context", lambda *_, **__: plain),
            (decoder, "drop", drop),
            (decoder, "block_dropout", block_dropout),
            (decoder, "hidden_keys", lambda *_, **__: None),
            (RMSNorm, "forward", lambda norm, x: x * norm.weight),
            (LayerNorm, "forward", lambda norm, x: x * norm.weight + norm.bias),
            (torch.Tensor, "tolist", zeros_for_tolist),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield
