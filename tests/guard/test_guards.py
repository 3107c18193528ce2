import math
from dataclasses import dataclass, replace

import pytest
from tests.guard.reports import guards_of, judged, report

from bloomery.config.checkpoint import GuardSection
from bloomery.events.records import Facts
from bloomery.guard.basic_guards import LossScaleCollapse
from bloomery.guard.judge import Guards, described, judge, replay
from bloomery.guard.ladder import Ladder
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind, Rung, Save, Stop, Watch, worst


def test_verdicts_are_ordered_from_mild_to_strong():
    carry_on, save = CarryOn(judged_step=1), Save(judged_step=1, reason="s")
    watch = Watch(judged_step=1, kind="k", reason="w")
    near = Rewind(judged_step=1, to_step=9, skip=range(3), reason="r")
    far = replace(near, to_step=5)
    stop, failed = (Stop(judged_step=1, reason="x", failed=it) for it in (False, True))
    ordered = [carry_on, watch, save, near, far, stop, failed]
    for number, strongest in enumerate(ordered):
        assert worst(reversed(ordered[: number + 1])) is strongest
        assert worst(ordered[: number + 1]) is strongest
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


def test_saves_by_samples_count_what_all_peers_consumed_in_the_step():
    guards = guards_of(every_samples=100)
    passed = report(
        7, consumed_samples=120, global_batch=10, peers=3
    )  # from 90: 10 of one peer came from 110
    assert isinstance(judge(guards, passed), Save)
    assert isinstance(judge(guards, replace(passed, consumed_samples=130)), CarryOn)


def test_requests_are_passed_on_and_a_stop_outweighs_a_save():
    assert isinstance(judge(guards_of(), report(1, save_requested=True)), Save)
    verdict = judge(guards_of(), report(1, save_requested=True, stop_requested=True, stop_reason="SIGINT"))
    assert verdict == Stop(judged_step=1, reason="SIGINT", failed=False)


def test_a_person_sends_the_run_back_to_a_step_without_the_samples_named():
    verdict = judge(guards_of(), report(7, rewind_requested=(3, 40, 60), save_requested=True))
    assert isinstance(verdict, Rewind) and "by hand" in verdict.reason
    assert (verdict.judged_step, verdict.to_step, verdict.skip) == (7, 3, range(40, 60))


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


@pytest.mark.parametrize("bad", [math.nan, 3.5])
def test_a_rewind_that_a_stop_came_before_is_asked_for_again_by_the_resumed_run(bad):
    unbroken, stopped, resumed = (guards_of(not_finite_losses=3) for _ in range(3))
    calm = [report(step) for step in range(1, 301)]
    judged(stopped, calm)
    judged(unbroken, calm)
    bad_steps = [report(step, bad, update_applied=math.isfinite(bad)) for step in range(301, 321)]
    verdicts = judged(unbroken, bad_steps)
    (due,) = (at for at, verdict in enumerate(verdicts) if isinstance(verdict, Rewind))
    judged(stopped, bad_steps[:due])
    asked_to_stop = Facts(stop_requested=True, stop_reason="signal SIGTERM")
    assert isinstance(judge(stopped, replace(bad_steps[due], facts=asked_to_stop)), Stop)
    resumed.load_state_values(stopped.state_values())
    resumed.resumed()
    assert isinstance(judge(resumed, bad_steps[due + 1]), Rewind)


def test_an_old_journal_can_be_judged_again():
    reports = [report(step) for step in range(1, 201)] + [report(step, 3.5) for step in range(201, 212)]
    journal = [{"event": "start", "step": 0}]
    journal += [{"event": "step", "incarnation": 1, **one.to_json()} for one in reports]
    told = [(one.step, type(verdict)) for one, verdict in replay(guards_of(), journal)]
    assert (210, Rewind) in told and len(told) == 211


def test_a_verdict_is_journalled_with_its_reason_and_its_numbers():
    guards = guards_of()
    judged(guards, [report(step) for step in range(1, 201)] + [report(step, 3.5) for step in range(201, 211)])
    ((name, verdict),) = guards.findings
    fields = described(verdict)
    assert name == "spike" and fields["action"] == "rewind" and fields["to_step"] == 100
    numbers = fields["numbers"]
    assert numbers["level"] == 2.0 and "2.000" in fields["reason"]
    assert numbers["spreads"] == pytest.approx((3.5 - 2.0) / numbers["spread"])


def test_two_guards_of_one_name_are_a_mistake():
    guard = LossScaleCollapse()
    with pytest.raises(ValueError, match="same name"):
        Guards((guard, guard), ladder=Ladder(section=GuardSection()))


@dataclass(frozen=True)
class Says:
    """A guard that always says the same."""

    name: str
    verdict: Stop | Anomaly

    def fresh(self) -> None:
        return None

    def judge(self, history, report):
        return history, self.verdict

    def rewound(self, before, restored, *, rung):
        return restored

    def resumed(self, history):
        return history


def test_a_stop_is_a_finding_where_the_run_cannot_go_on_and_not_where_it_was_asked_for():
    failed, asked = (Stop(judged_step=1, reason="x", failed=it) for it in (True, False))
    guards = Guards((Says("disk", failed), Says("person", asked)), ladder=Ladder(section=GuardSection()))
    assert judge(guards, report(1)) is failed
    assert guards.findings == (("disk", failed),)


def test_of_several_anomalies_the_one_that_began_first_is_undone():
    late, early = (Anomaly(judged_step=300, first_bad=step, reason=f"from {step}") for step in (290, 280))
    said = (Says("late", late), Says("early", early))
    guards = Guards(said, ladder=Ladder(section=GuardSection(spike_rewind_steps=10)))
    verdict = judge(guards, report(300))
    assert isinstance(verdict, Rewind) and verdict.to_step == 269 and "from 280" in verdict.reason
    assert [name for name, _ in guards.findings] == ["early"]


def test_after_a_rewind_each_guard_gets_what_it_knew_when_that_was_decided():
    given = []

    @dataclass(frozen=True, kw_only=True)
    class Recorder:
        name: str

        def fresh(self):
            return "fresh"

        def rewound(self, before, restored, *, rung):
            given.append((self.name, before, restored, rung))
            return "after"

    guards = Guards((Recorder(name="a"), Recorder(name="b")), ladder=Ladder(section=GuardSection()))
    guards.load_state_values({"a": "of a's checkpoint", "b": "of b's checkpoint"})
    guards.rewound({"a": "when it was decided"}, rung=Rung.SKIP)
    assert given == [
        ("a", "when it was decided", "of a's checkpoint", Rung.SKIP),
        ("b", "fresh", "of b's checkpoint", Rung.SKIP),
    ]
    assert guards.state_values() | {"ladder": None} == {"a": "after", "b": "after", "ladder": None}
