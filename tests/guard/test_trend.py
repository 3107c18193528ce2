"""What the guards that only warn say of norms, seconds and plateaus, to the number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.guard.reports import BATCH, report

from bloomery.events.records import StepReport
from bloomery.guard.trend import GradientNormRise, Plateau, ThroughputDrop
from bloomery.guard.verdict import CarryOn, Rung, Watch


def told(guard: Any, reports: Iterable[StepReport]) -> list[Watch]:
    history, found = guard.fresh(), []
    for one in reports:
        history, verdict = guard.judge(history, one)
        found += [verdict] if isinstance(verdict, Watch) else []
    return found


def normed(norms: list[float], *, first: int = 1, **more: Any) -> list[StepReport]:
    return [report(step, gradient_norm=norm, **more) for step, norm in enumerate(norms, first)]


def timed(seconds: list[float], *, first: int = 1, **more: Any) -> list[StepReport]:
    return [report(step, shared_seconds=value, **more) for step, value in enumerate(seconds, first)]


def test_norms_of_three_times_the_usual_are_told_with_both_and_not_again_for_200_steps() -> None:
    usual = [0.5 if step % 2 else 0.52 for step in range(300)]
    (warning,) = told(GradientNormRise(), normed([*usual, *[1.5] * 8, *usual[:100], *[1.5] * 4]))
    assert warning.kind == "gradient norm" and warning.numbers["gradient_norm"] == 1.5
    assert 0.5 <= warning.numbers["usual"] <= 0.52
    assert warning.numbers["times"] == pytest.approx(1.5 / warning.numbers["usual"])
    assert len(told(GradientNormRise(), normed([*usual, *[1.5] * 8, *usual[:200], *[1.5] * 8]))) == 2


def test_norms_of_a_start_of_too_few_steps_and_of_refused_updates_are_not_told() -> None:
    high = [*[0.5] * 150, *[1.5] * 9]
    assert told(GradientNormRise(), normed(high)) == [], "the first 200 steps"
    assert told(GradientNormRise(), normed(high, first=201))
    for steps, count in ((197, 0), (198, 1)):
        assert len(told(GradientNormRise(), normed([*[0.5] * steps, *[1.5] * 3]))) == count
    assert told(GradientNormRise(), normed([*[0.5] * 9, *[1.5] * 9], first=201)) == [], "9 are known"
    refused = normed([1.5] * 9, first=351, update_applied=False)
    assert told(GradientNormRise(), [*normed([0.5] * 150, first=201), *refused]) == []


@pytest.mark.parametrize("change", [{"global_batch": 5}, {"precision": "fp8"}, {"peers": 2}])
def test_norms_and_seconds_after_a_change_are_not_compared_with_those_before(change: dict[str, Any]) -> None:
    norms = [*normed([0.5] * 150, first=201), *normed([1.5] * 20, first=351, **change)]
    assert told(GradientNormRise(), norms) == []
    assert told(ThroughputDrop(), [*timed([1.0] * 150), *timed([2.0] * 20, first=151, **change)]) == []


def test_what_comes_a_thousand_steps_later_is_not_compared_with_what_was_before() -> None:
    usual = timed([1.0] * 150)
    assert told(ThroughputDrop(), [*usual, *timed([2.0] * 5, first=150 + 1000)])
    assert told(ThroughputDrop(), [*usual, *timed([2.0] * 5, first=150 + 1001)]) == []
    assert told(ThroughputDrop(), [*usual, *timed([2.0] * 5, first=150)]) == [], "made again"


def test_three_steps_that_are_slower_by_a_twentieth_of_the_throughput_are_told() -> None:
    steady = [2.0] * 100  # the spread is its floor: 1% of 2 s, and a little for a window of few values
    (warning,) = told(ThroughputDrop(), timed([*steady, *[2.3] * 5]))
    assert warning.judged_step == 103 and warning.kind == "throughput"
    assert warning.numbers["seconds"] == 2.3 and warning.numbers["usual"] == 2.0
    assert 0.02 <= warning.numbers["spread"] < 0.022 and "13.0% less throughput" in warning.reason
    assert told(ThroughputDrop(), timed([*steady, 2.3, 2.3, 2.0, 2.3, 2.3])) == []
    assert told(ThroughputDrop(), timed([*steady, *[2.09] * 5])) == [], "within five spreads"
    assert told(ThroughputDrop(), timed([*steady, *[0.0] * 3, *[2.0] * 5])) == [], "nobody measured these"
    on = [*steady, *[2.3] * 3, *steady[:80]]
    assert len(told(ThroughputDrop(), timed([*on, *[2.4] * 5]))) == 1, "not again so soon"


def test_seconds_are_told_from_a_twentieth_on_once_sixteen_are_known_and_again_after_200_steps() -> None:
    assert told(ThroughputDrop(), timed([*[2.0] * 200, *[2.11] * 3]))
    assert told(ThroughputDrop(), timed([*[2.0] * 22, *[2.3] * 3])), "16 and the newest 9"
    assert told(ThroughputDrop(), timed([*[2.0] * 21, *[2.3] * 3])) == []
    for between, count in ((196, 1), (197, 2)):
        steps = [*[2.0] * 100, *[2.3] * 3, *[2.0] * between, *[2.3] * 3]
        assert len(told(ThroughputDrop(), timed(steps))) == count


def test_of_seconds_that_vary_five_spreads_are_told() -> None:
    varying = [1.9, 2.1] * 50  # a spread of about 0.155, so five are 0.77 beyond 2 s
    assert told(ThroughputDrop(), timed([*varying, *[2.7] * 5])) == []
    (warning,) = told(ThroughputDrop(), timed([*varying, *[2.9] * 5]))
    assert 0.14 < warning.numbers["spread"] < 0.16
    for guard in (
        GradientNormRise(),
        ThroughputDrop(),
        Plateau(),
    ):  # no history yet, as after an older version
        one = report(3, shared_seconds=2.0)
        assert guard.judge(None, one) == guard.judge(guard.fresh(), one)


def flattening(
    *, fall_before: float, fall: float, rate: float = 1e-3, steps: int = 16_384
) -> list[StepReport]:
    """Reports of every 8th step whose mean falls by two amounts in the last two whole doublings."""
    levels = {12: 3.0 + fall_before, 13: 3.0, 14: 3.0 - fall}
    return [
        report(
            step,
            levels.get(step.bit_length(), 3.0 + fall_before if step.bit_length() < 14 else 3.0 - fall),
            learning_rate=1e-3 if step < steps else rate,
        )
        for step in range(8, steps + 1, 8)
    ]


def test_a_plateau_is_told_with_what_each_doubling_brought() -> None:
    (warning,) = told(Plateau(), flattening(fall_before=0.5, fall=0.01))
    assert warning.judged_step == 16_384 and warning.kind == "plateau"
    assert warning.numbers == {
        "fall": pytest.approx(0.01),
        "fall_before": pytest.approx(0.5),
        "loss": pytest.approx(2.99),
    }
    assert "by 0.0100 to 2.9900" in warning.reason and "by 0.5000 in as large a part" in warning.reason


@pytest.mark.parametrize(
    ("changed", "is_told"),
    [
        ({"fall": 0.016}, False),  # more than half a percent of the loss
        ({"fall": 0.014}, True),
        ({"fall_before": 0.1, "fall": 0.011}, False),  # more than a tenth of the fall before
        ({"fall_before": 0.1, "fall": 0.009}, True),
        ({"fall_before": 0.02, "fall": 0.0}, False),  # there was hardly a fall before
        ({"fall_before": 0.035, "fall": 0.0}, True),  # more than a hundredth of the loss
        ({"rate": 0.49e-3}, False),  # at a learning rate that has decayed
        ({"rate": 0.51e-3}, True),
    ],
)
def test_a_fall_that_is_small_by_every_measure_is_a_plateau(changed: dict[str, float], is_told: bool) -> None:
    found = told(Plateau(), flattening(**{"fall_before": 0.5, "fall": 0.01, **changed}))
    assert bool(found) is is_told


def test_a_plateau_of_few_or_early_steps_is_none_and_one_is_told_once() -> None:
    flat = flattening(fall_before=0.5, fall=0.01, steps=16_376)
    early = [report(step, 3.5 if step < 1024 else 3.0) for step in range(1, 4097)]
    assert told(Plateau(), early) == [], "before step 8192"
    few = [one for one in flat if one.step % 128 == 0]
    assert told(Plateau(), [*few, report(16_384, 2.99)]) == [], "64 losses in the half"
    on = [*flat, *(report(step, 2.99) for step in range(16_384, 32_769, 8))]
    assert [one.judged_step for one in told(Plateau(), on)] == [16_384]


@pytest.mark.parametrize(
    ("changed", "is_told"),
    [({}, True), ({"told": True}, False), ({"means": [[3.0, 0.0]]}, False), ({"count": 100}, True)],
)
def test_a_plateau_takes_three_doublings_and_is_told_once(changed: dict[str, Any], is_told: bool) -> None:
    history: Any = {
        **Plateau().fresh(),  # type: ignore[dict-item]
        "step": 16_383,
        "count": 400,
        "means": [[3.5, 0.0], [3.0, 0.0]],
        **changed,
    }
    history |= {"sum": 2.99 * history["count"], "squares": 2.99**2 * history["count"]}
    _, verdict = Plateau().judge(history, report(16_384, 2.99))
    assert isinstance(verdict, Watch) is is_told


def test_a_plateau_is_told_from_step_8192_on() -> None:
    levels = {11: 3.5, 12: 3.0}
    falling = [report(step, levels.get(step.bit_length(), 2.99)) for step in range(1024, 8193, 8)]
    assert [one.judged_step for one in told(Plateau(), falling)] == [8192]


def test_a_rewind_takes_the_checkpoints_histories_and_a_resume_keeps_them() -> None:
    guard: Any
    for guard in (GradientNormRise(), ThroughputDrop(), Plateau()):
        assert guard.rewound({"a": BATCH}, {"b": 2}, rung=Rung.SLOW) == {"b": 2}
        assert guard.resumed({"a": 3}) == {"a": 3}


def test_a_single_high_norm_is_not_told() -> None:
    usual = [0.5 if step % 2 else 0.52 for step in range(300)]
    assert told(GradientNormRise(), normed([*usual, 1.5, *usual[:20], 1.5, *usual[:20]])) == []


def test_norms_below_twice_the_usual_are_not_told_however_steady_those_before_were() -> None:
    assert told(GradientNormRise(), normed([*[0.5] * 300, *[0.99] * 9])) == []
    assert told(GradientNormRise(), normed([*[0.5] * 300, *[1.01] * 9]))
    assert told(GradientNormRise(), normed([*[0.5] * 300, 0.55, 0.55, 1.01])) == [], "a single one"


@pytest.mark.parametrize("norm", [0.0, float("inf"), float("nan")])
def test_norms_that_were_not_measured_are_not_remembered(norm: float) -> None:
    history, _ = GradientNormRise().judge(None, report(7, gradient_norm=2.0))
    assert GradientNormRise().judge(history, report(8, gradient_norm=norm))[0] == history


@pytest.mark.parametrize("seconds", [None, 0.0, float("nan")])
def test_seconds_that_were_not_measured_are_not_remembered(seconds: float | None) -> None:
    history, _ = ThroughputDrop().judge(None, report(7, shared_seconds=2.0))
    after, verdict = ThroughputDrop().judge(history, report(8, shared_seconds=seconds))
    assert after == history and verdict == CarryOn(judged_step=8)


def test_a_doubling_whose_losses_scatter_too_much_to_tell_its_fall_is_no_plateau() -> None:
    """128 and 256 losses at ±s have a difference within 0.108 s of the true fall, which is 0.5."""

    def scattered(by: float) -> list[StepReport]:
        calm = flattening(fall_before=0.5, fall=0.01)[1::2]
        return [replace(one, loss=one.loss + (by if one.step % 32 else -by)) for one in calm]

    assert told(Plateau(), scattered(0.45)) and told(Plateau(), scattered(0.48)) == []


def test_losses_that_moved_nothing_are_no_part_of_a_doubling_and_one_made_again_begins_anew() -> None:
    guard = Plateau()
    history, _ = guard.judge(guard.fresh(), report(100, 2.0))
    for bad in (report(101, float("nan")), report(101, 9.0, update_applied=False)):
        assert guard.judge(history, bad)[0] == history
    on, _ = guard.judge(history, report(101, 1.0))
    again, _ = guard.judge(on, report(101, 4.0))
    summed = [[past[name] for name in ("sum", "squares", "count")] for past in (on, again)]  # type: ignore[index,call-overload]
    assert summed == [[3.0, 5.0, 2], [4.0, 16.0, 1]]


def test_many_losses_of_a_doubling_at_once_are_remembered_as_one_by_one() -> None:
    guard, losses = Plateau(), [2.5, 2.25, 2.0, 1.5]
    rates = [1e-3, 3e-3, 2e-3, 1e-3]
    one_by_one, _ = guard.judge(guard.fresh(), report(4, losses[0], learning_rate=rates[0]))
    at_once = guard.absorbed(one_by_one, losses=np.array(losses[1:]), peak_rate=3e-3, step=7)
    for step, loss, rate in zip((5, 6, 7), losses[1:], rates[1:], strict=True):
        one_by_one, _ = guard.judge(one_by_one, report(step, loss, learning_rate=rate))
    assert at_once == one_by_one
    lower = guard.absorbed(at_once, losses=np.array([2.0]), peak_rate=1e-4, step=8)
    assert lower["peak_rate"] == 3e-3  # type: ignore[index,call-overload]
