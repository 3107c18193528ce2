"""The peak of a training's memory, counted, is what the planner says, within a tenth (ZeRO 1: 13%)."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.holding import peak
from tests.layouts.layouts import BLOOM, LLAMA
from tests.machine import has_python_headers

pytestmark = pytest.mark.timeout(900)
KEPT, BY_BLOCK = ("parallel.working=kept",), ("parallel.working=by-block",)
ZERO_1 = ("parallel.data=2", "parallel.zero=1")
CASES = [(LLAMA, KEPT), (LLAMA, BY_BLOCK), (LLAMA, ZERO_1), (BLOOM, KEPT), (BLOOM, BY_BLOCK)]
NAMES = ["llama kept", "llama by-block", "llama zero 1", "bloom kept", "bloom by-block"]
RECOMPUTED = ("none", "elementwise", "mlp", "full")


def bound(layout: tuple[str, ...]) -> float:
    """The largest difference; gloo has buffers of its own, beside which little is kept under 'full'."""
    return 0.13 if layout == ZERO_1 else 0.1


def off_by(matrix: Matrix, style: str, *settings: str) -> float:
    ranks = 2 if "parallel.data=2" in settings else 1
    found = matrix.ranks.run(peak, style, settings, ranks=ranks)
    return max((one.planned / one.counted - 1 for one in found), key=abs)


@pytest.mark.parametrize(("style", "layout"), CASES, ids=NAMES)
def test_an_eager_training_takes_what_is_planned(matrix: Matrix, style: str, layout: tuple[str, ...]) -> None:
    figures = {
        (recompute, precision): off_by(
            matrix, style, f"train.recompute={recompute}", f"train.precision={precision}", *layout
        )
        for recompute in RECOMPUTED
        for precision in (("bf16",) if layout == BY_BLOCK else ("fp32", "bf16"))
    }
    assert {case: off for case, off in figures.items() if abs(off) > bound(layout)} == {}


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs(has_python_headers, package="python3-dev")
@pytest.mark.parametrize(("style", "layout"), CASES, ids=NAMES)
@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_a_compiled_training_takes_what_is_planned(
    matrix: Matrix, style: str, recompute: str, layout: tuple[str, ...]
) -> None:
    settings = (f"train.recompute={recompute}", "train.precision=bf16", "train.compile=on", *layout)
    assert abs(off_by(matrix, style, *settings)) <= bound(layout)


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs(has_python_headers, package="python3-dev")
def test_a_compiled_training_that_rounds_by_block_holds_16_bytes_a_parameter_between_steps(
    matrix: Matrix,
) -> None:
    settings = ("train.precision=bf16", "train.compile=on", *BY_BLOCK)
    (found,) = matrix.ranks.run(peak, LLAMA, settings, ranks=1)
    ends = 2 * 2 * 1024 * 256  # embedding and head, which are kept
    assert 16.0 <= (found.held - ends) / found.parameters <= 16.2
