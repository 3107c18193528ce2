"""Threads write the initial values that one thread would, with little memory beside the tensors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.config.model import ModelSection
from bloomery.model import initial_filling, initial_values
from bloomery.model.initial_filling import NUMBERS_AT_ONCE, InitialBox, fill_initial
from bloomery.model.initial_values import initial_rows, initial_rule
from bloomery.model.shape import ResolvedModel, resolve

SECTION = ModelSection(layers=8, hidden=96, heads=4, norm="layernorm", bias=True)
NAMES = (
    "blocks.3.mlp.up.weight",
    "embedding.weight",
    "blocks.0.attention_norm.weight",
    "blocks.0.mlp.up.bias",
)


def resolved(**changes: Any) -> ResolvedModel:
    return resolve(replace(SECTION, **changes), vocabulary=1000, sequence_length=32)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_box_has_the_values_of_its_place_in_the_whole(data: st.DataObject) -> None:
    model = resolved(embedding_init=data.draw(st.sampled_from(["normal", "xavier_uniform"])))
    threads = data.draw(st.integers(1, 5))
    at_once = data.draw(st.sampled_from([1, 64 * 7, 64 * 7 * 3, NUMBERS_AT_ONCE]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    boxes, wanted = [], []
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)):
        shape = (data.draw(st.integers(1, 300)), *data.draw(st.sampled_from([(), (1,), (7,), (3, 2)])))
        begins = [data.draw(st.integers(0, size)) for size in shape]
        ends = [data.draw(st.integers(begin, size)) for begin, size in zip(begins, shape, strict=True)]
        window = tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True))
        whole = initial_rows(name, shape, rows=range(shape[0]), rule=initial_rule(name, model), seed=7)
        wanted.append(torch.from_numpy(whole)[window].to(dtype))
        # Every second box is a window of a larger tensor, as a column of a sharded weight is.
        around = torch.full(shape, -9.0, dtype=dtype)
        tensor = around[window] if len(boxes) % 2 else torch.empty_like(around[window].contiguous())
        boxes.append(InitialBox(tensor=tensor, name=name, global_shape=shape, offset=tuple(begins)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_filling, "NUMBERS_AT_ONCE", at_once)
        fill_initial(boxes, model=model, seed=7, threads=threads)
    for box, values in zip(boxes, wanted, strict=True):
        assert torch.equal(box.tensor, values)


def test_shards_of_rows_and_of_columns_make_the_whole() -> None:
    model, shape, name = resolved(), (200, 96), "blocks.3.mlp.down.weight"

    def filled(height: int, width: int, *offset: int) -> torch.Tensor:
        box = torch.empty(height, width)
        boxes = [InitialBox(tensor=box, name=name, global_shape=shape, offset=offset)]
        fill_initial(boxes, model=model, seed=7, threads=3)
        return box

    whole = filled(*shape, 0, 0)
    by_columns = torch.cat([filled(200, 32, 0, column) for column in (0, 32, 64)], dim=1)
    by_rows = torch.cat([filled(50, 96, row, 0) for row in (0, 50, 100, 150)])
    assert torch.equal(by_columns, whole) and torch.equal(by_rows, whole)
    assert whole.unique().numel() > 1000


def test_threads_draw_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two threads waits in its first block for the other to be in one too."""
    meeting, real = threading.Barrier(2), initial_values._draw
    met: list[str] = []

    def draw(*args: Any) -> None:
        if len(met) < 2:
            meeting.wait(timeout=30)
            met.append(threading.current_thread().name)
        real(*args)

    monkeypatch.setattr(initial_values, "_draw", draw)
    monkeypatch.setattr(initial_filling, "NUMBERS_AT_ONCE", 1)
    box = torch.empty(128, 8)
    boxes = [InitialBox(tensor=box, name="embedding.weight", global_shape=(128, 8), offset=(0, 0))]
    fill_initial(boxes, model=resolved(), seed=1, threads=2)
    assert len(set(met)) == 2


def test_a_failure_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(initial_values, "_draw", draw)
    boxes = [InitialBox(tensor=torch.empty(64, 8), name="head.weight", global_shape=(64, 8), offset=(0, 0))]
    with pytest.raises(MemoryError, match="planted"):
        fill_initial(boxes, model=resolved(), seed=1, threads=2)


class _Allocated(TorchDispatchMode):
    """Counts the elements that torch allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "empty":
            self.elements += made.numel()
        return made


@pytest.mark.parametrize(("dtype", "stages"), [(torch.float32, 0), (torch.bfloat16, 6)])
def test_beside_the_tensors_are_two_pieces_a_thread(
    dtype: torch.dtype, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bf16 tensor stands for one of a GPU: NumPy can write neither."""
    monkeypatch.setattr(initial_filling, "NUMBERS_AT_ONCE", 64 * 32)
    height, width = 64 * 40, 32
    box = torch.empty(height, width, dtype=dtype)
    boxes = [
        InitialBox(tensor=box, name="head.weight", global_shape=(height, width), offset=(0, 0)),
    ]
    counted = _Allocated()
    with counted:
        fill_initial(boxes, model=resolved(), seed=1, threads=3)
    assert counted.elements == stages * 64 * width
    rows = range(height)
    rule = initial_rule("head.weight", resolved())
    whole = initial_rows("head.weight", (height, width), rows=rows, rule=rule, seed=1)
    assert torch.equal(box, torch.from_numpy(whole).to(dtype))


def test_a_block_that_is_wanted_whole_is_drawn_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    real = initial_values._draw

    def draw(generator: Any, values: np.ndarray, rule: Any) -> None:
        places.append(values.ctypes.data)
        real(generator, values, rule)

    monkeypatch.setattr(initial_values, "_draw", draw)
    box = torch.empty(130, 8)
    boxes = [InitialBox(tensor=box, name="head.weight", global_shape=(130, 8), offset=(0, 0))]
    fill_initial(boxes, model=resolved(), seed=1)
    assert places == [box[row:].data_ptr() for row in (0, 64, 128)]
