"""A step of the four source runs at full size: each rank exchanges what the plan says, counted on 'meta'."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tests.parallel.full_size_steps import FIRST, LAST, exchanged_by_fused_loss, step_differences


@pytest.mark.parametrize(
    ("name", "world", "phase", "stage", "micro_batches"),
    [
        ("tr1-13b", 128, FIRST, 0, None),
        ("tr1-13b", 128, FIRST, 1, None),
        ("tr1-13b", 128, LAST, 3, 4),
        ("tr11-176b", 384, FIRST, 0, 4),
        ("tr11-176b", 384, FIRST, 5, None),
        ("tr11-176b", 384, LAST, 11, 4),
        ("llmjp-172b", 512, FIRST, 0, 4),
        ("llmjp-172b", 512, FIRST, 7, 4),
        ("llmjp-172b", 512, LAST, 15, 4),
        ("intellect1-10b", 8, FIRST, 0, 3),
    ],
)
def test_a_step_of_a_source_run_exchanges_what_the_plan_says(
    name: str, world: int, phase: int, stage: int, micro_batches: int | None
) -> None:
    """With all micro-batches (None) where there are few; `make soak PART=collectives` makes whole steps."""
    found = step_differences(name, world=world, phase=phase, stage=stage, micro_batches=micro_batches)
    assert found == {}


def test_the_loss_of_kernels_gathers_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that write nothing: what ranks exchange depends on no values."""
    nothing: Any = SimpleNamespace(
        measure_logits=lambda *_: None, write_split_gradient=lambda *_: None, __name__="kernels"
    )
    monkeypatch.setitem(sys.modules, "bloomery.kernels.triton_loss", nothing)
    seen, planned = exchanged_by_fused_loss("tr11-176b", world=384)
    assert seen == planned != Counter()
