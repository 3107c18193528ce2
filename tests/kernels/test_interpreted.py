"""Triton's kernels in its interpreter, which computes on CPUs what they would compute on a GPU."""

from __future__ import annotations

from tests.triton_interpreter import interpreted


def test_attention_by_tiles_is_attention_has_its_gradients_and_reads_nothing_beyond_its_tensors() -> None:
    cases = interpreted("tests.kernels.attention_cases")
    assert len(cases) == 5
    for case in cases:
        assert max(case["differences"]) < 1e-5, case


def test_attention_by_tiles_reaches_rows_and_heads_beyond_two_to_the_31_numbers() -> None:
    cases = interpreted("tests.kernels.far_cases")
    assert len(cases) == 2
    for differences in cases:
        assert max(differences) < 1e-5


def test_the_loss_whose_gradient_replaces_the_logits_has_the_terms_and_gradients_of_the_loss() -> None:
    cases = interpreted("tests.kernels.loss_cases")
    assert len(cases) == 3
    for differences in cases:
        assert max(differences) < 1e-5


def test_the_loss_of_split_logits_has_the_terms_and_gradients_of_the_whole_and_gathers_once_a_chunk() -> None:
    cases = interpreted("tests.kernels.split_loss_cases")
    assert len(cases) == 6
    for *differences, by_padding, collectives in cases:
        assert len(differences) == 3 and max(differences) < 1e-5
        assert by_padding == 0.0 and collectives == 3


def test_the_compiler_takes_the_loss_of_split_logits_whole() -> None:
    eager, compiled = interpreted("tests.kernels.compiled_split_loss")
    assert len(eager) == 5 and eager == compiled
    assert max(eager) < 1e-4


def test_sums_of_gradients_have_the_bits_of_torchs_and_touch_nothing_beside_them() -> None:
    assert interpreted("tests.kernels.accumulate_cases") == [True] * 40


def test_codes_of_8_bits_and_their_transpose_are_torchs_and_nothing_is_written_beside_them() -> None:
    cases = interpreted("tests.kernels.fp8_cases")
    assert len(cases) == 33
    assert cases == dict.fromkeys(cases, 0)


def test_the_compiler_takes_attention_whole_forward_and_backward() -> None:
    assert interpreted("tests.kernels.compiled_cases") == [0.0] * 4
