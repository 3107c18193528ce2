"""A run whose batch ramps up, whose micro-batch changes and which moves to other nodes: one loss curve."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import LOSS_TOLERANCE, NORM_TOLERANCE, Matrix
from tests.layouts.layouts import BLOOM
from tests.layouts.training import Arrays, Job, gathered

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)

CHANGING = (
    "train.steps=0",
    "train.samples=160",
    "train.ramp_up=[4, 4, 24]",
    "train.micro_batch=1",
    "train.micro_batch_changes=[[64, 2]]",
)
# Ranks, their layout, the steps they make, and the samples consumed before.
STAGES = (
    (4, ("parallel.data=4", "parallel.zero=1"), 4, 0),
    (2, ("parallel.data=2", "parallel.zero=3"), 8, 16),
    (4, ("parallel.tensor=2", "parallel.sequence=true", "parallel.data=2", "parallel.zero=2"), 8, 72),
)


def test_the_loss_goes_on_through_ramp_up_other_micro_batches_and_other_nodes(matrix: Matrix) -> None:
    (unbroken,) = matrix.results(Job(style=BLOOM, settings=CHANGING, returns=()))
    losses, norms = list[float](), list[float]()
    state: Arrays | None = None
    for ranks, layout, steps, consumed in STAGES:
        results = matrix.results(
            Job(
                style=BLOOM,
                settings=(*CHANGING, *layout),
                ranks=ranks,
                steps=steps,
                first_step=len(losses),
                consumed=consumed,
                state=state,
                returns=("state",),
            )
        )
        losses += results[0].losses
        norms += results[0].norms
        # As a checkpoint does: each rank's boxes, and from them the boxes of whoever goes on.
        state = gathered(box for result in results for box in result.state)
    assert losses == pytest.approx(unbroken.losses, rel=LOSS_TOLERANCE)
    assert norms == pytest.approx(unbroken.norms, rel=NORM_TOLERANCE)
