"""What all kernels of attention are given beside their factors; nothing of Triton's is needed for that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery import kernels
from bloomery.kernels.rules import Rules, Tiles

NAME = "bloomery.kernels.triton_tiles"
NO_RULES = Rules(starts=None, ends=None, slopes=None, row_keys=None, column_keys=None, rate=0.0)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that kernels share, imported beside a stand-in for Triton."""
    triton: Any = ModuleType("triton")
    triton.jit = lambda function: function
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    triton.language = SimpleNamespace(constexpr=lambda value: value)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]
    del kernels.triton_tiles  # type: ignore[attr-defined]


def test_kernels_get_the_sizes_of_their_factors_and_which_rules_hold(tiles: Any) -> None:
    query, key = torch.zeros(2, 5, 4, 24).half(), torch.zeros(2, 5, 2, 24).half()
    plain = tiles.constants(query, key, NO_RULES)
    assert plain == {
        "scale": 24**-0.5,
        "threshold": -(2**31),
        "kept": 1.0,
        "LENGTH": 5,
        "HEADS": 4,
        "KV_HEADS": 2,
        "WIDTH": 24,
        "PADDED": 32,
        "HAS_DOCUMENTS": False,
        "HAS_SLOPES": False,
        "DROPS": False,
        "PRECISION": "tf32",
    }
    one = torch.zeros(1)
    for rules, changed in (
        (Rules(starts=one, ends=one, slopes=None, row_keys=None, column_keys=None, rate=0.0),
         {"HAS_DOCUMENTS": True}),
        (Rules(starts=None, ends=None, slopes=one, row_keys=None, column_keys=None, rate=0.0),
         {"HAS_SLOPES": True}),
        (Rules(starts=None, ends=None, slopes=None, row_keys=one, column_keys=one, rate=0.25),
         {"DROPS": True, "threshold": 2**30 - 2**31, "kept": 1 / 0.75}),
    ):  # fmt: skip
        assert tiles.constants(query, key, rules) == plain | changed
    assert tiles.constants(query.float(), key.float(), NO_RULES)["PRECISION"] == "ieee"


@pytest.mark.parametrize(("width", "padded"), [(8, 16), (16, 16), (17, 32), (80, 128), (128, 128)])
def test_heads_are_padded_to_a_power_of_two_that_units_multiply(tiles: Any, width: int, padded: int) -> None:
    heads = torch.zeros(1, 3, 2, width)
    assert tiles.constants(heads, heads, NO_RULES)["PADDED"] == padded


def test_kernels_get_tensors_of_rules_strides_and_tiles_in_their_order(tiles: Any) -> None:
    rules = Rules(starts="s", ends="e", slopes="l", row_keys="r", column_keys="c", rate=0.5)  # type: ignore[arg-type]
    unused: Any = "unused"
    assert tiles.rule_tensors(rules, unused) == ("s", "e", "l", "r", "c")
    assert tiles.rule_tensors(NO_RULES, unused) == ("unused",) * 5
    assert tiles.strides(torch.zeros(2, 5, 4, 24)) == (480, 96, 24)
    launched = tiles.launch(Tiles(queries=128, keys=64, warps=8, stages=3))
    assert launched == {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
