"""Tensor and sequence parallelism: how each weight is split, and a decoder turned into a rank's part.

Column-parallel layers come after `EnterTensorParallelRegion`, row-parallel ones before
`LeaveTensorParallelRegion` (Megatron-LM's pairing), so each branch of a block has one collective on its way
in and one on its way out. Under sequence parallelism norms, dropout and the residual stream hold s/tp
positions, and all_gather and reduce_scatter take the place of all_reduce: the bytes sent are the same.
Legend: b batch, s sequence, h hidden, v vocabulary, tp degree of the tensor axis.
"""

from __future__ import annotations

from itertools import groupby
from typing import Literal, cast

import torch
from torch import Tensor, nn

from bloomery.model.decoder import Block, Decoder
from bloomery.model.layers import Embedding, Linear, matmul_mode_for, rows_of, set_matmul_mode
from bloomery.model.logical_parameters import LogicalParameter, logical_parameters
from bloomery.model.shape import is_qk_norm, logical_shapes
from bloomery.optim.groups import ParameterPiece, Share
from bloomery.parallel.axis import Axis
from bloomery.parallel.overlapped_linear import place_overlapped_layers
from bloomery.parallel.tensor_collectives import (
    EnterTensorParallelRegion,
    LeaveTensorParallelRegion,
    TensorGroup,
    tensor_group_of,
)
from bloomery.parallel.vocabulary_loss import VocabularyParallelLoss
from bloomery.plan.pipeline_stages import padded_rows

Split = Literal["vocabulary", "rows", "columns"]

SPLITS: dict[str, Split] = {
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
"""Module (in a block, or of the decoder) → how its weight is split.

A weight is [out, in], so Megatron-LM's column-parallel layers are split by rows here, and its row-parallel
layers by columns. Norms, learned positions and the biases of layers split by columns are whole on every
rank; the biases of layers split by rows are split with them.
"""


def split_of(name: str) -> Split | None:
    """How the logical tensor `name` is split; None if it is whole on every rank."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        module = module.split(".", 2)[2]
    split = SPLITS.get(module)
    return None if split == "columns" and kind == "bias" else split


def split_range(size: int, *, index: int, degree: int) -> range:
    """The indices below `size` that belong to the rank at `index`, divided as evenly as they go."""
    return range(size * index // degree, size * (index + 1) // degree)


def split_decoder(
    decoder: Decoder, axis: Axis, *, sequence: bool, device: torch.device, overlaps: bool = False
) -> list[ParameterPiece]:
    """Turn a decoder on the device 'meta' into this rank's part of it, on `device`, with its collectives.

    axis: the tensor axis. sequence: whether the sequence is split as well. overlaps: whether the exchanges of
        blocks then overlap their products, see `can_overlap_products`.
    The parameters have shapes but no memory, which `MasterWeights` gives them. Returns which part of which
    logical tensor each stored parameter holds, in the order of the decoder's parameters.
    """
    logical = list(logical_parameters(decoder))
    shapes = logical_shapes(decoder.model)
    pieces = []
    for stored, parameters in groupby(logical, key=lambda tensor: tensor.parameter_name):
        held = _pieces(list(parameters), shapes, axis, sequence=sequence)
        pieces += held
        _replace_parameter(decoder, stored, held, axis, device=device)
    set_matmul_mode(decoder, matmul_mode_for(device, next(decoder.parameters()).dtype))
    if axis.degree > 1:
        _place_collectives(decoder, axis, tensor_group_of(axis), sequence=sequence, overlaps=overlaps)
    return pieces


def _pieces(
    parameters: list[LogicalParameter], shapes: dict[str, tuple[int, ...]], axis: Axis, *, sequence: bool
) -> list[ParameterPiece]:
    """The boxes that this rank holds of the logical tensors that one stored parameter fuses."""
    pieces, row_start = [], 0
    for logical in parameters:
        whole = shapes[logical.name]
        offset, shape = list((0,) * len(whole)), list(whole)
        split = split_of(logical.name) if axis.degree > 1 else None
        if split is not None:
            dim = 1 if split == "columns" else 0
            own_range = split_range(whole[dim], index=axis.index, degree=axis.degree)
            offset[dim], shape[dim] = own_range.start, len(own_range)
        pieces.append(
            ParameterPiece(
                name=logical.name,
                parameter_name=logical.parameter_name,
                row_start=row_start,
                shape=tuple(shape),
                global_shape=whole,
                offset=tuple(offset),
                share=_share(logical.name, split, axis, sequence=sequence),
            )
        )
        row_start += shape[0]
    return pieces


def _share(name: str, split: Split | None, axis: Axis, *, sequence: bool) -> Share:
    if split is not None:
        return "split"
    # With a split sequence a whole weight sees only this rank's positions, and the norm of queries or keys
    # only this rank's heads: its gradients must be summed.
    return "partial" if axis.degree > 1 and (sequence or is_qk_norm(name)) else "whole"


def _replace_parameter(
    decoder: Decoder, stored: str, pieces: list[ParameterPiece], axis: Axis, *, device: torch.device
) -> None:
    """Replace a parameter on 'meta' by one on `device` with this rank's shape and, for now, no memory."""
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


def _place_collectives(
    decoder: Decoder, axis: Axis, group: TensorGroup, *, sequence: bool, overlaps: bool
) -> None:
    vocabulary = split_range(decoder.model.vocabulary, index=axis.index, degree=axis.degree)
    decoder.heads = split_range(decoder.model.section.heads, index=axis.index, degree=axis.degree)
    if sequence:
        decoder.sequence_index, decoder.sequence_degree = axis.index, axis.degree
    if decoder.embedding is not None:
        # A cast, since it has the attributes of an Embedding that the decoder uses, but cannot inherit
        # from it.
        split = VocabularyParallelEmbedding(decoder.embedding.weight, group, vocabulary, sequence=sequence)
        decoder.embedding = cast(Embedding, split)
    if decoder.positions is not None and sequence:
        decoder.positions = cast(Embedding, SequenceParallelPositions(decoder.positions.weight, group))
    for module in decoder.blocks:
        block = cast(Block, module)
        if sequence and overlaps:
            place_overlapped_layers(block, group)
        else:
            block.enter_attention, block.enter_mlp = (
                EnterTensorParallelRegion(group, sequence=sequence) for _ in range(2)
            )
            block.leave_attention, block.leave_mlp = (
                LeaveTensorParallelRegion(group, sequence=sequence) for _ in range(2)
            )
        for part in block.modules():
            if isinstance(part, Linear):
                part.maximum = group.maximum
        block.attention.output.splits_input = block.mlp.down.splits_input = True
    decoder.token_loss = VocabularyParallelLoss(group, vocabulary, sequence=sequence)


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which each tensor-parallel rank holds some rows; the ranks sum what they looked up.

    rows: the rows of the vocabulary that this rank holds; further rows of `weight` are padding.
    """

    def __init__(self, weight: nn.Parameter, group: TensorGroup, rows: range, *, sequence: bool) -> None:
        super().__init__()
        self.weight, self.rows = weight, rows
        self.leave = LeaveTensorParallelRegion(group, sequence=sequence)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers [b, s] → [b, s, h]; [b, s/tp, h] under sequence parallelism. Collective."""
        is_own = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        own_rows = rows_of(torch.where(is_own, tokens - self.rows.start, 0), self.weight)
        return self.leave(torch.where(is_own[..., None], own_rows, 0.0))


class SequenceParallelPositions(nn.Module):
    """Learned positions under sequence parallelism: looks up those of this rank's part of the sequence."""

    def __init__(self, weight: nn.Parameter, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.group = weight, group

    def forward(self, positions: Tensor) -> Tensor:
        """Integers [s] or [b, s] → [s/tp, h] or [b, s/tp, h]."""
        return rows_of(positions.chunk(self.group.degree, dim=-1)[self.group.index], self.weight)
