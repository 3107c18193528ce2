"""What this rank computes for its pipeline stages, and which end of a tied embedding it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from bloomery.data.batches import MicroBatch
from bloomery.model.decoder import Decoder
from bloomery.model.dropout import DropoutAddress, dropout_address
from bloomery.model.loss import LossSums
from bloomery.optim.groups import Piece
from bloomery.parallel.precision import MasterWeights
from bloomery.plan.partition import Stage

StageFunction = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | LossSums]
"""(tokens, targets, documents, dropout rows, hidden) → hidden, or the loss on the last stage."""


class DecoderStages:
    """The stages of this rank as stretches of its decoder: what `pipeline.StageWork` asks for."""

    def __init__(
        self,
        decoder: Decoder,
        weights: MasterWeights,
        stages: Sequence[Stage],
        *,
        z_loss: float,
        chunk: int,
        dropout_seed: int | None,
        compiled: bool,
    ) -> None:
        self._decoder, self._weights, self._dropout_seed = decoder, weights, dropout_seed
        eager = {stage: _function(decoder, stage, z_loss=z_loss, chunk=chunk) for stage in stages}
        self._functions: dict[Stage, StageFunction] = {
            stage: torch.compile(function, dynamic=False, fullgraph=True) if compiled else function
            for stage, function in eager.items()
        }
        self._parameters = {stage: tuple(_parameters(decoder, stage)) for stage in stages}

    def forward(
        self, stage: Stage, micro_batch: MicroBatch, *, step: int | None, hidden: Tensor | None
    ) -> Tensor | LossSums:
        """Hidden states, or the loss on the last stage. Dropout is addressed outside compiled code."""
        rows = None
        if self._dropout_seed is not None and step is not None:
            rows = dropout_address(
                seed=self._dropout_seed,
                step=step,
                samples=micro_batch.samples,
                positions=range(micro_batch.tokens.shape[1]),
            ).rows
        function = self._functions[stage]
        return function(micro_batch.tokens, micro_batch.targets, micro_batch.documents, rows, hidden)

    def boundary(self, micro_batch: MicroBatch) -> Tensor:
        """[b, s, h] in the working precision, on 'meta'; s is this rank's share of a split sequence."""
        samples, tokens = micro_batch.tokens.shape
        shape = (samples, tokens // self._decoder.sequence_shares, self._decoder.model.section.hidden)
        return torch.empty(shape, dtype=self._weights.dtype, device="meta")

    def parameters(self, stage: Stage) -> Sequence[nn.Parameter]:
        """Those of the stage's blocks, and of the ends where they are its own."""
        return self._parameters[stage]

    def sweep(self, stage: Stage) -> None:
        """Add what lies on the parameters to the fp32 gradients."""
        self._weights.sweep(self._parameters[stage])


def with_tied_ends(pieces: Sequence[Piece], decoder: Decoder) -> list[Piece]:
    """The pieces of a rank that holds one end of a tied pipeline, its embedding marked as such."""
    if not decoder.model.section.tied or decoder.embeds == decoder.finishes:
        return list(pieces)
    return [
        replace(piece, share="echoed" if decoder.embeds else "echo")
        if piece.parameter_name == "embedding.weight"
        else piece
        for piece in pieces
    ]


def _function(decoder: Decoder, stage: Stage, *, z_loss: float, chunk: int) -> StageFunction:
    """The stage as a function of tensors alone: what torch.compile sees."""

    def forward(
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        rows: Tensor | None,
        hidden: Tensor | None,
    ) -> Tensor | LossSums:
        address = None if rows is None else DropoutAddress(rows=rows)
        made = decoder(tokens, documents=documents, address=address, hidden=hidden, blocks=stage.blocks)
        if not stage.finishes:
            return made
        return decoder.loss(made, targets, z_loss=z_loss, chunk=chunk)

    return forward


def _parameters(decoder: Decoder, stage: Stage) -> Sequence[nn.Parameter]:
    blocks = [
        parameter
        for block in decoder.blocks
        if block.index in stage.blocks
        for parameter in block.parameters()
    ]
    first = [decoder.embedding, decoder.positions, decoder.embedding_norm] if stage.embeds else []
    last = [decoder.final_norm, decoder.head or decoder.embedding] if stage.finishes else []
    return [*blocks, *(p for part in (*first, *last) if part is not None for p in part.parameters())]
