"""The plan says exactly which collectives and messages each rank begins in a step, and of how many bytes.

`make soak PART=collectives` counts further layouts.
"""

from __future__ import annotations

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.counting import assert_exchanges_are_planned
from tests.layouts.exchange_rows import ROWS, Row, name_of

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_rank_exchanges_what_the_plan_says_with_the_collectives_of_gloo_and_of_nccl(
    matrix: Matrix, row: Row
) -> None:
    assert_exchanges_are_planned(matrix, row)
