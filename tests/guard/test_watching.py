"""The guards beside the one of spikes: of numbers, scales, norms, pace, plateaus and resumes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.guard.reports import BATCH, guards_of, judged, noisy, report, said

from bloomery.guard.judge import judge
from bloomery.guard.trend import Plateau
from bloomery.guard.verdict import CarryOn, Rewind, Rung, Stop, Watch


def calm(steps, *, first=1, seed=0, **changed):
    return [report(step, loss, **changed) for step, loss in enumerate(noisy(steps, seed=seed), first)]


def test_losses_that_are_not_finite_send_the_run_back():
    guards = guards_of(not_finite_losses=3, repeat=False)
    judged(guards, calm(150))
    bad = [report(step, math.nan) for step in (151, 152, 153)]
    told, quiet, back = judged(guards, bad)
    assert told.kind == "not finite" and isinstance(quiet, CarryOn)
    assert isinstance(back, Rewind) and (back.to_step, back.latest_step) == (50, 150)
    assert back.skip == range(50 * BATCH, 353 * BATCH)


def test_too_many_refused_updates_send_the_run_back_and_fail_it_where_that_does_not_help():
    guards = guards_of(refused_updates=3, last_rung="repeat")
    refused = [report(step, update_applied=False, refused_in_a_row=step - 150) for step in (151, 152, 153)]
    judged(guards, calm(150))
    stored = guards.state_values()
    assert [type(one) for one in judged(guards, refused)] == [CarryOn, CarryOn, Rewind]
    before = guards.state_values()
    guards.load_state_values(stored)
    guards.rewound(before, rung=Rung.REPEAT)
    verdict = judged(guards, refused)[-1]
    assert isinstance(verdict, Stop) and verdict.failed and "a person has to look" in verdict.reason


def test_a_loss_scale_that_collapses_is_told_and_one_that_is_looked_for_is_not():
    falling = [report(step, loss_scale=2.0 ** (16 - step), update_applied=False) for step in range(1, 11)]
    settled = [report(step, loss_scale=64.0) for step in range(11, 200)]
    grown = [report(step, loss_scale=128.0) for step in range(200, 400)]
    assert said(guards_of(), [*falling, *settled, *grown]) == []
    collapse = [report(400 + k, loss_scale=128.0 / 2**k, update_applied=False) for k in range(1, 6)]
    assert said(guards_of(), [*falling, *settled, *grown, *collapse]) == [(403, "loss scale")]


@pytest.mark.parametrize(("times", "kinds"), [(6.0, ["gradient norm"]), (2.5, ["gradient norm"]), (1.6, [])])
def test_gradient_norms_of_twice_the_usual_and_more_are_an_early_warning(times, kinds):
    random = np.random.default_rng(1)
    norms = np.exp(0.1 * random.standard_normal(400))
    norms[390:] *= times
    found = said(guards_of(), [report(step, gradient_norm=norm) for step, norm in enumerate(norms, 1)])
    assert [kind for _, kind in found] == kinds and all(391 <= step <= 396 for step, _ in found)


def test_norms_that_were_not_measured_are_not_judged():
    assert said(guards_of(), [report(step, gradient_norm=0.0) for step in range(1, 400)]) == []


def test_a_throughput_that_drops_by_a_twentieth_is_told_within_three_reports():
    random = np.random.default_rng(2)
    seconds = 1.0 + 0.005 * random.standard_normal(300)
    seconds[250:] *= 1.08
    found = said(guards_of(), [report(step, shared_seconds=s) for step, s in enumerate(seconds, 1)])
    assert found[0] == (253, "throughput") and len(found) == 1


def test_a_batch_that_grows_is_no_drop_of_throughput():
    small = calm(200, shared_seconds=1.0)
    large = calm(200, first=201, shared_seconds=2.0, global_batch=2 * BATCH)
    assert said(guards_of(), [*small, *large]) == []


def test_a_loss_that_no_longer_falls_is_told_once():
    flat = [max(3.0 + 4.0 * step**-0.3, 3.3) for step in range(1, 40_000)]
    flat = [loss + noise - 2.5 for loss, noise in zip(flat, noisy(len(flat)), strict=True)]
    only = dict(spike=False, gradient_norm=False, throughput=False, loss_scale=False)
    found = said(guards_of(**only), [report(step, loss) for step, loss in enumerate(flat, 1)])
    assert [kind for _, kind in found] == ["plateau"]
    falls = [3.0 + 4.0 * step**-0.3 for step in range(1, 40_000)]
    assert said(guards_of(**only), [report(step, loss) for step, loss in enumerate(falls, 1)]) == []


def test_steps_of_a_log_that_were_made_again_after_a_spike_do_not_hide_a_plateau():
    def told(reports):
        history, found = Plateau().fresh(), []
        for one in reports:
            history, verdict = Plateau().judge(history, one)
            found += [one.step] if isinstance(verdict, Watch) else []
        return found

    losses = [3.0 if step < 4096 else 2.5 for step in range(1, 17_000)]
    usual = [report(step, loss) for step, loss in enumerate(losses, 1)]
    spike = [report(step, 9.0) for step in range(5000, 8000)]
    assert told([*usual[:4999], *spike, *usual[4500:]]) == told(usual) == [16_384]


def resumed(guards):
    guards.load_state_values(guards.state_values())
    guards.resumed()
    return guards


def test_losses_a_percent_above_those_before_a_resume_fail_the_run_loudly():
    def after(share):
        guards = guards_of()
        judged(guards, [report(s, loss) for s, loss in enumerate(noisy(300, spread=0.005), 1)])
        more = [(1 + share) * loss for loss in noisy(60, spread=0.005, seed=1)]
        return judged(resumed(guards), [report(s, loss) for s, loss in enumerate(more, 301)])

    (stop,) = (one for one in after(0.013) if isinstance(one, Stop))
    assert stop.failed and "+1.4% over 2.4983" in stop.reason
    assert not [one for one in after(0.003) if isinstance(one, Stop)]


def test_losses_above_those_before_a_resume_by_less_than_their_noise_stop_nothing():
    guards = guards_of()
    judged(guards, [report(s, loss) for s, loss in enumerate(noisy(300, spread=0.2), 1)])
    more = [1.02 * loss for loss in noisy(60, spread=0.2, seed=1)]
    verdicts = judged(resumed(guards), [report(s, loss) for s, loss in enumerate(more, 301)])
    assert not [verdict for verdict in verdicts if isinstance(verdict, Stop)]


def test_a_resume_at_other_samples_fails_the_run_at_its_first_step():
    guards = guards_of()
    judged(guards, calm(100))
    (right,) = judged(guards, [report(101)])
    assert isinstance(right, CarryOn)
    wrong = replace(report(102), consumed_samples=102 * BATCH + 8)
    verdict = judge(resumed(guards), wrong)
    assert isinstance(verdict, Stop) and verdict.failed and "1,028 samples" in verdict.reason


def test_between_peers_the_samples_of_the_first_step_after_a_resume_follow_from_who_took_part():
    guards = guards_of()
    judged(guards, [report(s, peers=2, consumed_samples=s * 2 * BATCH) for s in range(1, 101)])
    alone = report(101, peers=1, consumed_samples=100 * 2 * BATCH - BATCH)
    assert not isinstance(judge(resumed(guards), alone), Stop)


def test_another_batch_after_a_resume_explains_another_loss():
    guards = guards_of(spike=False)
    judged(guards, calm(300))
    more = [report(s, 2.6, global_batch=4, consumed_samples=3000 + 4 * (s - 300)) for s in range(301, 360)]
    assert said(resumed(guards), more) == []


@pytest.mark.parametrize("field", ["seconds", "samples_per_s", "tokens_per_s", "hardware_tflops", "mfu"])
def test_verdicts_do_not_depend_on_what_each_rank_measures_by_itself(field):
    losses = [*noisy(400), *[3.0] * 12]
    one = [report(step, loss, shared_seconds=1.0) for step, loss in enumerate(losses, 1)]
    random = np.random.default_rng(3)
    other = [replace(each, **{field: float(random.random())}) for each in one]
    assert judged(guards_of(), one) == judged(guards_of(), other)


def test_every_guard_is_off_by_its_setting():
    settings = "spike gradient_norm loss_scale throughput plateau held_out memory resume_parity"
    counts = ("not_finite_losses", "refused_updates", "corruption_steps", "growth_steps")
    off = {**dict.fromkeys(settings.split(), False), **dict.fromkeys(counts, 0)}
    names = {guard.name for guard in guards_of(**off).guards}
    assert names == {"requests", "stop_limits", "save_intervals"}
    assert len(guards_of().guards) == 14


def test_a_held_out_loss_that_rises_while_training_does_not_is_told_once():
    losses = noisy(400)
    reports = [report(step, loss) for step, loss in enumerate(losses, 1)]
    rising = {100: 2.60, 150: 2.55, 200: 2.57, 250: 2.59, 300: 2.62, 350: 2.65}
    evaluated = [replace(one, held_out_loss=rising.get(one.step)) for one in reports]
    assert said(guards_of(), evaluated) == [(300, "held-out loss")]
    both = [replace(one, loss=one.loss + 0.001 * one.step) for one in evaluated]
    assert (300, "held-out loss") not in said(guards_of(spike=False), both)
    assert said(guards_of(held_out=False), evaluated) == []


def test_memory_that_grows_in_each_block_is_told_once_and_caches_that_fill_are_not():
    def run(memory):
        return [report(step, loss, memory_bytes=memory(step)) for step, loss in enumerate(noisy(1500), 1)]

    assert said(guards_of(), run(lambda step: 1e9 + 2e5 * step)) == [(800, "memory")]
    assert said(guards_of(), run(lambda step: 1e9 + 5e8 * min(step / 300, 1.0))) == []
    assert said(guards_of(), run(lambda step: 1e9 + 1e8 * (step % 7))) == []
    assert said(guards_of(), run(lambda step: 1e9 + 1e4 * step)) == []  # 6 MB in 600 steps
    assert said(guards_of(memory=False), run(lambda step: 1e9 + 2e5 * step)) == []
