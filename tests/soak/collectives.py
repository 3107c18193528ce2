"""Whole steps of the four source runs at full size: ranks exchange what the plan says."""

from __future__ import annotations

import pytest
from tests.parallel.full_size_steps import FIRST, LAST, step_differences

pytestmark = pytest.mark.slow

# Recipe, ranks, and the first, a middle and the last stage.
RUNS = (
    ("tr1-13b", 128, (0, 1, 3)),
    ("tr11-176b", 384, (0, 5, 11)),
    ("llmjp-172b", 512, (0, 7, 15)),
    ("intellect1-10b", 8, (0,)),
)


@pytest.mark.parametrize("phase", [FIRST, LAST], ids=["first batch", "full batch"])
@pytest.mark.parametrize(
    ("name", "world", "stage"), [(name, world, stage) for name, world, stages in RUNS for stage in stages]
)
def test_a_whole_step_exchanges_what_the_plan_says(name: str, world: int, stage: int, phase: int) -> None:
    assert step_differences(name, world=world, phase=phase, stage=stage) == {}
