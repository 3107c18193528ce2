"""The formulas give the figures that runs published."""

import pytest

from bloomery.plan.advice import init_std_megatron, init_std_small
from bloomery.plan.checkpoint_plan import (
    FULL_CHECKPOINT_BYTES,
    WEIGHTS_BYTES,
    best_interval_s,
    lost_share,
    lost_work_hours,
)
from bloomery.plan.layout import Layout, bubble_share

GIB = 2**30


def test_a_full_checkpoint_is_14_bytes_a_parameter_and_weights_alone_2():
    assert round(176e9 * FULL_CHECKPOINT_BYTES / GIB, 2) == 2294.78
    assert round(176e9 * WEIGHTS_BYTES / GIB, 2) == 327.83


def test_initial_standard_deviations_of_a_hidden_size_of_14336():
    assert init_std_megatron(14336) == pytest.approx(0.00482197968631537, rel=1e-14)
    # 0.00528221…, which is often quoted cut off, as 0.0052821.
    assert round(init_std_small(14336), 7) == 0.0052822


@pytest.mark.parametrize("micro_batches", [128, 8, 2])
def test_the_bubble_is_p_minus_1_over_m_plus_p_minus_1(micro_batches):
    assert bubble_share(Layout(pipeline=12), micro_batches) == pytest.approx(11 / (micro_batches + 11))
    chunked = Layout(pipeline=12, chunks=4, schedule="interleaved")
    assert bubble_share(chunked, micro_batches) == pytest.approx((11 / 4) / (micro_batches + 11 / 4))
    assert bubble_share(Layout(), micro_batches) == 0.0


@pytest.mark.parametrize(("days", "minutes"), [(3.5, 82), (7, 116)])
def test_youngs_interval_for_saves_of_40_seconds(days, minutes):
    best = best_interval_s(save_s=40, mean_time_between_failures_s=days * 86_400)
    assert round(best / 60) == minutes


def test_youngs_interval_loses_least():
    one = dict(save_s=40.0, mean_time_between_failures_s=3.5 * 86_400)
    best = best_interval_s(**one)
    at_best = lost_share(interval_s=best, **one)
    assert all(lost_share(interval_s=best * factor, **one) > at_best for factor in (0.5, 0.9, 1.1, 2.0))


def test_250_iterations_of_105_seconds_are_7_hours():
    assert round(lost_work_hours(steps_between_saves=250, step_s=105), 2) == 7.29
