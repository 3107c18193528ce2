"""Triton's kernels in its interpreter, which computes on CPUs what they would compute on a GPU."""

from __future__ import annotations

from tests.triton_interpreter import interpreted


def test_attention_by_tiles_is_attention_and_has_its_gradients() -> None:
    cases = interpreted("tests.kernels.attention_cases")
    assert len(cases) == 4
    for case in cases:
        assert max(case["differences"]) < 1e-5, case
