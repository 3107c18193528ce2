"""Losses that are not finite, refused updates and falling loss scales, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from tests.guard.reports import report

from bloomery.checkpoint.format.retention import reasons_to_keep
from bloomery.config.checkpoint import CheckpointSection, GuardSection
from bloomery.events.records import StepReport
from bloomery.guard.basic_guards import LossScaleCollapse, NotFinite
from bloomery.guard.ladder import Ladder, LadderState
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind, Rung, Watch

BAD = math.nan


def judged(guard: Any, reports: Iterable[StepReport], history: Any = None) -> tuple[Any, list[Any]]:
    history, verdicts = guard.fresh() if history is None else history, []
    for one in reports:
        history, verdict = guard.judge(history, one)
        verdicts.append(verdict)
    return history, verdicts


def refused(step: int, in_a_row: int, loss: float = 2.0, **more: Any) -> StepReport:
    return report(step, loss, update_applied=False, refused_in_a_row=in_a_row, **more)


def test_the_anomaly_begins_at_the_first_bad_step_and_is_asked_for_once() -> None:
    guard = NotFinite(losses=3, updates=7)
    history, (quiet, first, second, third, fourth) = judged(
        guard, [report(300), *(report(step, BAD) for step in range(301, 305))]
    )
    assert isinstance(first, Watch) and "step 301 is nan" in first.reason
    assert {type(each) for each in (quiet, second, fourth)} == {CarryOn}
    assert isinstance(third, Anomaly) and (third.judged_step, third.first_bad) == (303, 301)
    assert third.numbers == {"losses_in_a_row": 3.0, "refused_in_a_row": 0.0}
    assert "3 losses in a row were not finite, from step 301 on" in third.reason
    assert history == {"in_a_row": 4, "first": 301, "asked": True}
    asked_again = guard.judge(guard.resumed(history), report(305, BAD))[1]
    assert isinstance(asked_again, Anomaly) and asked_again.first_bad == 301
    assert guard.rewound(history, history, rung=Rung.REPEAT) == guard.fresh()


def test_a_finite_loss_begins_the_count_of_losses_anew_and_a_good_step_all_of_it() -> None:
    guard = NotFinite(losses=2, updates=5)
    history, verdicts = judged(guard, [report(300, BAD), refused(301, 1), report(302, BAD)])
    assert [type(each) for each in verdicts] == [Watch, CarryOn, Watch]
    assert history == {"in_a_row": 1, "first": 300, "asked": False}
    assert judged(guard, [report(303)], history)[0] == guard.fresh()


def test_a_loss_that_is_no_number_counts_while_the_scale_is_sought_and_is_not_told_beside_an_anomaly() -> (
    None
):
    guard = NotFinite(losses=2, updates=2)
    assert isinstance(judged(guard, [report(100, BAD, loss_scale=2.0)])[1][0], Watch)
    _, verdicts = judged(guard, [refused(300, 1), refused(301, 2), report(302, BAD)])
    assert [type(each) for each in verdicts] == [CarryOn, Anomaly, CarryOn]


def test_refused_updates_are_an_anomaly_from_the_first_of_them_on() -> None:
    guard = NotFinite(losses=0, updates=4)
    _, verdicts = judged(guard, [refused(400 + at, at) for at in range(1, 6)])
    assert [type(each) for each in verdicts] == [CarryOn, CarryOn, CarryOn, Anomaly, CarryOn]
    assert verdicts[3].first_bad == 401 and verdicts[3].numbers["refused_in_a_row"] == 4.0
    assert "4 updates in a row were not finite" in verdicts[3].reason


@pytest.mark.parametrize(("losses", "updates"), [(0, 0), (0, 3), (3, 0)])
def test_a_count_of_0_is_never(losses: int, updates: int) -> None:
    guard = NotFinite(losses=losses, updates=updates)
    _, of_losses = judged(guard, [report(300 + at, BAD) for at in range(9)])
    _, of_updates = judged(guard, [refused(300 + at, at + 1) for at in range(9)])
    assert any(isinstance(each, Anomaly | Watch) for each in of_losses) == bool(losses)
    assert any(isinstance(each, Anomaly) for each in of_updates) == bool(updates)


@pytest.mark.parametrize(
    ("step", "scale", "counts"), [(200, 2.0, False), (201, 2.0, True), (200, 1.0, True), (200, None, True)]
)
def test_refused_updates_count_once_the_scale_is_found(step: int, scale: float | None, counts: bool) -> None:
    guard = NotFinite(losses=0, updates=2)
    _, (verdict,) = judged(guard, [refused(step, 2, loss_scale=scale)])
    assert isinstance(verdict, Anomaly) == counts


def scaled(scales: Iterable[float], *, first: int = 1) -> list[StepReport]:
    return [report(step, loss_scale=scale) for step, scale in enumerate(scales, first)]


def warnings(reports: Iterable[StepReport]) -> list[Watch]:
    return [each for each in judged(LossScaleCollapse(), reports)[1] if isinstance(each, Watch)]


def test_a_scale_that_falls_to_an_eighth_is_told_with_the_highest_of_the_last_steps() -> None:
    (warning,) = warnings(scaled([*[512.0] * 150, 256.0, 128.0, 64.0, 64.0]))
    assert warning.judged_step == 153 and warning.numbers == {"loss_scale": 64.0, "highest": 512.0}
    assert "fell from 512 to 64 within 3 steps" in warning.reason
    assert warnings(scaled([*[512.0] * 150, 256.0, 128.0, 65.0])) == []


def test_a_scale_that_falls_to_1_is_told_however_small_it_was() -> None:
    (warning,) = warnings(scaled([*[2.0] * 150, 1.0, 1.0, 1.0]))
    assert warning.judged_step == 151


@pytest.mark.parametrize(("stayed", "is_told"), [(101, True), (100, False)])
def test_a_scale_is_found_once_it_has_stayed_for_a_hundred_steps(stayed: int, is_told: bool) -> None:
    assert bool(warnings(scaled([*[512.0] * stayed, 64.0, 8.0]))) is is_told


def test_what_fell_slowly_is_no_collapse_and_one_collapse_is_told_once_in_200_steps() -> None:
    slowly = [*[512.0] * 150, *[256.0] * 201, *[128.0] * 201, *[64.0] * 201, *[32.0] * 201]
    assert warnings(scaled(slowly)) == []
    on = [*[512.0] * 150, 64.0, *[32.0] * 100, 8.0, *[8.0] * 98, 8.0, 1.0]
    assert [each.judged_step for each in warnings(scaled(on))] == [151, 352]


def test_a_gap_or_a_step_back_begins_the_scale_anew() -> None:
    before = scaled([512.0] * 150)
    assert warnings([*before, *scaled([64.0], first=151)])
    assert warnings([*before, *scaled([64.0], first=150 + 2000)])
    assert warnings([*before, *scaled([64.0], first=150 + 2001)]) == []
    assert warnings([*before, *scaled([64.0], first=150)]) == []
    guard = LossScaleCollapse()
    history, _ = judged(guard, before)
    assert guard.judge(history, report(151, loss_scale=None))[0] == history
    anew: dict[str, Any] = {"scale": 64.0, "settled": False, "high": 64.0, "told": 0}
    for step in (140, 150 + 2001):
        after, _ = guard.judge({**history, "told": 145}, report(step, loss_scale=64.0))
        assert after == {**anew, "step": step, "since": step, "high_step": step}
    after, _ = guard.judge(history, report(151, loss_scale=64.0))
    kept = {"step": 151, "since": 151, "settled": True, "high_step": 151, "told": 151}
    assert after == {**anew, **kept}, "what it fell to is the highest from now on"
    assert guard.resumed(history) == history and guard.rewound(1, history, rung=Rung.SKIP) == history


def test_a_scale_that_has_grown_once_is_found() -> None:
    (warning,) = warnings(scaled([256.0, 256.0, 512.0, 512.0, 64.0]))
    assert warning.numbers == {"loss_scale": 64.0, "highest": 512.0}
    assert warnings(scaled([8.0, 4.0, 2.0, 1.0, 1.0])) == [], "one that only falls is still being found"


@pytest.mark.parametrize(("since", "is_told"), [(199, True), (200, False)])
def test_the_highest_scale_counts_for_200_steps(since: int, is_told: bool) -> None:
    assert bool(warnings(scaled([*[512.0] * 150, *[256.0] * since, 64.0]))) is is_told


def test_a_scale_that_stays_at_1_is_told_once_and_one_after_a_gap_is_found_anew() -> None:
    assert len(warnings(scaled([*[2.0] * 150, *[1.0] * 450]))) == 1
    assert warnings([*scaled([512.0] * 150), *scaled([64.0, 8.0], first=150 + 2001)]) == []


@pytest.mark.parametrize(
    "guard", [NotFinite(losses=2, updates=0), LossScaleCollapse()], ids=lambda guard: guard.name
)
def test_a_checkpoint_of_before_a_guard_was_there_has_an_empty_history(guard: Any) -> None:
    one = report(301, float("nan"), loss_scale=8.0)
    assert guard.judge(None, one) == guard.judge(guard.fresh(), one)
    assert guard.resumed(guard.fresh()) == guard.fresh()


@pytest.mark.parametrize("row", [{"refused_updates": 300}, {"not_finite_losses": 300}])
def test_a_checkpoint_of_before_a_row_of_updates_that_may_be_refused_is_kept(row: dict[str, int]) -> None:
    section = GuardSection(**row)
    guard = NotFinite(losses=section.not_finite_losses if "not_finite_losses" in row else 0, updates=300)
    bad = [refused(step, step - 1000, BAD) for step in range(1001, 1301)]
    found = judged(guard, bad)[1][-1]
    wanted = Ladder(section=section).answer(LadderState(), found, bad[-1])
    kept: list[int] = []
    for step in range(50, 1300, 50):
        reasons = reasons_to_keep(
            [*kept, step],
            section=CheckpointSection(keep_last=2, keep_tenths=False),
            run_length_steps=None,
            newest_intact=step,
            reach_steps=section.reach_steps,
        )
        kept = [each for each, why in reasons.items() if why]
    assert isinstance(wanted, Rewind) and kept[0] <= wanted.to_step == 900
