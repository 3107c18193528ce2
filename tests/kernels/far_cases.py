"""Attention by tiles of tensors that span more than 2^31 numbers, in sparse files; prints JSON."""

from __future__ import annotations

import faulthandler
import json
import mmap
import sys
import tempfile

import torch
from tests.kernels.attention_cases import Case, differences
from torch import Tensor

from bloomery.kernels.rules import AttentionTiles, Tiles

FAR_ROWS = Case(length=68, heads=1, kv_heads=1)
FAR_HEADS = Case(length=9, heads=4, kv_heads=4)
_TILE = Tiles(queries=32, keys=32, warps=4, stages=2)
TILES = AttentionTiles(forward=_TILE, backward_of_keys=_TILE, backward_of_queries=_TILE)


def with_far_rows(heads: Tensor) -> Tensor:
    """Return a copy of heads [b, s, heads, d] whose last rows start beyond 2^31 numbers."""
    _, _, number, width = heads.shape
    return _in_a_file(heads, (number * width, 2**25, width, 1))


def with_far_heads(heads: Tensor) -> Tensor:
    """Return a copy of heads [b, s, heads, d] whose last heads start beyond 2^31 numbers."""
    _, length, _, width = heads.shape
    return _in_a_file(heads, (length * width, width, 2**30, 1))


def _in_a_file(heads: Tensor, strides: tuple[int, ...]) -> Tensor:
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(heads.shape, strides, strict=True))
    assert numbers > 2**31
    with tempfile.TemporaryFile() as file:
        file.truncate(numbers * heads.element_size())
        memory = mmap.mmap(file.fileno(), 0)
    flat = torch.frombuffer(memory, dtype=heads.dtype, count=numbers)
    return flat.as_strided(heads.shape, strides).copy_(heads)


if __name__ == "__main__":
    faulthandler.enable()
    cases = ((FAR_ROWS, with_far_rows), (FAR_HEADS, with_far_heads))
    found = [
        differences(case, device="cpu", dtype=torch.float32, tiles=TILES, lay=lay) for case, lay in cases
    ]
    sys.stdout.write(json.dumps(found) + "\n")
