"""8-bit factors with a scale a tensor, row or block: each layout rounds them as one process does."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Matrix
from tests.layouts.layouts import LAYOUTS, LLAMA

pytestmark = pytest.mark.timeout(900)  # jobs of ranks have deadlines of their own

WIDE = ("model.hidden=256", "model.heads=4", "model.kv_heads=4", "model.ffn=256", "model.layers=2")
"""Two ranks get whole blocks of 128 channels of each layer."""
CASES = (
    ("TP 2 + SP", "tensor", ()),
    ("TP 2", "row", ()),
    ("TP 2 + SP", "block", WIDE),
    ("TP 2", "mx", WIDE),
    ("PP 2, zero-bubble", "row", ()),
    ("DP 2, ZeRO 3", "block", ()),
    ("DP 2, ZeRO 1", "row", ()),
)


@pytest.fixture(scope="module")
def two_steps(matrix: Matrix) -> Matrix:
    """Compares gradients of a first step, and the loss of a second, on the same ranks."""
    short = Matrix(steps=2)
    short.ranks = matrix.ranks
    return short


@pytest.mark.parametrize(("name", "scaling", "sizes"), CASES, ids=[" ".join(row[:2]) for row in CASES])
def test_a_layout_rounds_what_one_process_rounds(
    two_steps: Matrix, name: str, scaling: str, sizes: tuple[str, ...]
) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    found = two_steps.difference(
        layout,
        LLAMA,
        settings=("train.precision=fp8", f"train.fp8_scaling={scaling}", *sizes),
        # Powers of two would hide that a shard has a scale of its own: the same bits, where nothing is small.
        patch="fp32 between products" if scaling == "tensor" else "fp32 around 8 bits",
    )
    # Wide layouts in fp32 differ by 3e-5, and a single code that a sum's order turns over adds some.
    assert found.gradient < 10 * GRADIENT_TOLERANCE and found.loss < 10 * LOSS_TOLERANCE
