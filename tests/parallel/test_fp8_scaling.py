"""Runs whose 8-bit factors have a scale for each row or block: they learn, in each layout the same."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import LEARNT_NATS
from tests.layouts.layouts import LLAMA
from tests.layouts.training import Job, RankResult, train

from bloomery.model.fp8_scaling import FINE_SCALINGS, FineScaling


def trained(*settings: str) -> RankResult:
    return train(Job(style=LLAMA, settings=settings), 0)


@pytest.fixture(scope="module")
def wide() -> RankResult:
    return trained("train.precision=bf16")


@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_a_run_learns_beside_bf16(wide: RankResult, scaling: FineScaling) -> None:
    narrow = trained("train.precision=fp8", f"train.fp8_scaling={scaling}")
    assert narrow.losses != wide.losses
    assert narrow.losses == pytest.approx(wide.losses, rel=2e-2)
    assert narrow.losses[0] - narrow.losses[-1] >= LEARNT_NATS


@pytest.mark.parametrize("recompute", ["elementwise", "mlp", "full"])
def test_what_is_computed_again_is_rounded_to_the_same_bits(recompute: str) -> None:
    settings = ("train.precision=fp8", "train.fp8_scaling=block")
    kept, again = (
        train(Job(style=LLAMA, settings=(*settings, *more), steps=2), 0)
        for more in ((), (f"train.recompute={recompute}",))
    )
    assert kept.losses == again.losses and kept.norms == again.norms
