"""Tiny models of three styles, trained for some steps on a line of ranks or alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed.distributed_c10d import _get_default_store

from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection
from bloomery.config.parallel import ParallelSection
from bloomery.data_loader.batches import MicroBatch
from bloomery.evaluate.scoring import entropy as entropy_of
from bloomery.parallel.build import TrainingModel, build_training_model
from bloomery.parallel.mesh import Mesh, mesh_of
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.ranks import Degrees

VOCABULARY, LENGTH, SAMPLES = 101, 16, 4
CPU = torch.device("cpu")
_GPT = ModelSection(
    layers=2,
    hidden=32,
    heads=4,
    norm="layernorm",
    position="learned",
    activation="gelu",
    bias=True,
    tied=True,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
MODELS = {
    "llama": ModelSection(
        layers=2,
        hidden=32,
        heads=8,
        kv_heads=2,
        head_dim=6,
        ffn=48,
        bias=True,
        bias_in="attention",
        embedding_init="bigram",
    ),
    "gpt": _GPT,
    "bloom": replace(_GPT, position="alibi", embedding_norm=True, embedding_init="xavier_uniform"),
}


@dataclass(frozen=True, kw_only=True)
class Held:
    """A box of a logical tensor: its values, and where they lie."""

    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Trained:
    """losses, z terms and norms by step; gradients of the first; initial and last weights; held-out nats."""

    steps: list[tuple[float, float, float]]
    initial: dict[str, Held]
    gradients: dict[str, Held]
    weights: dict[str, Held]
    padding: int
    held_out: float


def mesh_for(rank: int, **degrees: int) -> Mesh:
    mesh = mesh_of(Degrees(**degrees), rank=rank, device=CPU)
    return replace(mesh, store=_get_default_store()) if mesh.world > 1 else mesh


def build(
    style: str, mesh: Mesh, *, sequence: bool = False, async_tensor: bool = False, compiled: bool = False
) -> TrainingModel:
    model = build_training_model(
        MODELS[style],
        vocabulary=VOCABULARY,
        sequence_length=LENGTH,
        optim=OptimSection(learning_rate=1e-2, epsilon=1e-6),
        loss=LossSection(z_loss=1e-3),
        loss_chunk=7,
        seed=3,
        mesh=mesh,
        parallel=ParallelSection(sequence=sequence, async_tensor=async_tensor),
        compiled=compiled,
    )
    # Other counts on each rank, as other data or other rounding would make: the first rank's must count.
    counts = (torch.arange(VOCABULARY**2) + 5 * mesh.rank).reshape(VOCABULARY, VOCABULARY) % 11
    model.initialise(seed=3, bigrams=lambda: counts)
    return model


def train(model: TrainingModel, mesh: Mesh, *, steps: int = 3) -> Trained:
    optim = OptimSection(learning_rate=1e-2, epsilon=1e-6)
    optimizers, told = Optimizers(model.weights, optim), []
    initial, gradients = _held(model, model.weights.master), dict[str, Held]()
    for step in range(steps):
        mine = micro_batches(step, index=mesh.data.index, degree=mesh.data.degree)
        entropy, z = model.accumulate(mine, step, weight=1 / (SAMPLES * LENGTH))
        model.weights.reduce()
        gradients = gradients or _held(model, model.weights.gradient)
        facts = model.weights.examine(limit=1.0, unscale=1.0)
        optimizers.step(facts, learning_rate=1e-2)
        model.weights.copy_masters_to_working()
        sums = mesh.all_reduce(torch.stack([entropy.double(), z.double()])) / (SAMPLES * LENGTH)
        told.append((*sums.tolist(), float(facts.norm)))
    held_out = entropy_of(model.decoder, micro_batches(99, index=0, degree=1))
    return Trained(
        steps=told,
        initial=initial,
        gradients=gradients,
        weights=_held(model, model.weights.master),
        padding=_padding(model),
        held_out=held_out.nats / held_out.tokens,
    )


def micro_batches(step: int, *, index: int, degree: int) -> list[MicroBatch]:
    """A rank's samples of a step, two at a time: runs of numbers, so that a loss has something to learn."""
    first = torch.randint(0, 5, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    text = (torch.arange(LENGTH + 1)[None] * 7 + first) % VOCABULARY
    numbers = torch.arange(SAMPLES) + step * SAMPLES
    mine = range(SAMPLES * index // degree, SAMPLES * (index + 1) // degree, 2)
    return [
        MicroBatch(
            tokens=text[at : at + 2, :-1],
            targets=text[at : at + 2, 1:],
            documents=None,
            samples=numbers[at : at + 2],
        )
        for at in mine
    ]


def _held(model: TrainingModel, flats: list[torch.Tensor]) -> dict[str, Held]:
    return {
        place.name: Held(
            offset=place.offset,
            global_shape=place.global_shape,
            values=flat[place.start : place.start + place.numel].view(place.shape).clone().numpy(),
        )
        for group, flat in zip(model.weights.layouts, flats, strict=True)
        for place in group.logical
    }


def _padding(model: TrainingModel) -> int:
    """How many elements of the masters that belong to no logical tensor are not 0."""
    found = 0
    for group, flat in zip(model.weights.layouts, model.weights.master, strict=True):
        belongs = torch.zeros(group.numel, dtype=torch.bool)
        for place in group.logical:
            belongs[place.start : place.start + place.numel] = True
        found += int((flat[~belongs] != 0).sum())
    return found
