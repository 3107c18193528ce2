"""Inner tensors that grow ever faster are told, and those of trainings that go well are not."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from tests.guard.reports import report

from bloomery.config.checkpoint import GuardSection
from bloomery.events.records import StepReport
from bloomery.guard.creep import InnerGrowth, _grows_faster
from bloomery.guard.judge import watching_guards
from bloomery.guard.verdict import CarryOn, Watch

LAYERS, EVERY = 12, 50


def sizes(
    grown: Callable[[str, int, float], float], *, steps: int, seed: int = 0, spread: float = 0.15
) -> list[StepReport]:
    """Reports whose sizes are those of a training that goes well, times `grown(kind, block, step)`."""
    random = np.random.default_rng(seed)
    reports = []
    for step in range(EVERY, steps + 1, EVERY):
        power = {
            "logit": 2.0 * step**0.3,
            "hidden": 3.0 * step**0.4,
            "weight": 0.02 * (1 + step / 4000) ** 0.5,
        }
        noise = {"logit": spread, "hidden": spread, "weight": 0.001}
        by_kind = {
            kind: [
                float(power[kind] * grown(kind, block, step) * np.exp(noise[kind] * random.standard_t(4)))
                for block in range(LAYERS)
            ]
            for kind in power
        }
        rate = 1e-3 * min(step / 500, 1.0)
        reports.append(report(step, 2.0, inner_sizes=by_kind, learning_rate=rate))
    return reports


def warnings(reports: list[StepReport]) -> list[tuple[int, str]]:
    guard = InnerGrowth()
    history, found = guard.fresh(), []
    for one in reports:
        history, verdict = guard.judge(history, one)
        assert isinstance(verdict, Watch | CarryOn)
        if isinstance(verdict, Watch):
            found.append((one.step, verdict.reason))
    return found


@pytest.mark.parametrize("spread", [0.05, 0.15, 0.3])
def test_trainings_that_go_well_raise_no_alarm(spread: float) -> None:
    runs = [sizes(lambda *_: 1.0, steps=10_000, seed=seed, spread=spread) for seed in range(4)]
    assert [warnings(run) for run in runs] == [[]] * 4


@pytest.mark.parametrize("doubling", [150, 400])
@pytest.mark.parametrize("kind", ["logit", "hidden", "weight"])
def test_a_tensor_that_doubles_again_and_again_is_named_early(kind: str, doubling: int) -> None:
    begins, block = 5000, 7

    def grown(this: str, where: int, step: float) -> float:
        return 2.0 ** (max(step - begins, 0) / doubling) if (this, where) == (kind, block) else 1.0

    found = warnings(sizes(grown, steps=begins + 10 * doubling))
    assert f"block {block} " in found[0][1] and begins < found[0][0] <= begins + 1100
    assert len(found) <= 10, "a warning comes again only when the size has doubled"


def test_logits_that_bf16_does_not_resolve_are_told_however_slowly_they_came() -> None:
    found = warnings(sizes(lambda kind, block, step: (1 + step / 1500) ** (kind == "logit"), steps=12_000))
    assert len(found) == 1 and " is above 200 (" in found[0][1] and "qk_clip" in found[0][1]


def test_the_guard_is_one_of_those_that_judge_a_run() -> None:
    assert "growth" in {guard.name for guard in watching_guards(GuardSection())}
    assert "growth" not in {guard.name for guard in watching_guards(GuardSection(growth_steps=0))}


def test_what_a_change_of_rate_batch_or_mixture_brings_is_not_taken_for_growth() -> None:
    jumps = sizes(lambda kind, block, step: 6.0 if step > 4000 else 1.0, steps=6000)
    for change in ({"global_batch": 20}, {"mixture": 2}, {"precision": "bf16"}):
        changed = [
            one if one.step <= 4000 else report(one.step, 2.0, inner_sizes=one.inner_sizes, **change)
            for one in jumps
        ]
        assert warnings(changed) == []
    (first, *_) = warnings(jumps)
    assert first[0] == 4000 + InnerGrowth.MEASURED * EVERY, "without a change it is told after three"


def test_a_resumed_run_judges_as_the_unbroken_one_and_bad_numbers_do_no_harm() -> None:
    guard = InnerGrowth()
    history, whole = guard.fresh(), []
    for one in sizes(lambda kind, block, step: 2.0 ** (max(step - 3000, 0) / 300), steps=6000):
        bad = {kind: [float("inf"), *values[1:]] for kind, values in (one.inner_sizes or {}).items()}
        after_bad, verdict = guard.judge(history, report(one.step - 1, inner_sizes=bad))
        assert not isinstance(verdict, Watch) and guard.judge(after_bad, report(one.step))[0] == after_bad
        history, verdict = guard.judge(json.loads(json.dumps(history)), one)
        whole.append(isinstance(verdict, Watch))
    assert sum(whole) >= 1
    read = StepReport.from_json(json.loads(json.dumps(report(5, inner_sizes={"logit": [1.0]}).to_json())))
    assert read.inner_sizes == {"logit": [1.0]}


def test_growth_that_measurements_scatter_by_is_not_told() -> None:
    def growing(scatter: float) -> list[StepReport]:
        return [
            report(step, inner_sizes={"logit": [22.0 * 1.2 ** (step // 3) * scatter ** (step % 3 - 1)]})
            for step in range(3, 33)
        ]

    assert warnings(growing(1.0))
    assert warnings(growing(1.8)) == []


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, 2),
        ({"learning_rate": 0.5e-3}, 2),
        ({"learning_rate": 1.1e-3}, 1),
        ({"global_batch": 20}, 1),
        ({"precision": "bf16"}, 1),
        ({"peers": 2}, 1),
        ({"mixture": 2}, 1),
    ],
)
def test_sizes_are_compared_with_those_of_the_same_circumstances(changed, kept) -> None:
    guard = InnerGrowth()
    first = report(50, inner_sizes={"logit": [1.0]}, learning_rate=1e-3)
    history, _ = guard.judge(guard.fresh(), first)
    second = {"learning_rate": 1e-3, "inner_sizes": {"logit": [2.0]}, **changed}
    history, _ = guard.judge(history, report(100, **second))
    assert history["count"] == len(history["newest"]["logit"]) == kept


def test_sizes_that_are_not_finite_are_passed_over() -> None:
    sizes = {"logit": [1.0, float("nan")], "hidden": [1.0, float("inf")], "weight": [1.0, 2.0]}
    history, _ = InnerGrowth().judge(InnerGrowth().fresh(), report(50, inner_sizes=sizes))
    assert list(history["newest"]) == ["weight"]


@pytest.mark.parametrize(("last", "faster"), [(0.8, True), (0.6, False)])
def test_growth_slows_down_where_its_last_rises_are_smaller_than_its_first(last: float, faster: bool) -> None:
    path = np.exp(np.cumsum([0.0, 1.0, 1.0, 1.0, 1.0, last, last, last]))
    assert _grows_faster(tuple(path.tolist()), InnerGrowth()) is faster
