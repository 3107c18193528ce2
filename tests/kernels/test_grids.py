"""Grids of programs of each kernel: CUDA allows 2^31 - 1 on the first axis, 65,535 on the others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery import kernels
from bloomery.kernels.rules import Rules, tiles_for

NAMES = (
    "triton_tiles",
    "triton_attention",
    "triton_attention_backward",
    "triton_loss",
    "triton_accumulate",
)
NO_RULES = Rules(starts=None, ends=None, slopes=None, row_keys=None, column_keys=None, rate=0.0)
BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2_200, 300, 64, 32, 64


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, ...]]]:
    """Import the kernels beside a stand-in for Triton that computes nothing and keeps each kernel's grid."""
    kept: dict[str, tuple[int, ...]] = {}

    class Kernel:
        def __init__(self, function: Any) -> None:
            self.name = function.__name__

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            kept[self.name] = grid
            return lambda *arguments, **constants: None

    triton: Any = ModuleType("triton")
    triton.jit = Kernel
    triton.cdiv = lambda number, divisor: -(-number // divisor)
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    triton.language = SimpleNamespace(constexpr=lambda value: value)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, f"bloomery.kernels.{name}", raising=False)
    yield kept
    for name in NAMES:
        sys.modules.pop(f"bloomery.kernels.{name}", None)
        if hasattr(kernels, name):
            delattr(kernels, name)


def test_a_batch_may_have_more_heads_than_a_grids_other_axes_have_programs(
    grids: dict[str, tuple[int, ...]],
) -> None:
    forward = importlib.import_module("bloomery.kernels.triton_attention").forward
    backward = importlib.import_module("bloomery.kernels.triton_attention_backward").backward
    with torch.device("meta"):
        query = torch.empty(BATCH, LENGTH, HEADS, WIDTH, dtype=torch.bfloat16)
        key = torch.empty(BATCH, LENGTH, KV_HEADS, WIDTH, dtype=torch.bfloat16)
        log_partition = torch.empty(BATCH, HEADS, LENGTH)
    tiles = tiles_for(WIDTH)
    forward(query, key, key, NO_RULES, query, log_partition, tiles.forward)
    backward(query, query, key, key, NO_RULES, query, log_partition, (query, key, key), tiles=tiles)
    assert grids == {
        "_forward": (3 * BATCH * HEADS,),  # 300 queries are three tiles of 128
        "_row_corrections": (5 * BATCH * HEADS,),  # and five of 64
        "_backward_of_keys": (3 * BATCH * KV_HEADS,),
        "_backward_of_queries": (3 * BATCH * HEADS,),
    }


def test_the_loss_is_computed_by_a_program_a_token(grids: dict[str, tuple[int, ...]]) -> None:
    write = importlib.import_module("bloomery.kernels.triton_loss").write_loss_gradient
    with torch.device("meta"):
        logits, targets, terms = torch.empty(100_000, 50), torch.empty(100_000).long(), torch.empty(100_000)
    write(logits, targets, 0.0, terms, terms)
    assert grids == {"_write_slopes": (100_000,)}


def test_the_loss_of_split_logits_is_computed_by_a_program_a_token(grids: dict[str, tuple[int, ...]]) -> None:
    loss = importlib.import_module("bloomery.kernels.triton_loss")
    with torch.device("meta"):
        logits, targets = torch.empty(100_000, 24), torch.empty(100_000).long()
        own, told = torch.empty(2, 100_000), torch.empty(4, 2, 100_000)
    loss.measure_logits(logits, targets, range(20, 40), own)
    loss.write_split_gradient(logits, targets, range(20, 40), told, 0.0, own)
    assert grids == {"_measure_rows": (100_000,), "_write_split_slopes": (100_000,)}


def test_a_sum_of_more_elements_than_2_to_the_31_is_one_launch(grids: dict[str, tuple[int, ...]]) -> None:
    add = importlib.import_module("bloomery.kernels.triton_accumulate").add_widened
    with torch.device("meta"):
        total, values = torch.empty(2**32 + 1), torch.empty(2**32 + 1, dtype=torch.bfloat16)
    add(total, values, is_first=False)
    assert grids == {"_add_widened": (2**20 + 1,)}
