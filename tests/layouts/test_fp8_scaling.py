"""8-bit factors with a scale for each row or block: each layout rounds them as one process does."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import GRADIENT_TOLERANCE, Matrix
from tests.layouts.layouts import LAYOUTS, LLAMA

pytestmark = pytest.mark.timeout(900)  # jobs of ranks have deadlines of their own

WIDE = ("model.hidden=256", "model.heads=4", "model.kv_heads=4", "model.ffn=256", "model.layers=2")
"""Two ranks get whole blocks of 128 channels of each layer."""
CASES = (
    ("TP 2", "row", ()),
    ("TP 2 + SP", "block", WIDE),
    ("TP 2", "mx", WIDE),
    ("PP 2, zero-bubble", "row", ()),
    ("DP 2, ZeRO 3", "block", ()),
)


@pytest.fixture(scope="module")
def first_step(matrix: Matrix) -> Matrix:
    """Compares one step, on the same ranks."""
    short = Matrix(steps=1)
    short.ranks = matrix.ranks
    return short


@pytest.mark.parametrize(("name", "scaling", "sizes"), CASES, ids=[" ".join(row[:2]) for row in CASES])
def test_a_layout_rounds_what_one_process_rounds(
    first_step: Matrix, name: str, scaling: str, sizes: tuple[str, ...]
) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    found = first_step.difference(
        layout,
        LLAMA,
        settings=("train.precision=fp8", f"train.fp8_scaling={scaling}", *sizes),
        patch="fp32 around 8 bits",
    )
    # Wide layouts in fp32 differ by 3e-5, and a single code that a sum's order turns over adds some.
    assert found.gradient < 10 * GRADIENT_TOLERANCE
