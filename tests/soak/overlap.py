"""What runs beside the forward and the backward gives the bits of what follows them, in each layout.

`make soak PART=overlap`: reductions, gathers of updated weights, and blocks gathered one, two and three
ahead; compiled and not; and in 8 bits, whose copies of weights are made when these have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.layouts import LAYOUTS, LLAMA, Layout
from tests.layouts.test_overlap import BY_ROW, FP8, assert_equal_bits, buckets_begun
from tests.machine import has_python_headers

from bloomery.config.parallel import SPLIT_BACKWARD

pytestmark = pytest.mark.timeout(3600)

PARALLEL = [layout for layout in LAYOUTS if "data=" in " ".join(layout.settings)]


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    """Ranks that stay for all layouts."""
    matrix = Matrix()
    yield matrix
    matrix.close()


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs(has_python_headers, package="python3-dev")
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("layout", PARALLEL, ids=lambda layout: layout.name)
def test_every_layout_gives_the_same_bits_with_and_without_overlap(
    matrix: Matrix, layout: Layout, compiled: str
) -> None:
    if compiled == "on" and any(f"schedule={name}" in " ".join(layout.settings) for name in SPLIT_BACKWARD):
        pytest.skip("a schedule that splits the backward is not compiled")
    assert_equal_bits(matrix, layout, LLAMA, f"train.compile={compiled}")


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [FP8, BY_ROW, (*FP8, "train.fp8_scaling=block")], ids=" ".join)
@pytest.mark.parametrize(
    "layout",
    [layout for layout in PARALLEL if {"parallel.zero=1", "parallel.zero=2"} & {*layout.settings}],
    ids=lambda layout: layout.name,
)
def test_weights_in_8_bits_have_the_same_bits_where_they_are_rounded_when_they_arrive(
    matrix: Matrix, layout: Layout, scaling: tuple[str, ...]
) -> None:
    if "block" in scaling[-1] and "parallel.tensor" in " ".join(layout.settings):
        pytest.skip("its ranks have no whole blocks of 128 channels")
    assert_equal_bits(matrix, layout, LLAMA, *scaling)


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs(has_python_headers, package="python3-dev")
def test_buckets_of_a_compiled_model_are_begun_before_the_last_backward_has_ended(matrix: Matrix) -> None:
    for overlapped, serial, buckets in matrix.ranks.run(buckets_begun, "train.compile=on", ranks=2):
        assert buckets > 5 and buckets - 2 <= overlapped < buckets and serial == 0
