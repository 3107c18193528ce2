"""Ranks that load together. What is asked of the mesh, so that this package need not know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Gather: TypeAlias = Callable[[Any], list[Any]]
"""Returns the JSON value of every rank, in their order, on every rank. Collective over the peer."""

Exchange: TypeAlias = Callable[[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]], None]
"""exchange(sends, receives): sends bytes (a flat uint8 tensor in main memory) to each rank of the first
mapping, and fills those of the second with what that rank sent here. Collective over the peer: every rank
calls, with mappings that agree, and with empty ones where it has no part in it. Returns when all is done."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One rank among those that load together."""

    rank: int
    world: int
    gather: Gather
    exchange: Exchange


def _alone(value: Any) -> list[Any]:  # Any: JSON
    return [value]


def _with_nobody(sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
    assert not sends and not receives, "there is nobody else"


ALONE = Ranks(rank=0, world=1, gather=_alone, exchange=_with_nobody)
