"""Layers whose exchange overlaps their product compute what the product and the collective do in turn.

Ranks here are of CPUs, and take torch's own fallbacks through the operators that GPUs take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parallel.lines import spawn
from tests.parallel.overlapped import (
    calls_by_recomputation,
    products_of_both_forms,
    traced_and_eager,
    trained_with_and_without,
)
from tests.parallel.small import CPU

from bloomery import torch_private
from bloomery.errors import BloomeryError
from bloomery.parallel.axis import Axis
from bloomery.parallel.overlapped_linear import can_overlap_products

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
BLOCKS, MICRO_BATCHES, HELD_OUT_BATCHES = 2, 2, 2


def calls(gathers: int, scatters: int) -> dict[str, int]:
    return {GATHER: gathers, SCATTER: scatters}


def test_results_and_all_gradients_are_those_of_products_and_collectives_in_turn(tmp_path: Path) -> None:
    for rank in spawn(2, products_of_both_forms, tmp_path):
        for kind, (plain, overlapped) in rank.items():
            assert plain.calls == {}
            assert overlapped.calls == calls(1, 1), "one operator forward, the other backward"
            for expected, found in zip(plain.values, overlapped.values, strict=True):
                assert np.allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max()), kind


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(2, trained_with_and_without, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_a_model_learns_the_same_with_every_exchange_of_its_blocks_overlapped(
    ranks: list[dict[str, Any]], style: str
) -> None:
    for rank in ranks:
        (plain, none), (overlapped, made) = rank[f"{style} plain"], rank[f"{style} overlapped"]
        assert none == {}
        # Two of each a block: in three steps' forwards and backwards, and in the held-out loss's forwards.
        expected_calls = 2 * BLOCKS * (3 * 2 * MICRO_BATCHES + HELD_OUT_BATCHES)
        assert made == calls(expected_calls, expected_calls)
        assert np.allclose(overlapped.steps, plain.steps, rtol=1e-5, atol=1e-6)
        for name, gradient in overlapped.gradients.items():
            expected = plain.gradients[name].values
            scale = np.linalg.norm(plain.gradients[name.replace("key.bias", "query.bias")].values)
            assert np.linalg.norm(gradient.values - expected) < 1e-5 * scale, name


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_on_cpus_the_setting_changes_no_bit(ranks: list[dict[str, Any]], style: str) -> None:
    for rank in ranks:
        (plain, _), (cpu, made) = rank[f"{style} plain"], rank[f"{style} cpu"]
        assert made == {} and cpu.steps == plain.steps
        for name, weight in cpu.weights.items():
            assert np.array_equal(weight.values, plain.weights[name].values), name


def test_recomputation_repeats_what_it_does_not_keep(tmp_path: Path) -> None:
    for rank in spawn(2, calls_by_recomputation, tmp_path):
        base, made = rank["none"]
        for mode in ("elementwise", "mlp", "full"):
            assert np.allclose(rank[mode][0], base, rtol=1e-6, atol=1e-7)
        assert rank["elementwise"][1] == made, "what an operator returned is kept"
        for mode, pairs in (("mlp", 1), ("full", 2)):
            more = BLOCKS * MICRO_BATCHES * pairs
            assert rank[mode][1] == calls(made[GATHER] + more, made[SCATTER] + more)


def test_a_block_is_traced_as_a_whole_with_its_operators_inside(tmp_path: Path) -> None:
    for (eager, eager_calls), (traced, traced_calls) in spawn(2, traced_and_eager, tmp_path):
        assert np.allclose(traced, eager, rtol=1e-5, atol=1e-6)
        assert traced_calls == eager_calls


def test_cpus_and_an_axis_of_one_rank_do_not_overlap() -> None:
    axis: Any = Axis(ranks=(0, 1), group=object())  # type: ignore[arg-type]
    assert not can_overlap_products(axis, CPU)
    assert not can_overlap_products(Axis(), torch.device("cuda"))


def test_gpus_that_cannot_map_each_others_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        group_name = "tensor"

    def refuse(group: str) -> None:
        raise RuntimeError(f"no peer access in {group}")

    monkeypatch.setattr(torch_private, "open_symmetric_memory", refuse)
    axis: Any = Axis(ranks=(0, 1), group=Group())  # type: ignore[arg-type]
    with pytest.raises(BloomeryError, match=r"the 2 ranks .* no peer access in tensor") as caught:
        can_overlap_products(axis, torch.device("cuda"))
    assert "parallel.async_tensor = false" in caught.value.remedy
