"""Tensor and sequence parallelism: which logical tensor is split along what, and a decoder of the parts.

Split columns come after `Enter`, split rows before `Leave` (Megatron-LM's pairing), so each branch of a block
exchanges once on its way in and once on its way out. Under sequence parallelism norms, dropout and the
residual stream hold s/tp positions, and the same exchanges carry them: nothing more is sent than before.
Legend: b batch, s sequence, h hidden, v vocabulary, tp ranks of the line.
"""

from __future__ import annotations

from itertools import groupby
from typing import Literal, cast

import torch
from torch import Tensor, nn

from bloomery.model.decoder import Block, Decoder, LogicalParameter, logical_parameters
from bloomery.model.embedding import Embedding, rows_of
from bloomery.model.linear import products_for, set_products
from bloomery.model.names import logical_shapes
from bloomery.optim.groups import Piece, Share
from bloomery.parallel.collectives import Enter, Leave, Line, line_of
from bloomery.parallel.loss import SplitVocabularyLoss
from bloomery.parallel.mesh import Axis

Split = Literal["vocabulary", "rows", "columns"]

TABLE: dict[str, Split] = {
    "embedding": "vocabulary",
    "head": "vocabulary",
    "attention.query": "rows",
    "attention.key": "rows",
    "attention.value": "rows",
    "attention.output": "columns",
    "mlp.gate": "rows",
    "mlp.up": "rows",
    "mlp.down": "columns",
}
"""Module (in a block, or of the decoder) → how its weight is split. Norms and learned positions are whole on
every rank, and so are the biases of split columns; those of split rows are split."""

ROWS_ALIGNMENT = 8
"""A rank's rows of the vocabulary are padded to a multiple of this: what matrix units divide by."""


def split_of(name: str) -> Split | None:
    """How the logical tensor `name` is split; None where every rank has all of it."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        module = module.split(".", 2)[2]
    found = TABLE.get(module)
    return None if found == "columns" and kind == "bias" else found


def part(size: int, *, index: int, degree: int) -> range:
    """What the rank at `index` holds of `size` things, as evenly as they divide."""
    return range(size * index // degree, size * (index + 1) // degree)


def split_decoder(decoder: Decoder, axis: Axis, *, sequence: bool, device: torch.device) -> list[Piece]:
    """Give a decoder on the device 'meta' this rank's part of every weight on `device`, and its collectives.

    Nothing is allocated yet: the parameters have shapes and no memory, which `MasterWeights` gives them.
    Returns what each part is of which logical tensor, in the order of the decoder's parameters.
    """
    wholes = list(logical_parameters(decoder))
    shapes = logical_shapes(decoder.model)
    pieces = []
    for stored, parameters in groupby(wholes, key=lambda one: one.parameter_name):
        held = _pieces(list(parameters), shapes, axis, sequence=sequence)
        pieces += held
        _materialise(decoder, stored, held, axis, device=device)
    set_products(decoder, products_for(device, next(decoder.parameters()).dtype))
    if axis.degree > 1:
        _place_collectives(decoder, axis, line_of(axis), sequence=sequence)
    return pieces


def _pieces(
    parameters: list[LogicalParameter], shapes: dict[str, tuple[int, ...]], axis: Axis, *, sequence: bool
) -> list[Piece]:
    """Boxes that this rank holds of the logical tensors that one stored parameter fuses."""
    pieces, row_start = [], 0
    for one in parameters:
        whole = shapes[one.name]
        offset, shape = list((0,) * len(whole)), list(whole)
        split = split_of(one.name) if axis.degree > 1 else None
        if split is not None:
            dim = 1 if split == "columns" else 0
            held = part(whole[dim], index=axis.index, degree=axis.degree)
            offset[dim], shape[dim] = held.start, len(held)
        pieces.append(
            Piece(
                name=one.name,
                parameter_name=one.parameter_name,
                row_start=row_start,
                shape=tuple(shape),
                global_shape=whole,
                offset=tuple(offset),
                share=_share(split, axis, sequence=sequence),
            )
        )
        row_start += shape[0]
    return pieces


def _share(split: Split | None, axis: Axis, *, sequence: bool) -> Share:
    if split is not None:
        return "split"
    # What is whole sees only this rank's positions where the sequence is split.
    return "partial" if sequence and axis.degree > 1 else "whole"


def _materialise(
    decoder: Decoder, stored: str, pieces: list[Piece], axis: Axis, *, device: torch.device
) -> None:
    owner_name, _, name = stored.rpartition(".")
    owner = decoder.get_submodule(owner_name)
    dtype = getattr(owner, name).dtype
    rows = sum(piece.shape[0] for piece in pieces)
    columns = pieces[0].shape[1:]
    if axis.degree > 1 and split_of(pieces[0].name) == "vocabulary":
        rows = padded_rows(pieces[0].global_shape[0], degree=axis.degree)
    weight = torch.empty(rows, *columns, device=device, dtype=dtype)
    if device.type != "meta":
        weight.untyped_storage().resize_(0)
    setattr(owner, name, nn.Parameter(weight))


def padded_rows(vocabulary: int, *, degree: int) -> int:
    """Rows of the embedding that each rank of a line stores: its own and padding, equal on all."""
    largest = -(-vocabulary // degree)
    return largest if degree == 1 else -(-largest // ROWS_ALIGNMENT) * ROWS_ALIGNMENT


def _place_collectives(decoder: Decoder, axis: Axis, line: Line, *, sequence: bool) -> None:
    vocabulary = part(decoder.model.vocabulary, index=axis.index, degree=axis.degree)
    decoder.heads = part(decoder.model.section.heads, index=axis.index, degree=axis.degree)
    if sequence:
        decoder.sequence_share, decoder.sequence_shares = axis.index, axis.degree
    if decoder.embedding is not None:
        # Both have an embedding's weight and its call, and none of its storage.
        split = SplitEmbedding(decoder.embedding.weight, line, vocabulary, sequence=sequence)
        decoder.embedding = cast(Embedding, split)
    if decoder.positions is not None and sequence:
        decoder.positions = cast(Embedding, SharedPositions(decoder.positions.weight, line))
    for module in decoder.blocks:
        block = cast(Block, module)
        block.enter_attention, block.enter_mlp = (Enter(line, sequence=sequence) for _ in range(2))
        block.leave_attention, block.leave_mlp = (Leave(line, sequence=sequence) for _ in range(2))
    decoder.token_loss = SplitVocabularyLoss(line, vocabulary, sequence=sequence)


class SplitEmbedding(nn.Module):
    """An embedding of which this rank holds some rows; the line's ranks add up what each found."""

    def __init__(self, weight: nn.Parameter, line: Line, rows: range, *, sequence: bool) -> None:
        super().__init__()
        self.weight, self.rows = weight, rows
        self.leave = Leave(line, sequence=sequence)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers [b, s] → [b, s, h]; [b, s/tp, h] of a split sequence."""
        is_here = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        here = torch.where(is_here, tokens - self.rows.start, 0)
        found = rows_of(here, self.weight)
        return self.leave(torch.where(is_here[..., None], found, 0.0))


class SharedPositions(nn.Module):
    """Learned positions of which this rank's share of the sequence is looked up."""

    def __init__(self, weight: nn.Parameter, line: Line) -> None:
        super().__init__()
        self.weight, self.line = weight, line

    def forward(self, positions: Tensor) -> Tensor:
        """Integers [s] or [b, s] → [s/tp, h] or [b, s/tp, h]."""
        return rows_of(positions.chunk(self.line.degree, dim=-1)[self.line.index], self.weight)
