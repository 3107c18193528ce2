"""Between peers each rank reduces its own part: together they are the model, each element once."""

from __future__ import annotations

import math

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.exchanging import part

from bloomery.checkpoint.format.coverage import check_coverage
from bloomery.checkpoint.format.manifest import IndexedBox

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)

LAYOUTS = {
    "data": (("parallel.data=2",), 2),
    "odd data": (("parallel.data=3", "train.global_batch=12"), 3),
    "zero 1": (("parallel.data=2", "parallel.zero=1"), 2),
    "zero 1, offload": (("parallel.data=2", "parallel.zero=1", "parallel.offload=cpu"), 2),
    "zero 3": (("parallel.data=2", "parallel.zero=3"), 2),
    "zero within": (("parallel.data=4", "parallel.zero=2", "parallel.shard_degree=2"), 4),
    "tensor": (("parallel.tensor=2",), 2),
    "pipeline": (("parallel.pipeline=2",), 2),
    "all": (("parallel.data=2", "parallel.tensor=2"), 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", ["llama", "bloom"])
def test_every_element_is_one_ranks_and_reaches_all_that_hold_it(
    matrix: Matrix, style: str, layout: str
) -> None:
    settings, ranks = LAYOUTS[layout]
    parts = matrix.ranks.run(part, style, settings, ranks, ranks=ranks)
    (alone,) = matrix.ranks.run(part, style, (), 1, ranks=1)
    boxes = [
        IndexedBox(
            name=name,
            dtype="float32",
            global_shape=shape,
            offset=offset,
            shape=size,
            scope="shared",
            file="",
            begin=0,
            end=0,
        )
        for one in parts
        for name, shape, offset, size in one.boxes
    ]
    check_coverage(boxes)
    assert {box.name for box in boxes} == {name for name, *_ in alone.boxes}
    assert math.isclose(sum(one.squares for one in parts), alone.squares, rel_tol=1e-6)
    assert all(one.doubled and one.gradients_doubled for one in parts)
    assert {one.gathers_weights for one in parts} == {"parallel.zero=3" in settings}
    if "tensor" not in " ".join(settings):
        whole = sum(one.numel for one in parts)
        assert max(one.numel for one in parts) <= 0.75 * whole
