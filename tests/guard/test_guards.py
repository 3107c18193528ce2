import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from bloomery.config.keeping import CheckpointSection, GuardSection
from bloomery.events.records import Facts, StepReport
from bloomery.guard.judge import Guards, build_guards, judge, replay
from bloomery.guard.spike import SpikeGuard
from bloomery.guard.verdict import CarryOn, Rewind, Save, Stop, Verdict, worst

BATCH = 10


def report(
    step: int, loss: float = 2.0, *, cursor: int | None = None, applied: bool = True, **more
) -> StepReport:
    return StepReport(
        step=step,
        consumed_samples=step * BATCH,
        consumed_tokens=step * BATCH * 8,
        cursor=step * BATCH if cursor is None else cursor,
        seconds=0.1,
        learning_rate=1e-3,
        global_batch=BATCH,
        loss=loss,
        z_loss=0.0,
        loss_scale=None,
        gradient_norm=1.0,
        zero_gradients=0,
        update_applied=applied,
        refused_updates=more.pop("refused_updates", 0),
        refused_in_a_row=more.pop("refused_in_a_row", 0),
        nan_losses=0,
        samples_per_s=1.0,
        tokens_per_s=1.0,
        hardware_tflops=1.0,
        model_tflops=1.0,
        mfu=None,
        facts=Facts(**more),
    )


def guards_of(**guard) -> Guards:
    checkpoint = {key: guard.pop(key) for key in ("every_steps", "every_minutes") if key in guard}
    return build_guards(
        checkpoint=CheckpointSection(**{"every_steps": 0, "every_minutes": 0.0, **checkpoint}),
        guard=GuardSection(**guard),
    )


def spike_guards(**more) -> Guards:
    settings = {
        "spike_threshold": 1.0,
        "spike_patience": 3,
        "spike_window": 10,
        "spike_rewind_steps": 4,
        "spike_skip_steps": 6,
        "spike_rewinds": 2,
    }
    return guards_of(**{**settings, **more})


def judged(guards: Guards, reports: Iterable[StepReport]) -> list[Verdict]:
    return [judge(guards, one) for one in reports]


def test_verdicts_are_ordered_from_mild_to_strong():
    carry_on, save = CarryOn(judged_step=1), Save(judged_step=1, reason="s")
    near = Rewind(judged_step=1, to_step=9, skip=range(3), reason="r")
    far = replace(near, to_step=5)
    stop, failed = (Stop(judged_step=1, reason="x", failed=it) for it in (False, True))
    ordered = [carry_on, save, near, far, stop, failed]
    for number, strongest in enumerate(ordered):
        assert worst(reversed(ordered[: number + 1])) is strongest
    first, second = save, replace(save, reason="later")
    assert worst([first, second]) is first


def test_saves_are_due_at_multiples_and_after_minutes():
    guards = guards_of(every_steps=3, every_minutes=5.0)
    verdicts = judged(guards, [report(step) for step in (1, 2, 3, 4)])
    assert [type(verdict) for verdict in verdicts] == [CarryOn, CarryOn, Save, CarryOn]
    assert isinstance(judge(guards, report(5, minutes_since_save=4.9)), CarryOn)
    assert isinstance(judge(guards, report(5, minutes_since_save=5.0)), Save)


def test_an_interval_of_zero_is_never():
    verdicts = judged(guards_of(), [report(step, minutes_since_save=1e6) for step in range(1, 50)])
    assert {type(verdict) for verdict in verdicts} == {CarryOn}


def test_requests_are_passed_on_and_a_stop_outweighs_a_save():
    assert isinstance(judge(guards_of(), report(1, save_requested=True)), Save)
    verdict = judge(guards_of(), report(1, save_requested=True, stop_requested=True, stop_reason="SIGINT"))
    assert verdict == Stop(judged_step=1, reason="SIGINT", failed=False)


@pytest.mark.parametrize(
    ("guard", "facts", "reason"),
    [
        ({"stop_at_step": 7}, {}, "stop_at_step = 7"),
        ({"stop_after_minutes": 2.0}, {"minutes_running": 2.0}, "stop_after_minutes = 2"),
    ],
)
def test_limits_stop_the_run_without_failing_it(guard, facts, reason):
    assert isinstance(judge(guards_of(**guard), report(6)), CarryOn)
    verdict = judge(guards_of(**guard), report(7, **facts))
    assert isinstance(verdict, Stop) and not verdict.failed and reason in verdict.reason


def test_too_many_refused_updates_in_a_row_fail_the_run():
    guards = guards_of(refused_updates=3)
    refused = [report(step, float("nan"), applied=False, refused_in_a_row=step) for step in (1, 2, 3)]
    verdicts = judged(guards, refused)
    assert [type(verdict) for verdict in verdicts] == [CarryOn, CarryOn, Stop]
    assert isinstance(verdicts[-1], Stop) and verdicts[-1].failed


def test_a_spike_that_stays_rewinds_to_before_it_and_skips_the_data_from_there():
    guards = spike_guards()
    calm = judged(guards, [report(step) for step in range(1, 21)])
    spike = judged(guards, [report(step, 3.5) for step in range(21, 24)])
    assert {type(verdict) for verdict in calm + spike[:-1]} == {CarryOn}
    verdict = spike[-1]
    assert isinstance(verdict, Rewind)
    # The first high step is 21: back to after step 20 - 4; 6 steps' samples from there end before the spike.
    assert (verdict.judged_step, verdict.to_step) == (23, 16)
    assert verdict.skip == range(16 * BATCH, 23 * BATCH)


def test_a_long_skip_reaches_past_the_spike():
    guards = spike_guards(spike_skip_steps=50)
    judged(guards, [report(step) for step in range(1, 21)])
    verdict = judged(guards, [report(step, 3.5) for step in range(21, 24)])[-1]
    assert isinstance(verdict, Rewind) and verdict.skip == range(160, 160 + 50 * BATCH)


def test_what_is_skipped_is_told_in_places_of_the_stream_not_in_samples_used():
    guards = spike_guards()
    judged(guards, [report(step, cursor=step * BATCH + 1000) for step in range(1, 21)])
    verdict = judged(guards, [report(step, 3.5, cursor=step * BATCH + 1000) for step in range(21, 24)])[-1]
    assert isinstance(verdict, Rewind) and verdict.skip == range(1160, 1230)


def test_a_short_spike_a_slow_rise_and_the_steep_start_are_none():
    one = spike_guards()
    losses = [2.0] * 20 + [4.0, 4.0, 2.0] * 10
    assert {type(v) for v in judged(one, [report(n, loss) for n, loss in enumerate(losses, 1)])} == {CarryOn}
    two = spike_guards()
    rise = [report(n, 2.0 + 0.1 * n) for n in range(1, 60)]
    assert {type(verdict) for verdict in judged(two, rise)} == {CarryOn}
    three = spike_guards()
    assert {type(v) for v in judged(three, [report(n, 10.0 / n) for n in range(1, 40)])} == {CarryOn}


def test_losses_that_are_not_finite_or_not_applied_count_neither_way():
    guards = spike_guards()
    judged(guards, [report(step) for step in range(1, 21)])
    odd = [
        report(21, 3.5),
        report(22, float("nan"), applied=False),
        report(23, 3.5),
        report(24, 9.0, applied=False),
    ]
    assert {type(verdict) for verdict in judged(guards, odd)} == {CarryOn}
    assert isinstance(judge(guards, report(25, 3.5)), Rewind)


def test_rewinds_are_counted_across_rewinds_and_end_in_a_stop():
    guards = spike_guards()
    judged(guards, [report(step) for step in range(1, 11)])
    stored = guards.state_values()
    for expected in (Rewind, Rewind, Stop):
        judged(guards, [report(step) for step in range(11, 21)])
        verdict = judged(guards, [report(step, 3.5) for step in range(21, 24)])[-1]
        assert type(verdict) is expected
        before = guards.state_values()
        guards.load_state_values(stored)  # what a restore does
        guards.rewound(before)
        stored = guards.state_values()  # saved at once
    assert isinstance(verdict, Stop) and verdict.failed and "2 rewinds did not help" in verdict.reason


def test_a_rewind_early_in_the_run_goes_to_its_start():
    guards = spike_guards(spike_rewind_steps=100)
    judged(guards, [report(step) for step in range(1, 11)])
    verdict = judged(guards, [report(step, 3.5) for step in range(11, 14)])[-1]
    assert isinstance(verdict, Rewind) and verdict.to_step == 0 and verdict.skip == range(0, 13 * BATCH)


def test_a_resumed_run_judges_as_the_unbroken_one():
    losses = [2.0 + 0.1 * (n % 3) for n in range(20)] + [3.6] * 3 + [2.0] * 5
    reports = [report(n, loss) for n, loss in enumerate(losses, 1)]
    unbroken = judged(spike_guards(every_steps=4), reports)
    for cut in range(len(reports)):
        first, second = spike_guards(every_steps=4), spike_guards(every_steps=4)
        verdicts = judged(first, reports[:cut])
        second.load_state_values(json.loads(json.dumps(first.state_values(), allow_nan=False)))
        assert verdicts + judged(second, reports[cut:]) == unbroken


def test_judging_does_not_change_a_history_that_was_handed_out():
    guard = SpikeGuard(threshold=1.0, patience=2, window=4, rewind_steps=2, skip_steps=1, rewinds=1)
    history = guard.fresh()
    text = json.dumps(history)
    later, _ = guard.judge(history, report(1))
    assert json.dumps(history) == text and later != history


def test_an_old_journal_can_be_judged_again():
    reports = [report(step) for step in range(1, 21)] + [report(step, 3.5) for step in range(21, 24)]
    journal = [{"event": "start", "step": 0}]
    journal += [
        {"event": "step", "incarnation": 1, **json.loads(json.dumps(one.to_json()))} for one in reports
    ]
    told = [(one.step, type(verdict)) for one, verdict in replay(spike_guards(), journal)]
    assert told[-1] == (23, Rewind) and len(told) == 23


def test_two_guards_of_one_name_are_a_mistake():
    guard = SpikeGuard(threshold=1.0, patience=2, window=4, rewind_steps=2, skip_steps=1, rewinds=1)
    with pytest.raises(ValueError, match="same name"):
        Guards((guard, guard))
