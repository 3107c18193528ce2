"""The parameters of the attention kernels: which keys a query sees, dropout, and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FIRST_FACTOR, SECOND_FACTOR = 0x21F0AAAD, 0x735A2D97
"""The factors of dropout's hash (`model.dropout.keeps`): odd numbers of 31 bits, found by Wellons' search for
hashes of 32 bits with little bias (hash-prospector).
"""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of a kernel's tiles: queries, keys, warps of a program, and stages of its loop's pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which keys a query sees and how scores and weights are changed; None where a rule does not hold.

    starts, ends: int32 [b, s], the first and the last position of each token's document.
    slopes: fp32 [heads], ALiBi's.
    row_keys: int32 [b, heads, s]; column_keys: int32 [s]: the halves of a weight's dropout address.
    rate: the share of weights that is dropped.
    """

    starts: Tensor | None
    ends: Tensor | None
    slopes: Tensor | None
    row_keys: Tensor | None
    column_keys: Tensor | None
    rate: float


@dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """The tiles of the forward, of the backward by keys and values, and of the backward by queries."""

    forward: Tiles
    backward_of_keys: Tiles
    backward_of_queries: Tiles


def tiles_for(width: int) -> AttentionTiles:
    """Return the tiles for heads of `width` numbers, at most 128, in 16 bits.

    Each fits one program into a multiprocessor of Hopper (227 KB, 255 registers a thread): what ptxas reports
    of registers and spills chose among those of that size.
    """
    if width <= 64:
        return AttentionTiles(
            forward=Tiles(queries=128, keys=64, warps=4, stages=3),
            backward_of_keys=Tiles(queries=64, keys=128, warps=8, stages=2),
            backward_of_queries=Tiles(queries=128, keys=64, warps=8, stages=2),
        )
    return AttentionTiles(
        forward=Tiles(queries=128, keys=64, warps=8, stages=3),
        backward_of_keys=Tiles(queries=64, keys=128, warps=8, stages=2),
        backward_of_queries=Tiles(queries=128, keys=64, warps=8, stages=2),
    )
