"""Whether a resumed run goes on where it was: its first losses, and the samples of its first step."""

from __future__ import annotations

from typing import Any

import pytest
from tests.guard.reports import BATCH, noisy, report

from bloomery.events.records import Json, StepReport
from bloomery.guard.parity import LEAST, MOST, REMEMBERED, ResumeParity, _error, _was_moving
from bloomery.guard.verdict import CarryOn, Rung, Stop, Verdict

GUARD = ResumeParity()
CALM = noisy(100)


def told(history: Json, reports: list[StepReport]) -> tuple[Any, list[Verdict]]:
    """The history after the reports, and the verdict on each."""
    verdicts = []
    for one in reports:
        history, verdict = GUARD.judge(history, one)
        verdicts.append(verdict)
    return history, verdicts


def run_of(losses: list[float], *, first: int = 1, **changed: Any) -> list[StepReport]:
    return [report(step, loss, **changed) for step, loss in enumerate(losses, first)]


def saved(losses: list[float] = CALM) -> Json:
    history, verdicts = told(GUARD.fresh(), run_of(losses))
    assert {type(verdict) for verdict in verdicts} == {CarryOn}
    return history


def test_losses_two_percent_above_those_before_fail_the_run_once_five_are_there() -> None:
    history, verdicts = told(GUARD.resumed(saved()), run_of([2.55] * (LEAST + 1), first=101))
    *before, verdict, after = verdicts
    assert {type(one) for one in (*before, after)} == {CarryOn} and len(before) == LEAST - 1
    assert isinstance(verdict, Stop) and verdict.failed and verdict.judged_step == 100 + LEAST
    assert verdict.numbers["after"] == 2.55 and verdict.numbers["rise"] == pytest.approx(0.02, abs=0.003)
    assert history["after"] is None


@pytest.mark.parametrize("worse", [2.515, 2.45, 2.0])  # 0.6% above, and below
def test_losses_that_are_as_low_as_before_are_not_compared_for_long(worse: float) -> None:
    calm = noisy(100, spread=0.01)
    before = saved(calm)
    history, verdicts = told(GUARD.resumed(before), run_of([worse] * LEAST, first=101))
    assert {type(verdict) for verdict in verdicts} == {CarryOn}
    assert history["after"] is None and history["losses"] == [*calm, *[worse] * LEAST][-REMEMBERED:]


def test_the_noisiest_losses_are_compared_fifty_at_a_time_and_then_count_as_those_before() -> None:
    wild = noisy(MOST + 1, seed=2, spread=1.0)
    history, _ = told(GUARD.resumed(saved()), run_of(wild[: MOST - 1], first=101))
    assert history["after"] == wild[: MOST - 1] and history["losses"] == CALM[-REMEMBERED:]
    history, _ = told(history, run_of(wild[MOST - 1 : MOST], first=100 + MOST))
    assert history["after"] is None and history["losses"] == wild[:MOST][-REMEMBERED:]
    history, _ = told(history, run_of(wild[MOST:], first=101 + MOST))
    assert history["after"] is None and history["losses"] == wild[-REMEMBERED:]


@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": 1.11e-3},
        {"learning_rate": 0.89e-3},
        {"precision": "fp8"},
        {"global_batch": 5},
        {"peers": 2},
        {"mixture": 2},
    ],
)
def test_a_rise_after_a_change_of_settings_is_expected(changed: dict[str, Any]) -> None:
    reports = run_of([3.0] * 10, first=101, **{"consumed_samples": 100 * BATCH + 10, **changed})
    reports[0] = report(
        101, 3.0, **{"consumed_samples": 100 * BATCH + changed.get("global_batch", BATCH), **changed}
    )
    _, verdicts = told(GUARD.resumed(saved()), reports)
    assert {type(verdict) for verdict in verdicts} == {CarryOn}


def test_a_rise_after_a_learning_rate_that_is_almost_the_same_is_not_expected() -> None:
    _, verdicts = told(GUARD.resumed(saved()), run_of([3.0] * 10, first=101, learning_rate=1.09e-3))
    assert any(isinstance(verdict, Stop) for verdict in verdicts)


@pytest.mark.parametrize("losses", [[*CALM, 2.7], CALM[: LEAST - 1]])
def test_losses_are_not_compared_with_a_spike_or_with_too_few(losses: list[float]) -> None:
    _, verdicts = told(GUARD.resumed(saved(losses)), run_of([3.0] * 20, first=len(losses) + 1))
    assert {type(verdict) for verdict in verdicts} == {CarryOn}


@pytest.mark.parametrize("off", [-1, 1])
def test_other_samples_than_the_next_ones_fail_the_run_at_its_first_step(off: int) -> None:
    resumed = GUARD.resumed(saved())
    _, (verdict,) = told(resumed, [report(101, 2.5, consumed_samples=101 * BATCH + off)])
    assert isinstance(verdict, Stop) and verdict.failed and "other data" in verdict.reason
    assert verdict.numbers == {"consumed": 101.0 * BATCH + off, "expected": 101.0 * BATCH}
    _, verdicts = told(resumed, [report(101, 2.5), report(102, 2.5, consumed_samples=102 * BATCH + off)])
    assert {type(one) for one in verdicts} == {CarryOn}


def test_samples_of_steps_that_peers_made_together_are_not_compared() -> None:
    together = [report(step, 2.5, peers=2, consumed_samples=20 * step) for step in range(1, 101)]
    history, _ = told(GUARD.fresh(), together)
    alone = report(101, 2.5, consumed_samples=7)
    assert isinstance(told(GUARD.resumed(history), [alone])[1][0], CarryOn)
    assert isinstance(told(GUARD.resumed(saved()), [alone])[1][0], Stop)
    since, _ = told(history, run_of([2.5] * 10, first=101))
    later = report(111, 2.5, consumed_samples=7)
    assert isinstance(told(GUARD.resumed(since), [later])[1][0], CarryOn), "peers took part once"


@pytest.mark.parametrize(("rung", "kind"), [(Rung.REPEAT, Stop), (Rung.SKIP, CarryOn)])
def test_after_a_rewind_losses_are_compared_unless_samples_were_left_out(rung: Rung, kind: type) -> None:
    history = GUARD.rewound(saved(), saved(), rung=rung)
    _, verdicts = told(history, run_of([3.0] * LEAST, first=101))
    assert isinstance(verdicts[-1], kind)


def test_losses_that_moved_nothing_are_left_out_of_the_comparison() -> None:
    refused = run_of([9.0] * 10, first=101, update_applied=False)
    history, verdicts = told(GUARD.resumed(saved()), refused)
    assert {type(verdict) for verdict in verdicts} == {CarryOn} and history["after"] == []
    _, verdicts = told(history, run_of([2.55] * LEAST, first=111))
    assert isinstance(verdicts[-1], Stop)


def test_a_run_that_is_resumed_before_its_first_step_has_nothing_to_compare_with() -> None:
    history, verdicts = told(GUARD.resumed(GUARD.fresh()), run_of(CALM[: LEAST + 2]))
    assert {type(one) for one in verdicts} == {CarryOn} and history["losses"] == CALM[: LEAST + 2]


def test_losses_that_are_not_finite_or_of_refused_updates_are_not_remembered() -> None:
    bad = [report(101, float("nan")), report(102, 9.0, update_applied=False)]
    history, _ = told(saved(), bad)
    assert history["losses"] == saved()["losses"]
    resumed, verdicts = told(GUARD.resumed(saved()), bad)
    assert resumed["after"] == [] and {type(one) for one in verdicts} == {CarryOn}


@pytest.mark.parametrize("step", [101, 103])
def test_only_the_samples_of_the_very_next_step_are_known(step: int) -> None:
    _, (verdict,) = told(GUARD.resumed(saved()), [report(step, 2.5)])
    assert isinstance(verdict, CarryOn)


def test_losses_of_zero_are_no_rise() -> None:
    _, verdicts = told(GUARD.resumed(saved([0.0] * 30)), run_of([0.0] * LEAST, first=31))
    assert {type(one) for one in verdicts} == {CarryOn}


SCATTERED = [1.9] * 9 + [2.0] * 2 + [2.1] * 8  # half of them 0.1 from their median, 2.0


@pytest.mark.parametrize(
    ("losses", "moved"),
    [
        ([2.0] * (LEAST - 1), True),
        ([2.0] * LEAST, False),
        ([9.0] * 21 + [2.0] * 19 + [2.5], True),  # of the newest twenty
        ([0.0, 4.0] * 20 + [2.0] * 19 + [2.5], True),
        ([*SCATTERED, 2.44], False),
        ([*SCATTERED, 2.45], True),  # three spreads of 0.148
        ([2.0] * 19 + [2.0195], False),
        ([2.0] * 19 + [2.0205], True),  # a hundredth
        ([-2.0] * 19 + [-1.99], False),
    ],
)
def test_the_newest_loss_of_a_checkpoint_is_within_a_spike_or_not(losses: list[float], moved: bool) -> None:
    assert _was_moving(losses) is moved


def test_the_error_of_a_median_falls_with_the_losses_and_is_a_two_thousandth_at_least() -> None:
    assert _error([1.9, 2.1] * 8, 2.0) == pytest.approx(1.25 * 0.14826 * 1.25 / 4)
    assert _error([2.0] * 16, 2.0) == _error([-2.0] * 16, -2.0) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [
        ([1.0] * 30 + [2.0] * 20, [2.0] * LEAST, False),  # with the newest twenty
        ([2.0] * 36 + [1.0] * 14, [2.0] * 30, False),  # with as many as were made since
        ([-2.0] * 20, [-1.9] * LEAST, True),
        ([-2.0] * 20, [-1.99] * LEAST, False),
    ],
)
def test_losses_are_compared_with_as_many_of_before(
    before: list[float], after: list[float], fails: bool
) -> None:
    verdict, is_over = GUARD._losses(before, after, report(101))
    assert isinstance(verdict, Stop) is fails and is_over


def test_what_fails_a_run_is_told_in_numbers() -> None:
    verdict, _ = GUARD._losses([2.0] * 20, [2.5] * LEAST, report(101))
    assert isinstance(verdict, Stop)
    error = (0.001**2 + 0.00125**2) ** 0.5
    assert verdict.numbers == {
        "after": 2.5, "before": 2.0, "rise": 0.25, "standard_error": pytest.approx(error),
    }  # fmt: skip
    assert verdict.reason.startswith(
        "resume parity: the first 5 losses after the resume have the median 2.5000, +25.0% over 2.0000 "
        "before it (312.3 standard errors). "
    )


def test_a_resumed_run_remembers_each_step_while_its_losses_are_compared() -> None:
    history, _ = told(GUARD.resumed(saved()), [report(101, 2.5)])
    assert (history["step"], history["consumed"], history["after"]) == (101, 101 * BATCH, [2.5])


def test_a_history_of_an_earlier_version_is_empty_or_of_a_run_alone() -> None:
    assert GUARD.judge(None, report(1)) == GUARD.judge(GUARD.fresh(), report(1))
    assert GUARD.resumed(None) == GUARD.resumed(GUARD.fresh())
    history: Any = GUARD.resumed(saved())
    del history["most_peers"]
    assert isinstance(told(history, [report(101, 2.5, consumed_samples=7)])[1][0], Stop)
