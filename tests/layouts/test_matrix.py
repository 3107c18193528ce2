"""Layouts train the same model as one process; planted mistakes do not."""

from __future__ import annotations

import numpy as np
import pytest
from tests.layouts.comparison import BF16, BF16_LOSS_TOLERANCE, LEARNT_NATS, Matrix
from tests.layouts.layouts import BLOOM, GPT, LAYOUTS, LLAMA, STYLES, Layout
from tests.layouts.training import Job

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)

COVERING = [
    pytest.param(layout, style, id=f"{layout.name}-{style}") for layout in LAYOUTS for style in layout.covers
]

# Fault, layout and style in which it must be found, and by what.
CONTROLS = (
    ("unreduced norm gradient", "DP 2", LLAMA, "gradient"),
    ("skipped micro-batch", "DP 2", LLAMA, "gradient"),
    ("norm counted twice", "DP 2", LLAMA, "norm"),
    ("untied embedding", "PP 2", BLOOM, "gradient"),
    ("skipped micro-batch", "PP 2 × DP 2", GPT, "gradient"),
    ("wrong dropout address", "DP 2", GPT, "gradient"),
    ("unreduced norm gradient", "TP 2 + SP", LLAMA, "gradient"),
    ("wrong dropout address of a shard", "TP 2 + SP", GPT, "gradient"),
    ("norm counted twice", "TP 2 + SP", BLOOM, "norm"),
    ("reduction in bf16", "DP 2", LLAMA, "gradient"),
)


@pytest.mark.parametrize("style", STYLES)
def test_the_reference_learns_at_least_one_nat(matrix: Matrix, style: str) -> None:
    assert matrix.learnt(style) >= LEARNT_NATS


@pytest.mark.parametrize(("layout", "style"), COVERING)
def test_a_layout_trains_what_one_process_trains(matrix: Matrix, layout: Layout, style: str) -> None:
    found = matrix.difference(layout, style)
    assert not found.beyond, found


@pytest.mark.parametrize("style", [BLOOM])
def test_a_layout_in_bf16_keeps_to_the_loss_of_one_process(matrix: Matrix, style: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "DP 2")
    assert matrix.difference(layout, style, settings=BF16).loss <= BF16_LOSS_TOLERANCE


def test_fp8_rounds_alike_on_tensor_parallel_ranks_and_in_one_process(matrix: Matrix) -> None:
    """What is left comes from partial sums in bf16; with a maximum of each rank's own it is twice as much."""
    layout = next(layout for layout in LAYOUTS if layout.name == "TP 2")
    assert matrix.difference(layout, LLAMA, settings=("train.precision=fp8",)).gradient < 0.05


@pytest.mark.parametrize(
    ("name", "style"),
    [("TP 2", BLOOM), ("TP 2 + SP", LLAMA), ("DP 2, ZeRO 3, recompute full", LLAMA), ("PP 2, ZBV", BLOOM)],
)
def test_weights_that_are_rounded_once_a_step_give_the_bits_of_those_rounded_in_each_product(
    matrix: Matrix, name: str, style: str
) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    once, each = (
        matrix.results(
            Job(
                style=style,
                settings=("train.precision=fp8", *layout.settings),
                ranks=layout.ranks,
                steps=3,
                fault=fault,
            )
        )
        for fault in (None, "weights scaled in each product")
    )
    for own, other in zip(once, each, strict=True):
        assert own.losses == other.losses and own.norms == other.norms
        pairs = zip(own.gradients, other.gradients, strict=True)
        assert all(np.array_equal(box.values, same.values) for box, same in pairs)


# Switches against loss spikes, in the layouts whose ranks must agree on what each of them measures. Clipping
# begins after 3 steps here.
SHORT = "short warm-up of limits"
Z_SCORE = ("optim.clip_method=z-score", "optim.clip_z_score=0.5", "optim.clip=0")
SWITCHES = (
    ("TP 2", LLAMA, ("model.qk_norm=true",)),
    ("TP 2 + SP × DP 2", LLAMA, ("model.qk_norm=true", "optim.clip_method=tensor")),
    ("DP 4, ZeRO 3 within 2", LLAMA, ("model.qk_norm=true", *Z_SCORE)),
    ("PP 2, zero-bubble", LLAMA, ("model.qk_norm=true", "optim.clip_method=tensor")),
    ("TP 2 + SP × DP 2, ZeRO 1", BLOOM, ("optim.qk_clip=0.05", "optim.qk_clip_stride=3")),
    ("PP 2 × DP 2", LLAMA, ("optim.name=muon", "optim.qk_clip=0.05", "optim.clip_method=tensor")),
    ("DP 2, ZeRO 1, offload", GPT, ("optim.qk_clip=0.05", "optim.clip_method=tensor")),
)


@pytest.mark.parametrize(
    ("name", "style", "settings"), SWITCHES, ids=[f"{row[0]}-{row[1]}" for row in SWITCHES]
)
def test_a_switch_against_spikes_does_in_a_layout_what_it_does_in_one_process(
    matrix: Matrix, name: str, style: str, settings: tuple[str, ...]
) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    found = matrix.difference(layout, style, settings=settings, patch=SHORT)
    assert not found.beyond, found
    reference = matrix.reference(style, *settings, fault=SHORT)
    for count in range(len(settings)):  # each switch does something
        fewer = matrix.reference(style, *settings[:count], *settings[count + 1 :], fault=SHORT)
        assert reference.losses != fewer.losses


@pytest.mark.parametrize(
    ("fault", "name", "style", "by"), CONTROLS, ids=[f"{row[0]}-{row[1]}" for row in CONTROLS]
)
def test_a_planted_fault_is_found(matrix: Matrix, fault: str, name: str, style: str, by: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    found = matrix.difference(layout, style, fault=fault, steps=1)
    assert by in found.beyond, found
