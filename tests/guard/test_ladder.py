"""The ladder: each rung in each situation, what it remembers, and what it asks for."""

import json
import math
from dataclasses import replace

import pytest
from tests.guard.reports import BATCH, guards_of, judged, noisy, report

from bloomery.config.checkpoint import GuardSection
from bloomery.guard.ladder import Ladder, LadderState, StepMade, earlier_rungs_words, ladder_from_json
from bloomery.guard.restraint import Restraint, restraint_at, restraints_from_json
from bloomery.guard.trial import begin_trial
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind, Rung, Stop, Watch

# rung: (after anomaly, after calm), as the docstring of the module has it.
TABLE = {
    Rung.WATCH: (Rung.REPEAT, Rung.WATCH),
    Rung.REPEAT: (Rung.SKIP, Rung.WATCH),
    Rung.SKIP: (Rung.SLOW, Rung.REPEAT),
    Rung.SLOW: (Rung.CLAMP, Rung.SKIP),
    Rung.CLAMP: (Rung.STOP, Rung.SLOW),
    Rung.STOP: (Rung.STOP, Rung.STOP),
}
CALM = [report(step, loss) for step, loss in enumerate(noisy(400), 1)]
SPIKE = [report(step, 3.5) for step in range(401, 411)]
ANOMALY = Anomaly(judged_step=410, first_bad=401, reason="it rose")


def ladder(**settings) -> Ladder:
    return Ladder(section=GuardSection(**settings))


@pytest.mark.parametrize("rung", Rung)
def test_every_rung_leads_where_its_row_says(rung):
    assert set(TABLE) == set(Rung)
    assert (ladder().after_anomaly(rung), ladder().after_calm(rung)) == TABLE[rung]


@pytest.mark.parametrize("rung", Rung)
@pytest.mark.parametrize("last", ["repeat", "skip", "slow", "clamp"])
def test_a_ladder_that_ends_earlier_stops_there(rung, last):
    following = ladder(last_rung=last).after_anomaly(rung)
    usual, _ = TABLE[rung]
    assert following is (usual if usual <= Rung[last.upper()] else Rung.STOP)


def test_without_repeating_samples_are_left_out_at_once():
    assert ladder(repeat=False).after_anomaly(Rung.WATCH) is Rung.SKIP
    assert ladder(repeat=False, last_rung="repeat").after_anomaly(Rung.WATCH) is Rung.STOP


@pytest.mark.parametrize("rung", Rung)
def test_each_rung_asks_for_what_it_is_and_says_why_in_a_sentence(rung):
    asked = ladder().answer_from(rung, ANOMALY, SPIKE[-1], before=3000, history=earlier_rungs_words(rung, 7))
    following, _ = TABLE[rung]
    assert asked.reason.startswith("it rose. ") and asked.numbers["rung"] == following
    if following is Rung.STOP:
        assert isinstance(asked, Stop) and asked.failed and "a person has to look" in asked.reason
        return
    assert isinstance(asked, Rewind) and asked.rung is following
    assert (asked.to_step, asked.latest_step) == (300, 400)
    skipped = following is not Rung.REPEAT
    assert asked.skip == (range(3000, 610 * BATCH) if skipped else range(3000, 3000))
    assert ("leaves out the 3,100 samples from 3,000 on" in asked.reason) == skipped
    assert ("7 of them with the same bits" in asked.reason) == (rung is Rung.REPEAT)
    assert ("0.5 times the learning rate" in asked.reason) == (following >= Rung.SLOW)
    assert ("0.25 times the largest gradient norm" in asked.reason) == (following is Rung.CLAMP)


def rewound(guards, stored, rung):
    """What a rewind does to the guards: the checkpoint's histories, then those of before it."""
    before = guards.state_values()
    guards.load_state_values(json.loads(json.dumps(stored, allow_nan=False)))
    guards.rewound(before, rung=rung)


def test_an_anomaly_that_comes_again_climbs_to_the_end_and_then_stops_the_run():
    guards = guards_of()
    judged(guards, CALM[:300])
    stored = guards.state_values()
    judged(guards, CALM[300:])
    rungs = []
    for _ in range(5):
        verdict = judged(guards, SPIKE)[-1]
        if isinstance(verdict, Stop):
            break
        rungs.append(verdict.rung)
        rewound(guards, stored, verdict.rung)
        judged(guards, CALM[300:])
    assert rungs == [Rung.REPEAT, Rung.SKIP, Rung.SLOW, Rung.CLAMP]
    assert isinstance(verdict, Stop) and verdict.failed and "3.500 is 0.99" in verdict.reason


def test_rewinds_are_forgotten_rung_by_rung_over_calm_steps():
    guards = guards_of(forget_rewind_steps=500)
    judged(guards, CALM)
    rewound(guards, guards.state_values(), Rung.SLOW)
    seen = []
    for start in range(401, 2001, 100):
        judged(guards, [report(start + at, loss) for at, loss in enumerate(noisy(100, seed=start))])
        seen.append(ladder_from_json(guards.state_values()["ladder"]).rung)
    assert list(dict.fromkeys(seen)) == [Rung.SLOW, Rung.SKIP, Rung.REPEAT, Rung.WATCH]
    assert seen.index(Rung.SKIP) == 4  # after five hundred steps


def test_steps_of_an_anomaly_are_not_calm():
    rules, state = ladder(forget_rewind_steps=3), LadderState(rung=Rung.SKIP)
    for step in (1, 2, 3, 4):
        state, _ = rules.after_step(state, report(step), is_calm=False)
    assert (state.rung, state.calm) == (Rung.SKIP, 0)


def test_a_step_that_is_made_again_has_to_have_the_same_bits():
    guards = guards_of()
    judged(guards, CALM[:300])
    stored = guards.state_values()
    judged(guards, CALM[300:])
    judged(guards, SPIKE)
    rewound(guards, stored, Rung.REPEAT)
    again = [*CALM[300:350], replace(CALM[350], loss=math.nextafter(CALM[350].loss, 9.0)), *CALM[351:]]
    verdicts = judged(guards, again)
    (odd,) = (one for one in verdicts if not isinstance(one, CarryOn))
    assert isinstance(odd, Watch) and odd.kind == "other bits"
    assert odd.judged_step == 351 and odd.numbers["same_steps"] == 50
    assert repr(float(CALM[350].loss)) in odd.reason


@pytest.mark.parametrize(("rung", "verdict"), [(Rung.REPEAT, Stop), (Rung.SKIP, CarryOn)])
def test_a_high_loss_on_other_samples_is_no_broken_resume(rung, verdict):
    guards = guards_of(spike=False, not_finite_losses=0, refused_updates=0)
    judged(guards, CALM[:300])
    stored = guards.state_values()
    judged(guards, CALM[300:])
    rewound(guards, stored, rung)
    high = [replace(one, loss=one.loss + 1.0, cursor=one.cursor + 999) for one in CALM[300:310]]
    kinds = {type(one) for one in judged(guards, high)} - {Watch}
    assert (Stop in kinds) == (verdict is Stop)


def test_between_peers_samples_of_all_their_steps_are_left_out():
    anomaly = Anomaly(judged_step=610, first_bad=600, reason="a spike")
    alone, beside = (
        ladder().answer_from(Rung.REPEAT, anomaly, report(610, peers=peers), before=3000) for peers in (1, 4)
    )
    skipped = ladder().section.spike_skip_steps * BATCH
    assert len(beside.skip) - len(alone.skip) == 3 * skipped


def test_where_no_step_is_remembered_samples_are_left_out_from_the_start_on():
    asked = ladder(repeat=False).answer(LadderState(), ANOMALY, SPIKE[-1])
    assert isinstance(asked, Rewind) and asked.to_step > 0 and asked.skip.start == 0


@pytest.mark.parametrize("lasts", [{"spike_patience": 90}, {"refused_updates": 280}, {"trial_steps": 240}])
def test_samples_are_left_out_from_the_step_that_the_run_goes_back_to_however_long_an_anomaly_may_last(lasts):
    rules, state = ladder(**lasts), LadderState(rung=Rung.REPEAT)
    for step in range(1, 781):
        state, _ = rules.after_step(state, report(step, 3.5), is_calm=False)
    asked = rules.answer(state, Anomaly(judged_step=780, first_bad=501, reason="it rose"), report(780, 3.5))
    assert (asked.to_step, asked.skip) == (400, range(400 * BATCH, (780 + 200) * BATCH))


def test_not_more_steps_are_remembered_than_a_checkpoint_may_hold():
    rules = ladder(refused_updates=10**9)
    state, _ = rules.after_step(
        LadderState(steps=tuple(StepMade(step=step, cursor=step, loss=2.0) for step in range(5000))),
        report(5000),
        is_calm=True,
    )
    assert len(state.steps) == 4096 and state.steps[-1].step == 5000


def test_steps_of_other_samples_are_not_compared():
    guards = guards_of()
    judged(guards, CALM[:300])
    stored = guards.state_values()
    judged(guards, [*CALM[300:], *SPIKE])
    rewound(guards, stored, Rung.SKIP)
    other = [replace(one, loss=one.loss + 1e-4, cursor=one.cursor + 999) for one in CALM[300:]]
    assert {type(one) for one in judged(guards, other)} == {CarryOn}


def test_steps_that_peers_made_together_are_not_compared_with_those_that_one_makes_alone():
    state = LadderState(rung=Rung.REPEAT)
    made, _ = ladder().after_step(state, report(1, 2.5, peers=2), is_calm=False)
    again = ladder().rewound(made, LadderState(), Rung.REPEAT)
    assert ladder().after_step(again, report(1, 2.6), is_calm=True)[1] == ()


def test_not_a_number_is_the_same_bits_again():
    state = LadderState(rung=Rung.REPEAT)
    made, _ = ladder().after_step(state, report(1, math.nan), is_calm=False)
    again = ladder().rewound(made, LadderState(), Rung.REPEAT)
    kept = ladder_from_json(json.loads(json.dumps(again.to_json(), allow_nan=False)))
    after, told = ladder().after_step(kept, report(1, math.nan), is_calm=False)
    assert told == () and after.same == 1


def test_going_back_by_hand_leaves_the_ladder_where_it_is():
    before = LadderState(rung=Rung.SLOW, calm=20)
    after = ladder().rewound(before, LadderState(), Rung.WATCH)
    assert (after.rung, after.calm) == (Rung.SLOW, 20)


def test_a_peer_that_found_nothing_itself_climbs_with_the_others():
    assert ladder().rewound(LadderState(), LadderState(), Rung.SLOW).rung is Rung.SLOW
    assert ladder().rewound(LadderState(rung=Rung.CLAMP), LadderState(), Rung.SLOW).rung is Rung.CLAMP


@pytest.mark.parametrize("rung", Rung)
def test_only_the_last_two_rungs_restrain_the_steps_that_follow(rung):
    held = ladder().restraint(rung, consumed=500, problem=2500, samples_per_step=8)
    expected = {Rung.SLOW: (0.5, 1.0, 0.0, 0.0), Rung.CLAMP: (0.5, 0.25, 2.5, 100.0)}.get(rung)
    assert (held and (held.rate, held.clip, held.z_score, held.qk_clip)) == expected
    assert held is None or (held.start, held.stop) == (500, 2500 + 8 * 1000)


def test_restraints_hold_in_their_stretch_and_the_strictest_of_several_counts():
    half = Restraint(start=10, stop=30, rate=0.5, clip=1.0, qk_clip=100.0)
    clamped = Restraint(start=20, stop=40, rate=0.8, clip=0.25, z_score=2.5, qk_clip=50.0)
    held = [restraint_at((half, clamped), consumed) for consumed in (9, 10, 20, 29, 30, 40)]
    factors = [(each.rate, each.clip) for each in held]
    assert factors == [(1.0, 1.0), (0.5, 1.0), (0.5, 0.25), (0.5, 0.25), (0.8, 0.25), (1.0, 1.0)]
    clamps = [(each.z_score, each.qk_clip) for each in held]
    assert clamps == [(0.0, 0.0), (0.0, 100.0), (2.5, 50.0), (2.5, 50.0), (2.5, 50.0), (0.0, 0.0)]
    ends = [(each.start, each.stop) for each in held]
    assert ends == [(9, 9), (10, 30), (20, 30), (20, 30), (20, 40), (40, 40)], "the stretch in which it holds"
    stored = json.loads(json.dumps([half.to_json(), clamped.to_json()]))
    assert restraints_from_json(stored) == (half, clamped)


def test_of_several_guards_the_one_that_began_first_is_answered():
    guards = guards_of(not_finite_losses=2, spike_patience=20)
    judged(guards, CALM)
    high = [report(step, 3.5) for step in range(401, 419)]
    bad = [report(step, math.nan) for step in (419, 420)]
    verdict = judged(guards, [*high, *bad])[-1]
    assert isinstance(verdict, Rewind) and verdict.latest_step == 418
    assert [name for name, _ in guards.findings] == ["not_finite"]


def test_a_rung_is_forgotten_at_the_last_of_its_calm_steps_and_the_next_one_counts_anew():
    rules, state, seen = ladder(forget_rewind_steps=3), LadderState(rung=Rung.SKIP), []
    for step in range(1, 8):
        state, _ = rules.after_step(state, report(step), is_calm=True)
        seen.append((state.rung, state.calm))
    skip, repeat = Rung.SKIP, Rung.REPEAT
    assert seen[:6] == [(skip, 1), (skip, 2), (repeat, 0), (repeat, 1), (repeat, 2), (Rung.WATCH, 0)]
    assert seen[6] == (Rung.WATCH, 0), "on the lowest rung nothing is counted"


def test_a_rung_is_not_forgotten_before_the_run_is_back_where_the_anomaly_was():
    rules, states = ladder(forget_rewind_steps=10), [LadderState()]
    for step in range(1, 61):
        states.append(rules.after_step(states[-1], report(step), is_calm=True)[0])
    state = rules.rewound(states[60], states[30], Rung.REPEAT)
    rungs = {}
    for step in range(31, 81):
        state, _ = rules.after_step(ladder_from_json(state.to_json()), report(step), is_calm=True)
        rungs[step] = state.rung
    assert {step for step, rung in rungs.items() if rung is Rung.REPEAT} == set(range(31, 70))


def test_of_a_step_that_is_made_again_the_newer_is_remembered():
    rules, state = ladder(), LadderState()
    for one in (report(1), report(2), report(3), report(2, 2.5), report(2, 2.6)):
        state, _ = rules.after_step(state, one, is_calm=True)
    assert [(made.step, made.loss) for made in state.steps] == [(1, 2.0), (2, 2.6)]


@pytest.mark.parametrize(
    ("rung", "tried"),
    [
        (Rung.WATCH, ""),
        (Rung.REPEAT, "It came again after the same steps were made again, 7 of them with the same bits. "),
        (Rung.SKIP, "It came again after samples were left out. "),
    ],
)
def test_an_answer_says_what_was_tried_before(rung, tried):
    asked = ladder().answer(LadderState(rung=rung, same=7), ANOMALY, SPIKE[-1])
    assert asked.reason.startswith(f"it rose. {tried}The run goes back")


def test_going_back_by_hand_keeps_the_steps_of_the_checkpoint_and_what_trials_found():
    rules = ladder()
    restored, _ = rules.after_step(LadderState(), report(1), is_calm=True)
    before, _ = rules.after_step(restored, report(2), is_calm=True)
    after = rules.rewound(replace(before, discarded=("Leaving samples out: no.",)), restored, Rung.WATCH)
    assert [made.step for made in after.steps] == [1] and after.repeats == ()
    assert after.discarded == ("Leaving samples out: no.",)


def test_what_trials_found_is_kept_until_a_remedy_is_adopted():
    trial = begin_trial(Rung.SKIP, base_step=0, problem_step=1, steps=2, losses_before=[])
    state, kept = LadderState(rung=Rung.SKIP, trial=trial, discarded=("no",)), []
    for step in (1, 2, 3):
        state, _ = ladder().after_step(state, report(step), is_calm=True)
        kept.append((state.trial is not None, state.discarded))
    assert kept == [(True, ("no",)), (True, ("no",)), (False, ())]


def test_a_remedy_is_held_against_the_losses_before_it_as_far_as_they_are_known():
    rules, state = ladder(trial_steps=40), LadderState()
    blank = rules.rewound(state, state, Rung.SKIP).trial
    assert blank is not None and (blank.problem_step, blank.last_step, blank.limit) == (0, 40, math.inf)
    for one in CALM[:100]:
        state, _ = rules.after_step(state, one, is_calm=True)
    tried = rules.rewound(state, state, Rung.SKIP).trial
    assert tried is not None and tried.base_step == tried.problem_step == 100
    assert tried.usual == pytest.approx(2.5, abs=0.01) and tried.limit < 2.6


@pytest.mark.parametrize(("was", "now"), [(math.nan, 2.5), (2.5, math.nan)])
def test_a_loss_that_was_not_a_number_only_once_has_other_bits(was, now):
    made, _ = ladder().after_step(LadderState(rung=Rung.REPEAT), report(1, was), is_calm=False)
    again = ladder().rewound(made, LadderState(), Rung.REPEAT)
    _, (odd,) = ladder().after_step(again, report(1, now), is_calm=False)
    assert isinstance(odd, Watch) and odd.kind == "other bits"


def test_a_step_that_goes_back_to_other_samples_is_not_compared_with_the_one_before():
    made, _ = ladder().after_step(LadderState(rung=Rung.REPEAT), report(1, 2.5), is_calm=False)
    again = ladder().rewound(made, LadderState(), Rung.REPEAT)
    for further, told in ((0, 1), (8, 0)):
        step = replace(report(1, 2.6), cursor=report(1, 2.6).cursor + further)
        assert len(ladder().after_step(again, step, is_calm=False)[1]) == told


def test_a_restraint_that_was_stored_before_there_were_clamps_clamps_nothing():
    stored = {"start": 10, "stop": 30, "rate": 0.5, "clip": 0.25}
    (found,) = restraints_from_json([stored])
    assert found == Restraint(start=10, stop=30, rate=0.5, clip=0.25, z_score=0.0, qk_clip=0.0)


@pytest.mark.parametrize("again", [report(2, 2.6, peers=2), replace(report(1, 2.6), cursor=report(2).cursor)])
def test_a_step_that_is_made_again_with_peers_or_under_another_number_is_not_compared(again):
    made, _ = ladder().after_step(LadderState(rung=Rung.REPEAT), report(2, 2.5), is_calm=False)
    back = ladder().rewound(made, LadderState(), Rung.REPEAT)
    assert len(ladder().after_step(back, report(2, 2.6), is_calm=False)[1]) == 1
    assert ladder().after_step(back, again, is_calm=False)[1] == ()
