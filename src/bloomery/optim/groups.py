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


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One logical tensor as rows of one stored parameter (fused matrices hold several)."""

    name: str
    parameter_name: str
    row_start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a logical tensor lies in its group's flat buffers: elements [start, start + numel)."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """One group: its rule, its stored parameters in order with their starts, its logical tensors."""

    rule: Rule
    parameters: tuple[Placement, ...]
    logical: tuple[Placement, ...]
    numel: int


def lay_out(
    parameters: Iterable[tuple[str, tuple[int, ...]]], pieces: Sequence[Piece], optim: OptimSection
) -> tuple[GroupLayout, ...]:
    """Assign every stored parameter to a group and a place in its flat buffers.

    parameters: (stored name, shape) in module order. A parameter whose pieces would follow different
    rules cannot be fused; that is a mistake of the model, not of the user.
    """
    of_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_parameter.setdefault(piece.parameter_name, []).append(piece)
    members: dict[Rule, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in parameters:
        rules = {rule_of(piece, optim) for piece in of_parameter[name]}
        assert len(rules) == 1, f"{name} fuses tensors of different rules: {sorted(rules)}"
        members.setdefault(rules.pop(), []).append((name, shape))
    return tuple(_group(rule, members[rule], of_parameter) for rule in members)


def rule_of(piece: Piece, optim: OptimSection) -> Rule:
    """Which rule a logical tensor follows."""
    if len(piece.shape) < 2:
        return "plain"
    if piece.name.startswith("blocks."):
        return "muon" if optim.name == "muon" else "matrix"
    return "head" if piece.name == "head.weight" else "embedding"


def _group(
    rule: Rule, members: Sequence[tuple[str, tuple[int, ...]]], of_parameter: dict[str, list[Piece]]
) -> GroupLayout:
    placed, logical, start = [], [], 0
    for name, shape in members:
        placed.append(Placement(name=name, start=start, shape=shape))
        row = math.prod(shape[1:])
        for piece in of_parameter[name]:
            logical.append(Placement(name=piece.name, start=start + piece.row_start * row, shape=piece.shape))
        start += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return GroupLayout(rule=rule, parameters=tuple(placed), logical=tuple(logical), numel=start)
