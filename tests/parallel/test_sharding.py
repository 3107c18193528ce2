"""What each rank holds of a sharded model: everything once, in few boxes, however shards fall."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.layouts.layouts import LLAMA
from tests.layouts.styles import recipe_of
from torch import nn

from bloomery.config.optim import OptimSection
from bloomery.errors import ConfigError
from bloomery.optim.groups import GroupLayout, ParameterPiece, lay_out, rectangles
from bloomery.parallel.axis import Axis, PendingCollective
from bloomery.parallel.flat import FlatGroup, ReductionsInFlight, WeightStorage
from bloomery.parallel.host_copies import CopiesAtOnce
from bloomery.parallel.mesh import Mesh
from bloomery.plan.ranks import Degrees

SHAPES = {
    "embedding.weight": (99, 7),
    "blocks.0.attention_norm.weight": (7,),
    "blocks.0.mlp.down.weight": (7, 130),
    "blocks.1.attention_norm.weight": (7,),
    "blocks.1.mlp.down.weight": (7, 130),
    "final_norm.weight": (64,),  # ends where a shard may begin
}
PIECES = [
    ParameterPiece(
        name=name,
        parameter_name=name,
        row_start=0,
        shape=shape,
        global_shape=shape,
        offset=(0,) * len(shape),
    )
    for name, shape in SHAPES.items()
]


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_shards_hold_each_element_once_in_at_most_three_boxes_of_a_tensor(
    shards: int, by_block: bool
) -> None:
    seen = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
    padding = 0
    for shard in range(shards):
        for group in layouts_of(shards, shard, by_block=by_block):
            boxes = list(group.held_logical())
            assert max([sum(one.name == name for one in boxes) for name in SHAPES]) <= 3
            for box in boxes:
                window = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
                seen[box.name][window] += 1
                assert box.numel > 0 and box.start >= 0 and box.start + box.numel <= len(group.held)
            padding += group.padding
    assert all((count == 1).all() for count in seen.values())
    flat = sum(group.numel for group in layouts_of(shards, 0, by_block=by_block))
    assert padding == flat - sum(math.prod(shape) for shape in SHAPES.values())


def layouts_of(shards: int, shard: int, *, by_block: bool) -> tuple[GroupLayout, ...]:
    optim = OptimSection(learning_rate=1e-3)
    return lay_out(list(SHAPES.items()), PIECES, optim, shards=shards, shard=shard, by_block=by_block)


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), data=st.data())
def test_a_stretch_of_a_matrix_is_the_concatenation_of_its_rectangles(
    rows: int, columns: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, rows * columns - 1))
    stop = data.draw(st.integers(first + 1, rows * columns))
    matrix = np.arange(rows * columns).reshape(rows, columns)
    found = []
    for start, offset, shape in rectangles((rows, columns), first, stop):
        assert start == first + len(found)
        window = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        found += matrix[window].ravel().tolist()
    assert found == list(range(first, stop))


def test_shards_are_neighbours_and_replicas_lie_across_them() -> None:
    degrees = Degrees(pipeline=1, data=4, tensor=2, shard=2)
    assert degrees.shard_groups() == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert sorted(degrees.replica_groups()) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *[
            (("optim.name=muon", f"parallel.zero={zero}"), "Set parallel.zero = 0, or optim.name = 'adamw'")
            for zero in (1, 2, 3)
        ],
        (("parallel.data=4", "parallel.zero=1", "parallel.shard_degree=3"), "1, 2, 4"),
        (("parallel.shard_degree=2",), "parallel.zero = 1"),
    ],
)
def test_what_sharding_does_not_allow_is_refused_with_what_would_do(
    settings: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe_of(LLAMA, settings)
    assert said in str(refused.value)


class FirstOfTwo(Axis):
    """The first rank of two; nothing comes from the other one."""

    def begin_reduce_scatter(self, flat: torch.Tensor, elements: range) -> PendingCollective:
        return PendingCollective()

    def all_gather(self, flat: torch.Tensor) -> None:
        pass


def test_sharded_gradients_that_no_backward_of_a_step_reached_are_not_those_of_the_step_before() -> None:
    layout = layouts_of(2, 0, by_block=False)[0]
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    axis = FirstOfTwo(ranks=(0, 1))
    group = FlatGroup(
        layout,
        parameters,
        mesh=Mesh(device=torch.device("cpu"), data=axis, shard=axis),
        storage=WeightStorage(zero=2),
        in_flight=ReductionsInFlight(0),
        link=CopiesAtOnce(),
    )
    group.set_working_dtype(torch.float32)
    sums = []
    for reached in (group.parameters, ()):
        group.begin_accumulation()
        for parameter in reached:
            parameter.grad = torch.ones_like(parameter)
            group.accumulate(parameter)
        group.end_accumulation()
        sums.append(float(group.reduced_gradient.sum()))
    assert sums[0] > 0.0 and sums[1] == 0.0


def test_a_shard_of_a_part_of_a_tensor_lies_where_the_part_lies() -> None:
    piece = ParameterPiece(
        name="blocks.0.mlp.up.weight",
        parameter_name="up",
        row_start=0,
        shape=(16, 8),
        global_shape=(64, 32),
        offset=(32, 16),
    )
    found = [
        (box.offset, box.shape, box.global_shape)
        for shard in range(2)
        for group in lay_out(
            [("up", (16, 8))], [piece], OptimSection(learning_rate=1e-3), shards=2, shard=shard
        )
        for box in group.held_logical()
    ]
    assert found == [((32, 16), (8, 8), (64, 32)), ((40, 16), (8, 8), (64, 32))]
