"""The one place that decides in which order a model becomes a training model on this mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection
from bloomery.data.batches import MicroBatch
from bloomery.model.decoder import Decoder, build, logical_parameters
from bloomery.model.dropout import DropoutAddress
from bloomery.model.init import initialise
from bloomery.model.linear import products_for, set_products
from bloomery.model.loss import LossSums, next_token_loss
from bloomery.optim.groups import Piece, lay_out
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import DTYPES, MasterWeights

LocalLoss = Callable[[MicroBatch, Tensor], LossSums]
"""(micro-batch, step number) → sums over its tokens. The step is a 0-d integer tensor."""
TensorLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], LossSums]


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """A decoder, its fp32 masters, and its loss, compiled where that was decided."""

    decoder: Decoder
    weights: MasterWeights
    loss: LocalLoss
    eager_loss: LocalLoss

    def set_precision(self, precision: str) -> None:
        """Compute in another precision from now on; the masters stay as they are."""
        dtype = DTYPES[precision]
        if self.weights.dtype != dtype:
            self.weights.recast(dtype)
            set_products(self.decoder, products_for(self.decoder.embedding.weight.device, dtype))

    def initialise(self, *, seed: int) -> None:
        """Give every weight the initial value of its address, exactly, whatever the working precision."""
        working = self.weights.dtype
        self.weights.recast(torch.float32)
        initialise(self.decoder, seed=seed)
        self.weights.recast(working)


def build_training_model(
    model: ModelSection,
    *,
    vocabulary: int,
    sequence_length: int,
    optim: OptimSection,
    loss: LossSection,
    loss_chunk: int,
    seed: int,
    mesh: Mesh,
    compiled: bool,
) -> TrainingModel:
    """Build the decoder in fp32 on this rank's device, put masters under it, and compile its loss.

    Weights hold no values yet: initialise or restore them. Every rank builds the same.
    """
    decoder = build(model, vocabulary=vocabulary, sequence_length=sequence_length, device=mesh.device)
    pieces = [
        Piece(name=p.name, parameter_name=p.parameter_name, row_start=p.row_start, shape=p.shape)
        for p in logical_parameters(decoder)
    ]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    weights = MasterWeights(decoder, lay_out(shapes, pieces, optim), torch.float32)
    eager = _tensor_loss(decoder, drops=_drops(model), z_loss=loss.z_loss, chunk=loss_chunk, seed=seed)
    held_out = _tensor_loss(decoder, drops=False, z_loss=0.0, chunk=loss_chunk, seed=seed)
    trained = torch.compile(eager, dynamic=False, fullgraph=True) if compiled else eager
    return TrainingModel(decoder=decoder, weights=weights, loss=_of_batch(trained), eager_loss=_of_batch(held_out))


def _drops(model: ModelSection) -> bool:
    return model.hidden_dropout > 0.0 or model.attention_dropout > 0.0


def _tensor_loss(
    decoder: Decoder, *, drops: bool, z_loss: float, chunk: int, seed: int
) -> TensorLoss:
    """The loss as a function of tensors alone: what torch.compile sees."""

    def loss(
        tokens: Tensor, targets: Tensor, documents: Tensor | None, samples: Tensor, step: Tensor
    ) -> LossSums:
        address = DropoutAddress(seed=seed, step=step, samples=samples) if drops else None
        hidden = decoder(tokens, documents=documents, address=address)
        return next_token_loss(
            hidden, decoder.head_weight, targets, z_loss=z_loss, chunk=chunk, products=decoder.products
        )

    return loss


def _of_batch(loss: TensorLoss) -> LocalLoss:
    def of_batch(batch: MicroBatch, step: Tensor) -> LossSums:
        return loss(batch.tokens, batch.targets, batch.documents, batch.samples, step)

    return of_batch
