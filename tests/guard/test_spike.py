import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.guard.reports import BATCH, guards_of, judged, noisy, report, said

from bloomery.guard.judge import judge
from bloomery.guard.spike import SpikeGuard
from bloomery.guard.verdict import CarryOn, Rewind, Watch

CALM = noisy(400)

# Iterations 29020 to 29090 of a 13B training, then two lines of later points, as its chronicles print them.
EXCERPT = [
    *[(29020, 2.775923), (29030, 2.772822), (29040, 2.768131), (29050, 7.343709), (29060, 8.715872)],
    *[(29070, 7.654131), (29080, 7.192470), (29090, 6.849044), (33240, 2.722675), (43680, 2.635663)],
]


def run_of(losses, *, first=1, **changed):
    return [report(step, loss, **changed) for step, loss in enumerate(losses, first)]


def test_a_spike_after_three_lines_is_judged_at_its_first_line():
    (found,) = said(guards_of(), [report(step, loss) for step, loss in EXCERPT])
    assert found == (29050, "rewind")


def test_a_rewind_goes_back_before_the_spike_and_skips_the_data_up_to_it():
    guards = guards_of(repeat=False)
    judged(guards, run_of(CALM))
    *before, verdict = judged(guards, run_of([3.5] * 10, first=401))
    assert isinstance(verdict, Rewind) and not any(isinstance(one, Rewind) for one in before)
    assert (verdict.to_step, verdict.latest_step) == (300, 400)
    assert verdict.skip == range(300 * BATCH, 610 * BATCH)  # 200 steps' samples beyond the spike's end
    assert "3.500 is 0.999 above 2.501" in verdict.reason and "since step 401" in verdict.reason
    assert verdict.numbers["first_step"] == 401
    assert not verdict.may_start_anew, "no spike throws away all that the run has learned"


def test_what_is_skipped_reaches_at_least_to_the_step_that_is_judged():
    guards = guards_of(spike_skip_steps=0, repeat=False)
    judged(guards, run_of(CALM))
    verdict = judged(guards, run_of([3.5] * 10, first=401))[-1]
    assert isinstance(verdict, Rewind) and verdict.skip == range(300 * BATCH, 410 * BATCH)


def test_what_is_skipped_is_told_in_places_of_the_stream_not_in_samples_used():
    guards = guards_of(spike_skip_steps=0, repeat=False)
    losses = [*CALM, *[3.5] * 10]
    shifted = [replace(one, cursor=one.cursor + 1000) for one in run_of(losses)]
    verdict = judged(guards, shifted)[-1]
    assert isinstance(verdict, Rewind) and verdict.skip == range(4000, 5100)


def test_a_spike_that_recovers_by_itself_is_told_and_left_alone():
    found = said(guards_of(), run_of([*CALM, *[2.9] * 5, *noisy(50, seed=1)]))
    assert found == [(403, "fast spike"), (408, "recovered")]


def test_a_loss_that_stays_high_after_it_was_judged_becomes_the_level_and_is_judged_by_itself():
    higher = noisy(1200, seed=4, level=2.9)
    found = said(guards_of(plateau=False, resume_parity=False), run_of([*CALM, *higher]))
    assert [kind for _, kind in found] == ["fast spike", "rewind", "new level"]


def test_a_spike_that_is_coming_down_is_given_more_time():
    falling = [2.5 + 2.0 * math.exp(-step / 4) for step in range(25)]
    found = said(guards_of(), run_of([*CALM, *falling, *noisy(50, seed=1)]))
    assert [kind for _, kind in found] == ["fast spike", "recovered"]


def test_one_outlier_is_no_spike():
    losses = list(CALM)
    losses[300], losses[320], losses[321] = 4.0, 3.0, 3.0
    assert said(guards_of(), run_of(losses)) == []


def test_a_slow_rise_is_told_and_undone_when_it_goes_on():
    rising = [loss + 0.0012 * step for step, loss in enumerate(noisy(1200, seed=2))]
    kinds = [kind for _, kind in said(guards_of(), run_of([*CALM, *rising]))]
    assert kinds[0] == "slow spike" and "rewind" in kinds


def test_a_loss_that_rises_on_and_on_is_told_to_diverge():
    guards = guards_of()
    judged(guards, run_of(CALM))
    verdicts = judged(guards, run_of([2.8 + 0.2 * step for step in range(12)], first=401))
    (rewind,) = (one for one in verdicts if isinstance(one, Rewind))
    assert rewind.reason.startswith("diverging")


@pytest.mark.parametrize(
    "changed", [{"global_batch": 2}, {"precision": "fp8"}, {"learning_rate": 1e-2}, {"mixture": 2}]
)
def test_a_rise_after_a_known_change_has_to_be_larger(changed):
    rise = [2.5 + 0.13 + loss - 2.5 for loss in noisy(60, seed=3)]  # 6.5 spreads
    usual = {"precision": "bf16"}
    before = run_of(CALM, **usual)
    assert said(guards_of(), [*before, *run_of(rise, first=401, **usual)])
    assert said(guards_of(), [*before, *run_of(rise, first=401, **{**usual, **changed})]) == []


def test_a_learning_rate_that_rises_over_a_few_steps_is_a_known_change():
    rise = [0.13 + loss for loss in noisy(60, seed=3)]  # 6.5 spreads
    rates = [1e-3 * 1.2 ** min(step, 4) for step in range(60)]  # no step alone rises by a quarter
    after = [
        report(step, loss, learning_rate=rate)
        for step, (loss, rate) in enumerate(zip(rise, rates, strict=True), 401)
    ]
    assert said(guards_of(), [*run_of(CALM), *after]) == []


def test_a_gap_is_no_continuity():
    found = said(guards_of(), [*run_of(CALM), *run_of([3.5] * 40, first=4000)])
    assert found == []


def test_lines_that_a_log_lacks_do_not_make_a_later_gap_shorter():
    after_a_hole = run_of(noisy(30, seed=1), first=416)  # 15 lines are missing
    far = [replace(one, step=one.step + 20) for one in run_of([3.5] * 40, first=446)]
    near = run_of([3.5] * 40, first=465)
    kinds = [kind for _, kind in said(guards_of(), [*run_of(CALM), *after_a_hole, *near])]
    assert "rewind" in kinds  # 20 distances of one step still continue the log
    assert said(guards_of(), [*run_of(CALM), *after_a_hole, *far]) == []


@pytest.mark.parametrize(("back", "is_known"), [(31, True), (32, False)])
def test_what_is_made_again_a_block_of_losses_back_is_judged_anew(back, is_known):
    again = run_of([3.5] * 15, first=400 - back)
    assert bool(said(guards_of(), [*run_of(CALM), *again])) == is_known


def test_losses_that_are_not_finite_or_not_applied_count_neither_way():
    guards = guards_of(not_finite_losses=0, refused_updates=0)
    odd = [report(step, math.nan, update_applied=False) for step in range(401, 404)]
    odd += [report(step, 9.0, update_applied=False) for step in range(404, 420)]
    assert said(guards, [*run_of(CALM), *odd]) == []
    assert isinstance(judged(guards, run_of([3.5] * 10, first=420))[-1], Rewind)


def test_a_resumed_run_judges_as_the_unbroken_one():
    losses = [*noisy(230, seed=5), *[3.6] * 12, *noisy(20, seed=6)]
    reports = run_of(losses)
    unbroken = judged(guards_of(every_steps=40), reports)
    assert any(isinstance(one, Rewind) for one in unbroken)
    for cut in (1, 2, 20, 100, 200, 231, 235, 239, 260):
        first, second = guards_of(every_steps=40), guards_of(every_steps=40)
        verdicts = judged(first, reports[:cut])
        second.load_state_values(json.loads(json.dumps(first.state_values(), allow_nan=False)))
        second.resumed()
        assert verdicts + judged(second, reports[cut:]) == unbroken


def test_a_history_of_another_version_is_begun_anew():
    guards = guards_of()
    guards.load_state_values({"spike": {"losses": [2.0], "cursors": [], "high_in_a_row": 0}})
    assert isinstance(judge(guards, report(401)), CarryOn)


def test_judging_does_not_change_a_history_that_was_handed_out():
    guard = SpikeGuard(patience=10)
    history = guard.fresh()
    text = json.dumps(history)
    later, _ = guard.judge(history, report(1))
    assert json.dumps(history) == text and later != history


def test_it_is_off_by_its_setting():
    assert said(guards_of(spike=False), run_of([*CALM, *[3.5] * 40])) == []


@pytest.mark.parametrize("spread", [0.003, 0.02, 0.2])
@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_spikes_of_six_spreads_are_found_within_twenty_steps_and_nothing_else_is(spread, tail):
    random = np.random.default_rng(7)
    for _ in range(4):
        noise = random.standard_normal(700) if tail == "normal" else random.standard_t(4, 700) / math.sqrt(2)
        noise[600:620] += 6.0
        found = said(guards_of(), run_of(2.5 + spread * noise))
        assert found and 600 < found[0][0] <= 620


def test_a_watch_changes_nothing():
    guards = guards_of()
    judged(guards, run_of(CALM))
    verdicts = judged(guards, run_of([2.9] * 3, first=401))
    assert isinstance(verdicts[-1], Watch) and guards.findings[0][0] == "spike"


def test_a_steep_fall_that_ends_is_no_spike():
    fall = [5.0 - 0.01 * step for step in range(200)]
    losses = [*[5.0] * 600, *fall, *[3.0] * 400]
    noise = noisy(len(losses), level=0.0, seed=3)
    assert said(guards_of(), run_of([a + b for a, b in zip(losses, noise, strict=True)])) == []


def test_data_that_comes_in_runs_looks_calm_for_a_window_and_is_not_judged_by_it():
    random = np.random.default_rng(8)
    lengths = random.integers(5, 60, 400)
    levels = np.repeat(0.016 * random.standard_normal(400), lengths)[:8000]
    losses = 2.5 + levels + 0.016 * random.standard_normal(8000)
    kinds = [kind for _, kind in said(guards_of(), run_of(losses.tolist()))]
    assert "rewind" not in kinds


def test_a_log_that_goes_far_back_is_judged_anew_there():
    curve = [2.0 + 3.0 * (step + 1) ** -0.3 for step in range(2000)]
    noise = noisy(3400, level=0.0, seed=4)
    steps = [*range(2000), *range(600, 2000)]
    reports = [report(step + 1, curve[step] + noise[line]) for line, step in enumerate(steps)]
    assert said(guards_of(), reports) == []


def test_a_slow_rise_is_not_measured_from_losses_whose_steps_were_made_again():
    first = run_of([*noisy(600), *noisy(200, seed=1, level=2.3)])
    again = run_of(noisy(400, seed=2), first=601)
    assert said(guards_of(plateau=False, resume_parity=False), [*first, *again]) == []
