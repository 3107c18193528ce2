"""Ranks exchange what the plan says: whole steps of the four source runs at full size, and small ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.counting import assert_exchanges_are_planned
from tests.layouts.exchange_rows import FURTHER_ROWS, Row, name_of
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


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    matrix = Matrix()
    yield matrix
    matrix.close()


@pytest.mark.parametrize("row", FURTHER_ROWS, ids=name_of)
def test_a_step_of_further_layouts_exchanges_what_the_plan_says(matrix: Matrix, row: Row) -> None:
    assert_exchanges_are_planned(matrix, row)
