"""Assigns each parameter to an optimizer rule, and lays the parameters of a rule out in a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bloomery.config.optim import OptimSection
from bloomery.plan.weight_buffers import ALIGNMENT, aligned

Rule = Literal["muon", "matrix", "embedding", "head", "plain"]
"""The rules. muon and matrix are the blocks' weights, under Muon or AdamW. embedding includes learned
positions. head is the output's own weight. plain are norms and biases, which are never decayed. All except
muon use AdamW.
"""

Share = Literal["whole", "split", "partial", "echoed", "echo"]
"""What one rank's copy of a parameter is to the other ranks. whole: every tensor-parallel rank has all of
it and all of its gradient. split: each has a part of its own. partial: each has all of it, but only its
own summand of the gradient. echoed and echo: a tied embedding at both ends of a pipeline, in groups of
equal layout; the first stage's copy counts, and the last stage's follows it.
"""


@dataclass(frozen=True, kw_only=True)
class ParameterPiece:
    """A box of one logical tensor as rows of one stored parameter (fused matrices hold several).

    shape: shape of the box.
    global_shape: shape of the whole logical tensor.
    offset: where the box lies in it.
    """

    name: str
    parameter_name: str
    row_start: int
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    share: Share = "whole"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a stored parameter lies in its group's flat buffers: elements [start, start + numel)."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class LogicalPlacement(Placement):
    """Where a box of a logical tensor lies.

    shape: shape of the box.
    offset: where the box lies in `global_shape`.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """One group: its rule, its stored parameters in order with their starts, and its logical tensors.

    bucket: a block, or "" for everything else; there is one bucket if gradients and weights are not sharded.
    held: the elements whose master, gradient and moments this rank holds; all of them unless they are
    sharded.
    """

    rule: Rule
    share: Share
    bucket: str
    parameters: tuple[Placement, ...]
    logical: tuple[LogicalPlacement, ...]
    numel: int
    held: range

    @property
    def padding(self) -> int:
        """The number of held elements that belong to no logical tensor."""
        return len(self.held) - sum(place.numel for place in self.held_logical())

    def held_logical(self) -> Iterator[LogicalPlacement]:
        """Yield the boxes of which the held elements consist, at most three for each logical box.

        Their starts count within `held`.
        """
        for place in self.logical:
            first = max(place.start, self.held.start) - place.start
            stop = min(place.start + place.numel, self.held.stop) - place.start
            if first >= stop:
                continue
            for start, offset, shape in rectangles(place.shape, first, stop):
                yield LogicalPlacement(
                    name=place.name,
                    start=place.start + start - self.held.start,
                    shape=shape,
                    global_shape=place.global_shape,
                    offset=tuple(a + b for a, b in zip(place.offset, offset, strict=True)),
                )


def lay_out(
    parameters: Iterable[tuple[str, tuple[int, ...]]],
    pieces: Sequence[ParameterPiece],
    optim: OptimSection,
    *,
    shards: int = 1,
    shard: int = 0,
    by_block: bool = False,
) -> tuple[GroupLayout, ...]:
    """Assign every stored parameter to a group (of one rule and one share) and a place in its flat buffers.

    parameters: (stored name, shape) in module order. A parameter whose pieces would follow different rules
    cannot be fused; that is a mistake of the model, not of the user.
    shards: number of ranks that divide each group evenly.
    shard: index of this rank among them.
    by_block: whether each block gets a group of its own.
    """
    of_parameter: dict[str, list[ParameterPiece]] = {}
    for piece in pieces:
        of_parameter.setdefault(piece.parameter_name, []).append(piece)
    members: dict[tuple[Rule, Share, str], list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in parameters:
        bucket = block_of(name) if by_block else ""
        kinds = {(rule_of(piece, optim), piece.share, bucket) for piece in of_parameter[name]}
        assert len(kinds) == 1, f"{name} fuses tensors of different rules: {sorted(kinds)}"
        members.setdefault(kinds.pop(), []).append((name, shape))
    return tuple(_group(key, members[key], of_parameter, shards=shards, shard=shard) for key in members)


def block_of(name: str) -> str:
    """Return `blocks.3` for the parameters of that block, and "" for parameters outside of blocks."""
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""


def rule_of(piece: ParameterPiece, optim: OptimSection) -> Rule:
    """Return by which update rule the optimizer updates a logical tensor."""
    if len(piece.shape) < 2:
        return "plain"
    if piece.name.startswith("blocks."):
        return "muon" if optim.name == "muon" else "matrix"
    return "head" if piece.name == "head.weight" else "embedding"


def rectangles(
    shape: tuple[int, ...], first: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield elements [first, stop) of a vector or a row-major matrix as boxes: (first element, offset,
    shape).

    A matrix gives at most three: the end of a row, whole rows, the beginning of a row.
    """
    if len(shape) == 1:
        yield first, (first,), (stop - first,)
        return
    assert len(shape) == 2, f"only vectors and matrices are sharded, not {shape}"
    width = shape[1]
    while first < stop:
        row, column = divmod(first, width)
        rows = (stop - first) // width if column == 0 else 0
        taken = rows * width if rows else min(width - column, stop - first)
        yield first, (row, column), (max(rows, 1), width if rows else taken)
        first += taken


def _group(
    key: tuple[Rule, Share, str],
    members: Sequence[tuple[str, tuple[int, ...]]],
    of_parameter: dict[str, list[ParameterPiece]],
    *,
    shards: int,
    shard: int,
) -> GroupLayout:
    rule, share, bucket = key
    placed, logical, start = [], [], 0
    for name, shape in members:
        placed.append(Placement(name=name, start=start, shape=shape))
        row = math.prod(shape[1:])
        for piece in of_parameter[name]:
            logical.append(
                LogicalPlacement(
                    name=piece.name,
                    start=start + piece.row_start * row,
                    shape=piece.shape,
                    global_shape=piece.global_shape,
                    offset=piece.offset,
                )
            )
        start += aligned(math.prod(shape))
    part = aligned(start, ALIGNMENT * shards) // shards
    return GroupLayout(
        rule=rule,
        share=share,
        bucket=bucket,
        parameters=tuple(placed),
        logical=tuple(logical),
        numel=part * shards,
        held=range(shard * part, (shard + 1) * part),
    )
