"""The counted peak of a training's memory is the planned one within a tenth, or a little more in shards."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.holding import peak
from tests.layouts.layouts import BLOOM, LLAMA
from tests.machine import has_python_headers

pytestmark = pytest.mark.timeout(900)
KEPT, BY_BLOCK = ("parallel.working=kept",), ("parallel.working=by-block",)
ZERO_1, ZERO_3 = (("parallel.data=2", f"parallel.zero={zero}") for zero in (1, 3))
RECOMPUTED = ("none", "elementwise", "mlp", "full")


def off_by(matrix: Matrix, style: str, *settings: str) -> float:
    ranks = 2 if "parallel.data=2" in settings else 1
    found = matrix.ranks.run(peak, style, settings, ranks=ranks)
    return max((one.planned / one.counted - 1 for one in found), key=abs)


@pytest.mark.parametrize(
    "layout", [KEPT, BY_BLOCK, ZERO_1, ZERO_3], ids=["kept", "by-block", "zero 1", "zero 3"]
)
@pytest.mark.parametrize("style", [LLAMA, BLOOM])
def test_an_eager_training_takes_what_is_planned(matrix: Matrix, style: str, layout: tuple[str, ...]) -> None:
    figures = {
        (recompute, precision): off_by(
            matrix, style, f"train.recompute={recompute}", f"train.precision={precision}", *layout
        )
        for recompute in RECOMPUTED
        for precision in (("bf16",) if layout == BY_BLOCK else ("fp32", "bf16"))
    }
    # The plan adds up a block's gradient, gathered blocks and logits, which follow each other; that is much
    # of a model of four blocks. Gloo has buffers of its own, beside which little else is kept under 'full'.
    bound = 0.13 if layout in (ZERO_1, ZERO_3) else 0.1
    assert {case: off for case, off in figures.items() if abs(off) > bound} == {}


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs(has_python_headers, package="python3-dev")
@pytest.mark.parametrize(
    "layout", [KEPT, BY_BLOCK, ZERO_1, ZERO_3], ids=["kept", "by-block", "zero 1", "zero 3"]
)
@pytest.mark.parametrize("style", [LLAMA, BLOOM])
@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_a_compiled_training_takes_what_is_planned(
    matrix: Matrix, style: str, recompute: str, layout: tuple[str, ...]
) -> None:
    settings = (f"train.recompute={recompute}", "train.precision=bf16", "train.compile=on", *layout)
    assert abs(off_by(matrix, style, *settings)) <= 0.1


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
