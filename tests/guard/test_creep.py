"""When exactly a rising held-out loss, memory that grows, and a jump of an inner tensor are told."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from tests.guard.reports import report

from bloomery.events.records import StepReport
from bloomery.guard.creep import MIB, HeldOutRise, InnerGrowth, MemoryCreep, _grows_faster, _scatter
from bloomery.guard.verdict import Rung, Watch


def told(guard: Any, reports: Iterable[StepReport]) -> tuple[Any, list[Watch]]:
    """The history after the reports, and the warnings among the verdicts."""
    history, found = guard.fresh(), []
    for one in reports:
        history, verdict = guard.judge(history, one)
        found += [verdict] if isinstance(verdict, Watch) else []
    return history, found


def evaluated(
    held_out: list[float], *, losses: list[float] | None = None, first: int = 10
) -> list[StepReport]:
    losses = losses or [2.5] * len(held_out)
    steps = range(first, first + 10 * len(held_out), 10)
    return [
        report(step, loss, held_out_loss=value)
        for step, loss, value in zip(steps, losses, held_out, strict=True)
    ]


def test_three_rises_of_a_percent_in_all_are_told_with_both_losses() -> None:
    _, found = told(HeldOutRise(), evaluated([2.0, 2.01, 2.015, 2.02], losses=[2.6, 2.6, 2.5, 2.5]))
    (warning,) = found
    assert warning.judged_step == 40 and warning.kind == "held-out loss"
    assert warning.numbers == {"held_out": 2.02, "held_out_before": 2.0, "loss": 2.55, "loss_before": 2.6}
    assert (
        "from 2.0000 at step 10 to 2.0200, while the training loss went from 2.6000 to 2.5500"
        in warning.reason
    )


@pytest.mark.parametrize(
    ("held_out", "losses"),
    [
        ([2.0, 2.3, 2.6], [2.5] * 3),  # two rises
        ([2.0, 2.3, 2.3, 2.6], [2.5] * 4),  # one is none
        ([2.0, 2.005, 2.01, 2.019], [2.5] * 4),  # less than a percent in all
        ([2.0, 2.3, 2.6, 2.9], [2.5, 2.6, 2.7, 2.8]),  # the training loss rises too
    ],
)
def test_smaller_rises_of_the_held_out_loss_are_not_told(held_out: list[float], losses: list[float]) -> None:
    assert told(HeldOutRise(), evaluated(held_out, losses=losses))[1] == []


def test_a_held_out_loss_that_goes_on_rising_is_told_again_only_once_it_has_fallen() -> None:
    going_on = evaluated([2.0, 2.1, 2.2, 2.3, 2.4, 2.5])
    assert [one.judged_step for one in told(HeldOutRise(), going_on)[1]] == [40]
    again = [*going_on, *evaluated([2.1, 2.2, 2.3, 2.4], first=70)]
    assert [one.judged_step for one in told(HeldOutRise(), again)[1]] == [40, 100]


def test_evaluations_that_were_undone_or_are_not_finite_and_losses_that_moved_nothing_do_not_count() -> None:
    guard = HeldOutRise()
    undone = [*evaluated([2.0, 2.1, 2.2]), *evaluated([2.3], first=20)]
    history, found = told(guard, undone)
    assert found == [] and [point[:2] for point in history["points"]] == [[10, 2.0], [20, 2.3]]
    history, found = told(guard, [*evaluated([2.0, 2.1, 2.2]), *evaluated([math.inf], first=40)])
    assert found == [] and len(history["points"]) == 3
    refused = [report(1, 9.0, update_applied=False), report(2, math.nan), *evaluated([2.0])]
    assert told(guard, refused)[0]["losses"] == [2.5]
    assert told(guard, [report(1, math.nan, held_out_loss=2.0)])[0]["points"] == []


def test_the_training_losses_of_fifty_steps_are_compared_and_the_histories_of_a_checkpoint_go_on() -> None:
    history, _ = told(HeldOutRise(), [report(step, float(step)) for step in range(1, 61)])
    assert history["losses"] == [float(step) for step in range(11, 61)]
    guard: Any
    for guard in (HeldOutRise(), InnerGrowth()):
        assert guard.resumed({"a": 1}) == {"a": 1} and guard.rewound(1, 2, rung=Rung.SKIP) == 2


def blocks(means: list[float], *, first: int = 1) -> list[StepReport]:
    """Reports of whole blocks; within one the memory goes up and down about its mean."""
    values = [mean + (MIB if at % 2 else -MIB) for mean in means for at in range(MemoryCreep.BLOCK_STEPS)]
    return [report(step, memory_bytes=value) for step, value in enumerate(values, first)]


@pytest.mark.parametrize(("share", "is_told"), [(0.051, True), (0.049, False)])
def test_six_rises_of_memory_by_a_twentieth_in_all_are_told_with_the_bytes_of_a_step(
    share: float, is_told: bool
) -> None:
    begin = 1000.0 * MIB  # of 5%: above 32 MiB
    means = [begin * (1.0 + share * block / 6) for block in range(7)]
    _, found = told(MemoryCreep(), blocks([5 * begin, *means]))
    assert [one.judged_step for one in found] == ([800] if is_told else [])
    if is_told:
        assert found[0].numbers == {
            "bytes": pytest.approx(1051.0 * MIB),
            "bytes_before": pytest.approx(begin),
            "bytes_a_step": pytest.approx(51.0 * MIB / 600),
        }
        assert "grew by 51 MiB in 600 steps to 1,051 MiB" in found[0].reason


@pytest.mark.parametrize(("grown", "is_told"), [(32.5, True), (31.5, False)])
def test_of_little_memory_growth_below_32_mib_is_not_told(grown: float, is_told: bool) -> None:
    means = [(100.0 + grown * block / 6) * MIB for block in range(7)]
    assert bool(told(MemoryCreep(), blocks([100.0 * MIB, *means]))[1]) is is_told


def test_a_leak_that_goes_on_is_told_once() -> None:
    on = blocks([1000.0 * MIB * (1 + block / 10) for block in range(10)])
    history, found = told(MemoryCreep(), on)
    assert [one.judged_step for one in found] == [800] and history["told"]


def test_memory_that_did_not_grow_in_one_of_six_blocks_is_not_told_nor_is_the_first_block_compared() -> None:
    grows = [1000.0 * MIB * (1 + block / 10) for block in range(7)]
    assert told(MemoryCreep(), blocks([900.0 * MIB, *grows[:6]]))[1] == [], "five rises and the first block's"
    grows[3] = grows[2]
    assert told(MemoryCreep(), blocks([900.0 * MIB, *grows]))[1] == []


def test_only_the_newest_six_rises_of_memory_count() -> None:
    steady = [1000.0 * MIB] * 3
    grows = [1000.0 * MIB * (1 + block / 10) for block in range(1, 7)]
    assert told(MemoryCreep(), blocks([*steady, *grows[:5]]))[1] == []
    (warning,) = told(MemoryCreep(), blocks([*steady, *grows]))[1]
    assert warning.numbers["bytes_before"] == 1000.0 * MIB


@pytest.mark.parametrize("guard", [HeldOutRise(), MemoryCreep(), InnerGrowth()], ids=lambda guard: guard.name)
def test_a_checkpoint_of_before_a_guard_was_there_has_an_empty_history(guard: Any) -> None:
    one = report(3, memory_bytes=MIB, held_out_loss=2.0, inner_sizes={"hidden": [1.0]})
    assert guard.judge(None, one) == guard.judge(guard.fresh(), one)
    assert not guard.fresh().get("told")


def test_another_process_begins_its_memory_anew_and_a_rewind_goes_on_with_it() -> None:
    guard = MemoryCreep()
    history, _ = told(guard, blocks([5.0 * MIB, 6.0 * MIB]))
    assert history["means"] == [6.0 * MIB] and history["started"]
    assert guard.resumed(history) == guard.fresh() == {**history, "means": [], "started": False}
    assert guard.rewound(history, guard.fresh(), rung=Rung.SKIP) == history
    assert guard.judge(history, report(201)) == (history, guard.judge(None, report(201))[1])


def sized(values: list[list[float]], *, kind: str = "hidden", first: int = 1) -> list[StepReport]:
    return [report(step, inner_sizes={kind: each}) for step, each in enumerate(values, first)]


def test_a_jump_is_told_of_its_block_once_its_three_newest_sizes_are_four_times_the_usual() -> None:
    usual = [[60.0, 200.0]] * 9
    _, found = told(InnerGrowth(), sized([*usual, *[[240.0, 210.0]] * 3]))
    (warning,) = found
    assert warning.judged_step == 12 and warning.numbers == {"hidden": 240.0, "block": 0}
    assert "block 0 was at least 4.0 times" in warning.reason and "240, usually 60" in warning.reason
    assert told(InnerGrowth(), sized([*usual, *[[239.0, 210.0]] * 3]))[1] == []
    assert told(InnerGrowth(), sized([*usual, *[[240.0, 210.0]] * 2, usual[0]]))[1] == []
    assert told(InnerGrowth(), sized([*usual[:6], *[[240.0, 210.0]] * 3]))[1] == [], "two medians are too few"


def test_kinds_are_judged_apart_and_what_was_told_of_one_is_remembered_beside_the_other() -> None:
    calm = [{"hidden": [100.0]}] * 12
    jump = [{"logit": [250.0], "hidden": [100.0]}] * 3 + [{"weight": [1.0], "hidden": [500.0]}] * 2
    last = {"logit": [1.0], "hidden": [500.0]}  # of these logits there is one measurement
    reports = [report(step, inner_sizes=each) for step, each in enumerate([*calm, *jump, last], 1)]
    history, found = told(InnerGrowth(), reports)
    assert [(one.judged_step, *one.numbers) for one in found] == [
        (15, "logit", "block"),
        (18, "hidden", "block"),
    ]
    assert history["told"] == {"logit": 250.0, "hidden": 500.0}
    assert set(history["noise"]) >= {"logit", "hidden"}


def test_a_block_of_zeros_does_not_grow_and_a_change_forgets_all_that_was_measured() -> None:
    history, found = told(InnerGrowth(), sized([[0.0, 100.0]] * 30))
    assert found == [] and history["noise"] == {"hidden": [0.0, 0.0]}
    changed, _ = InnerGrowth().judge(history, report(31, precision="fp8", inner_sizes={"hidden": [1.0, 2.0]}))
    assert isinstance(changed, dict) and changed["newest"] == {"hidden": [[1.0, 2.0]]}
    assert (changed["count"], changed["medians"], changed["noise"]) == (1, {}, {})


def test_small_inner_tensors_may_jump_and_a_warning_comes_again_once_the_size_has_doubled() -> None:
    small = [*[[10.0]] * 9, *[[49.0]] * 3]
    assert told(InnerGrowth(), sized(small))[1] == []
    larger = sized([*[[210.0]] * 4, *[[419.0]] * 3, *[[420.0]] * 3], kind="logit")
    assert [one.numbers["logit"] for one in told(InnerGrowth(), larger)[1]] == [210.0, 420.0]


@pytest.mark.parametrize(("logit", "is_told"), [(201.0, True), (200.0, False)])
def test_logits_above_200_are_told_by_the_largest_block(logit: float, is_told: bool) -> None:
    _, found = told(InnerGrowth(), sized([[150.0, logit, 10.0]] * 3, kind="logit"))
    assert [one.numbers for one in found] == ([{"logit": logit, "block": 1}] if is_told else [])


def test_what_was_usual_is_the_largest_median_and_a_block_that_was_not_measured_has_none() -> None:
    usual = [*[[60.0]] * 3, *[[90.0]] * 3, *[[60.0]] * 3]
    assert told(InnerGrowth(), sized([*usual, *[[250.0]] * 3]))[1] == []
    assert told(InnerGrowth(), sized([*usual, *[[361.0]] * 3]))[1]
    assert told(InnerGrowth(), sized([*[[0.0, 60.0]] * 9, *[[70.0, 60.0]] * 3]))[1] == []


def test_two_measurements_are_too_few_and_kinds_of_other_versions_are_passed_over() -> None:
    _, found = told(InnerGrowth(), sized([[250.0]] * 2, kind="logit"))
    assert found == [] and len(told(InnerGrowth(), sized([[250.0]] * 3, kind="logit"))[1]) == 1
    assert told(InnerGrowth(), sized([[1e9]] * 30, kind="another"))[0]["newest"] == {}


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_blocks_the_one_that_grew_most_is_named_with_how_much(order: int) -> None:
    paths = [(1.1 ** (at // 3), 0.5 * 1.2 ** (at // 3)) for at in range(24)]
    _, found = told(InnerGrowth(), sized([[*path][::order] for path in paths], kind="weight"))
    (warning,) = found
    assert warning.judged_step == 24
    assert warning.numbers == {"weight": pytest.approx(0.5 * 1.2**7), "block": 1 if order == 1 else 0}
    assert "grew 3.6-fold in the last 21 measurements" in warning.reason
    assert "from 0.5 to 1.79" in warning.reason


def test_steps_that_were_refused_or_made_again_do_not_count_twice() -> None:
    guard = InnerGrowth()
    history, _ = told(guard, sized([[60.0]] * 4))
    refused = report(5, inner_sizes={"hidden": [1e9]}, update_applied=False)
    assert guard.judge(history, refused)[0] == history
    again, _ = guard.judge(history, report(4, inner_sizes={"hidden": [61.0]}))
    assert again["newest"] == {"hidden": [[61.0]]} and again["count"] == 1 and again["medians"] == {}


def test_growth_counts_while_it_does_not_slow_down_nor_come_by_one_jump() -> None:
    def path(*rises: float) -> tuple[float, ...]:
        values = [3.0]
        for rise in rises:
            values.append(values[-1] * math.exp(rise))
        return tuple(values)

    guard = InnerGrowth()
    assert _grows_faster(path(0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2), guard)
    assert _grows_faster(path(0.2, 0.2, -0.1, 0.2, 0.2, 0.2, 0.2), guard), "one fall among seven"
    assert not _grows_faster(path(0.2, -0.1, -0.1, 0.2, 0.2, 0.2, 0.2), guard)
    assert _grows_faster(path(0.2, 0.2, 0.2, 0.0, 0.15, 0.15, 0.13), guard), "72% of the first half's"
    assert not _grows_faster(path(0.2, 0.2, 0.2, 0.0, 0.15, 0.13, 0.13), guard), "68%"
    assert _grows_faster(path(0.1, 0.1, 0.1, 0.01, 0.5, 0.05, 0.05), guard), "55% of it at once"
    assert not _grows_faster(path(0.1, 0.1, 0.1, 0.01, 0.6, 0.04, 0.04), guard), "61%"


def test_sizes_scatter_by_the_mean_of_their_logarithms_from_the_median() -> None:
    assert _scatter((2.0, 2.0 * math.e, 2.0 * math.e**4)) == pytest.approx((1.0 + 0.0 + 3.0) / 3)
    assert _scatter((0.0, 1.0, 8.0)) == 0.0


def test_how_far_sizes_scatter_is_remembered_by_four_fifths() -> None:
    scattered = [[1.0], [math.e], [1.0 / math.e]]  # by 2/3 in the mean
    history, _ = told(InnerGrowth(), sized([*scattered, *[[1.0]] * 3], kind="weight"))
    assert history["noise"] == {"weight": [pytest.approx(0.8 * 2.0 / 3.0)]}
    history, _ = told(InnerGrowth(), sized([*[[1.0]] * 3, *scattered], kind="weight"))
    assert history["noise"] == {"weight": [pytest.approx(0.2 * 2.0 / 3.0)]}


@pytest.mark.parametrize(
    ("kind", "first", "times", "is_told"),
    [
        ("logit", 30.0, 2.45, False),
        ("logit", 30.0, 2.55, True),
        ("hidden", 60.0, 3.9, False),
        ("hidden", 60.0, 4.1, True),
        ("weight", 1.0, 1.47, False),
        ("weight", 1.0, 1.53, True),
        ("logit", 4.0, 4.9, False),  # to 19.6
        ("logit", 4.0, 5.1, True),
        ("hidden", 9.8, 5.0, False),  # to 49
        ("hidden", 9.8, 5.2, True),
    ],
)
def test_each_kind_of_size_grows_by_its_own_factor_to_what_does_harm_before_it_is_told(
    kind: str, first: float, times: float, is_told: bool
) -> None:
    path = [[first * times ** (median / 7)] for median in range(8) for _ in range(3)]
    assert bool(told(InnerGrowth(), sized(path, kind=kind))[1]) is is_told
