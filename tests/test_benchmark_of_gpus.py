"""The benchmark of accelerators: what of it runs on a CPU does what it says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from bloomery.config.parallel import ParallelSection

SIZES = dict(layers=2, hidden=32, heads=2, ffn=48, vocabulary=64, sequence_length=16, samples=3)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    for name in ("gpu", "contract", "peers_throughput"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def test_a_run_is_resumed_and_exported(benchmarks: Any) -> None:
    assert benchmarks("gpu")._resumes_and_exports() == ""


def test_a_command_that_fails_is_told_and_costs_no_other_figure(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = benchmarks("gpu")
    monkeypatch.setattr(gpu.sys, "executable", "/bin/false")
    assert gpu._resumes_and_exports() == "bloomery train: ended with status 1"
    monkeypatch.setattr(gpu, "FAMILIES", {"llama": {}})
    *families, run, tests = gpu._checked(tiny=True)
    assert [one.reference for one in families[0]] == ["ended with status 1"] * 2
    assert not any(one.ok for one in (*families[0], *run, *tests))


def test_a_step_by_samples_that_computes_again_has_the_loss_and_the_update_of_one(benchmarks: Any) -> None:
    peers, layout = benchmarks("peers_throughput"), benchmarks("gpu")._layout
    shape = peers.Shape(**SIZES)
    usual = layout({"kind": "speed", "size": "1B", "length": 4096})
    losses = {}
    for length in (0, 4096, 8192):
        given = layout({"kind": "speed", "size": "8B", "length": length}) if length else usual
        parallel = ParallelSection(working=given.pop("working"))
        step = peers.bloomery_step(shape, compiled=False, parallel=parallel, **given)
        losses[length] = [float(step()) for _ in range(3)]
    assert losses[4096] == pytest.approx(losses[0], rel=1e-2)
    assert losses[8192] == pytest.approx(losses[0], rel=1e-2)
    assert len(set(losses[0])) == 3


def test_documents_hide_tokens_of_others(benchmarks: Any) -> None:
    peers = benchmarks("peers_throughput")
    losses = [
        float(
            peers.bloomery_step(
                peers.Shape(**SIZES), compiled=False, parallel=ParallelSection(), document_tokens=tokens
            )()
        )
        for tokens in (0, 16, 4)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] != pytest.approx(losses[0], rel=1e-4)
