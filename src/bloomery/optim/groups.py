"""Which optimizer rule each parameter follows, and where it lies in that rule's flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bloomery.config.optim import OptimSection

Rule = Literal["muon", "matrix", "embedding", "head", "plain"]
"""muon and matrix: the blocks' weights, under Muon or AdamW; embedding: also learned positions; head: the
output's own weight; plain: norms and biases, never decayed. All but muon follow AdamW."""

ALIGNMENT = 64
"""Elements a parameter's start is rounded up to, so that every view is aligned to 256 bytes in fp32."""


Share = Literal["whole", "split", "partial", "echo"]
"""What one rank's copy of a parameter is to the ranks beside it. whole: every tensor-parallel rank has all of
it and all of its gradient; split: a part of its own; partial: all of it, but only this rank's summand of the
gradient; echo: the other end of the pipeline has it too, and counts and stores it."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of one logical tensor as rows of one stored parameter (fused matrices hold several).

    shape: of the box; global_shape: of the whole logical tensor; offset: of the box in it.
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
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class LogicalPlacement(Placement):
    """Where a box of a logical tensor lies. shape: the box's; offset: where it is in `global_shape`."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """One group: its rule, its stored parameters in order with their starts, its logical tensors."""

    rule: Rule
    share: Share
    parameters: tuple[Placement, ...]
    logical: tuple[LogicalPlacement, ...]
    numel: int

    @property
    def padding(self) -> int:
        """Elements of the flat buffers that belong to no logical tensor."""
        return self.numel - sum(place.numel for place in self.logical)


def lay_out(
    parameters: Iterable[tuple[str, tuple[int, ...]]], pieces: Sequence[Piece], optim: OptimSection
) -> tuple[GroupLayout, ...]:
    """Assign every stored parameter to a group (of one rule and one share) and a place in its flat buffers.

    parameters: (stored name, shape) in module order. A parameter whose pieces would follow different
    rules cannot be fused; that is a mistake of the model, not of the user.
    """
    of_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_parameter.setdefault(piece.parameter_name, []).append(piece)
    members: dict[tuple[Rule, Share], list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in parameters:
        kinds = {(rule_of(piece, optim), piece.share) for piece in of_parameter[name]}
        assert len(kinds) == 1, f"{name} fuses tensors of different rules: {sorted(kinds)}"
        members.setdefault(kinds.pop(), []).append((name, shape))
    return tuple(_group(rule, share, members[rule, share], of_parameter) for rule, share in members)


def rule_of(piece: Piece, optim: OptimSection) -> Rule:
    """Which rule a logical tensor follows."""
    if len(piece.shape) < 2:
        return "plain"
    if piece.name.startswith("blocks."):
        return "muon" if optim.name == "muon" else "matrix"
    return "head" if piece.name == "head.weight" else "embedding"


def _group(
    rule: Rule,
    share: Share,
    members: Sequence[tuple[str, tuple[int, ...]]],
    of_parameter: dict[str, list[Piece]],
) -> GroupLayout:
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
        start += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return GroupLayout(rule=rule, share=share, parameters=tuple(placed), logical=tuple(logical), numel=start)
