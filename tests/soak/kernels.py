"""Triton's kernels compiled for a GPU that need not be here."""

from __future__ import annotations

import pytest
from tests.triton_interpreter import compiled

HOPPERS_SHARED_BYTES = 227 * 1024


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_and_fit_its_multiprocessors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compiled("tests.kernels.compiling")
    with capsys.disabled():
        for title, kernels in found.items():
            print(title, kernels)
    assert len(found) == 9
    for title, kernels in found.items():
        for name, kernel in kernels.items():
            assert kernel["shared"] <= HOPPERS_SHARED_BYTES, (title, name)
            assert kernel["uses_units"] == title.startswith("attention"), (title, name)
            assert kernel["rounds_to_8_bits"] == (title == "8 bits"), (title, name)
    for name, kernel in (found["sums"] | found["loss"]).items():
        assert kernel["reads_16_bytes"] == (name != "first"), name  # a first gradient is read in 8
        assert kernel["writes_16_bytes"] == (name != "measured"), name
