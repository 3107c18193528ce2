"""The loss of a micro-batch on this rank, as a function that torch.compile may compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bloomery.data_loader.batches import MicroBatch
from bloomery.model.decoder import Decoder
from bloomery.model.dropout import DropoutAddress, dropout_address
from bloomery.model.loss import LossSums
from bloomery.parallel.recompute import compiled_function

LocalLoss = Callable[[MicroBatch, int], LossSums]
"""(micro-batch, completed steps) → sums over its tokens."""
TensorLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], LossSums]
"""(tokens, targets, documents, dropout rows) → sums over the tokens."""


def tensor_loss_of(decoder: Decoder, *, z_loss: float, chunk: int, compiles: str) -> TensorLoss:
    """Return the loss as a function of only tensors, which torch.compile can compile.

    compiles: 'whole' for the forward and the loss together, 'loss' for only the loss, '' for nothing.
    """
    loss_of_hidden = decoder.loss
    if compiles == "loss":
        loss_of_hidden = compiled_function(loss_of_hidden, device=decoder.device)

    def loss(tokens: Tensor, targets: Tensor, documents: Tensor | None, rows: Tensor | None) -> LossSums:
        address = None if rows is None else DropoutAddress(rows=rows)
        hidden = decoder(tokens, documents=documents, address=address)
        return loss_of_hidden(hidden, targets, z_loss=z_loss, chunk=chunk)

    return compiled_function(loss, device=decoder.device) if compiles == "whole" else loss


def micro_batch_loss(loss: TensorLoss, *, dropout_seed: int | None, reports: bool) -> LocalLoss:
    """Return the loss of a micro-batch.

    dropout_seed: None for no dropout. Its address is hashed here, outside of compiled code.
    reports: whether this rank reports the loss's terms; tensor-parallel ranks all compute the same ones.
    """

    def of_micro_batch(batch: MicroBatch, step: int) -> LossSums:
        rows = None
        if dropout_seed is not None:
            positions = range(batch.tokens.shape[1])
            rows = dropout_address(
                seed=dropout_seed, step=step, samples=batch.samples, positions=positions
            ).rows
        sums = loss(batch.tokens, batch.targets, batch.documents, rows)
        nothing = torch.zeros_like(sums.z)
        return sums if reports else LossSums(sums.total, nothing, nothing)

    return of_micro_batch
