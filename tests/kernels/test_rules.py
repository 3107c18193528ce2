"""The tiles that fit a program into a multiprocessor of Hopper, by the width of a head."""

from __future__ import annotations

import pytest

from bloomery.kernels.rules import AttentionTiles, Tiles, tiles_for


@pytest.mark.parametrize(("width", "forward_warps"), [(16, 4), (64, 4), (65, 8), (80, 8), (128, 8)])
def test_heads_that_are_wider_than_64_numbers_have_twice_the_threads_in_the_forward(
    width: int, forward_warps: int
) -> None:
    assert tiles_for(width) == AttentionTiles(
        forward=Tiles(queries=128, keys=64, warps=forward_warps, stages=3),
        backward_of_keys=Tiles(queries=64, keys=128, warps=8, stages=2),
        backward_of_queries=Tiles(queries=128, keys=64, warps=8, stages=2),
    )
