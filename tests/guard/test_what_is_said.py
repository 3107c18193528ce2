"""The sentences and records of the ladder, of trials and of verdicts, to the letter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.guard.reports import BATCH, report

from bloomery.config.checkpoint import GuardSection
from bloomery.guard.judge import described
from bloomery.guard.ladder import (
    Ladder,
    LadderState,
    StepMade,
    _cursor_after,
    earlier_rungs_words,
    ladder_from_json,
)
from bloomery.guard.trial import Trial
from bloomery.guard.verdict import Anomaly, Rewind, Rung, Stop, Watch

ANOMALY = Anomaly(judged_step=410, first_bad=401, reason="it rose", numbers={"loss": 3.5})
LAST = report(410, 3.5)
SKIPPED = "it rose. The run goes back and leaves out the 3,100 samples from 3,000 on"
SLOWER = f"{SKIPPED}, with 0.5 times the learning rate"


def asked(rung: Rung, **settings: Any) -> Rewind | Stop:
    return Ladder(section=GuardSection(**settings)).answer_from(rung, ANOMALY, LAST, before=3000)


@pytest.mark.parametrize(
    ("rung", "settings", "reason"),
    [
        (Rung.WATCH, {}, "it rose. The run goes back and makes the same steps again"),
        (Rung.REPEAT, {}, SKIPPED),
        (Rung.SKIP, {}, f"{SLOWER} until 1000 steps beyond the problem"),
        (
            Rung.SLOW,
            {},
            f"{SLOWER}, 0.25 times the largest gradient norm, norms clipped from a z-score of 2.5 on, "
            "attention logits clipped at 100 until 1000 steps beyond the problem",
        ),
        (
            Rung.SLOW,
            {"clamp_z_score": 0.0, "clamp_qk": 0.0, "restrain_steps": 7},
            f"{SLOWER}, 0.25 times the largest gradient norm until 7 steps beyond the problem",
        ),
        (Rung.CLAMP, {}, "it rose. Nothing milder is left: a person has to look"),
    ],
)
def test_each_remedy_is_told_with_its_numbers(rung: Rung, settings: dict[str, Any], reason: str) -> None:
    told = asked(rung, **settings)
    following = float(Ladder(section=GuardSection()).after_anomaly(rung))
    assert told.reason == reason and told.numbers == {"loss": 3.5, "rung": following}
    assert told.judged_step == 410


def test_an_old_log_without_samples_is_told_in_steps() -> None:
    told = Ladder(section=GuardSection()).answer_from(
        Rung.REPEAT, ANOMALY, replace(LAST, cursor=410, global_batch=1), before=300, in_steps=True
    )
    assert isinstance(told, Rewind) and told.skip == range(300, 610)
    assert told.reason == (
        "it rose. The run goes back and leaves out the 310 steps' samples from step 300 on"
    )


@pytest.mark.parametrize(
    ("rung", "same", "words"),
    [
        (Rung.WATCH, 3, ""),
        (Rung.REPEAT, 0, "It came again after the same steps were made again. "),
        (
            Rung.REPEAT,
            3,
            "It came again after the same steps were made again, 3 of them with the same bits. ",
        ),
        (Rung.SKIP, 3, "It came again after samples were left out. "),
        (Rung.SLOW, 3, "It came again after samples were left out and the learning rate was lowered. "),
        (
            Rung.CLAMP,
            3,
            "It came again after samples were left out at a lower learning rate and tighter clipping. ",
        ),
    ],
)
def test_what_was_tried_before_is_told(rung: Rung, same: int, words: str) -> None:
    assert earlier_rungs_words(rung, same) == words
    if rung is Rung.CLAMP:
        assert earlier_rungs_words(Rung.STOP, 0) == words


def made(*steps: int) -> tuple[StepMade, ...]:
    return tuple(StepMade(step=step, cursor=step * BATCH, loss=2.0) for step in steps)


@pytest.mark.parametrize(("step", "cursor"), [(0, 0), (5, 50), (6, 70), (3, 50), (8, 0)])
def test_the_data_stood_where_the_step_or_the_next_known_one_left_it(step: int, cursor: int) -> None:
    assert _cursor_after(made(5, 7), step) == cursor


def test_a_problem_early_in_a_run_goes_back_to_its_beginning() -> None:
    early = replace(ANOMALY, first_bad=101)
    told = Ladder(section=GuardSection(repeat=False)).answer(LadderState(steps=made(1, 2, 3)), early, LAST)
    assert isinstance(told, Rewind) and (told.to_step, told.latest_step, told.skip.start) == (0, 100, 0)
    later = Ladder(section=GuardSection(repeat=False)).answer(LadderState(steps=made(1, 2)), ANOMALY, LAST)
    assert isinstance(later, Rewind) and (later.to_step, later.latest_step) == (300, 400)


def test_the_steps_are_remembered_that_a_rewind_may_go_back_and_some_more() -> None:
    rules, state = Ladder(section=GuardSection(spike_rewind_steps=3)), LadderState()
    for step in range(1, 101):
        state, _ = rules.after_step(state, report(step, float(step), peers=1 + step % 2), is_calm=True)
    assert [one.step for one in state.steps] == [*range(34, 101)]
    assert state.steps[-1] == StepMade(step=100, cursor=1000, loss=100.0, alone=True)
    assert not state.steps[-2].alone and state.rung is Rung.WATCH and state.calm == 0
    again, _ = rules.after_step(state, report(98, 1.0), is_calm=True)
    assert [one.step for one in again.steps[-2:]] == [97, 98] and again.steps[-1].loss == 1.0


def test_a_state_is_stored_whole() -> None:
    trial = Trial(
        rung=Rung.SLOW, base_step=3, problem_step=5, last_step=9, usual=2.0, spread=0.5,
        losses=(2.5, math.inf), refused=1, held_out=2.25, is_over=True,
    )  # fmt: skip
    state = LadderState(
        rung=Rung.SKIP, calm=4, steps=made(7), repeats=(replace(made(8)[0], alone=False),), same=2,
        trial=trial, discarded=("one.",),
    )  # fmt: skip
    stored = state.to_json()
    assert stored == {
        "rung": 2, "calm": 4, "steps": [[7, 70, 2.0, True]], "repeats": [[8, 80, 2.0, False]], "same": 2,
        "trial": {
            "rung": 3, "base_step": 3, "problem_step": 5, "last_step": 9, "usual": 2.0, "spread": 0.5,
            "losses": [2.5, "Infinity"], "refused": 1, "held_out": 2.25, "is_over": True,
        },
        "discarded": ["one."],
    }  # fmt: skip
    assert ladder_from_json(stored) == state
    del stored["trial"], stored["discarded"]
    assert ladder_from_json(stored) == replace(state, trial=None, discarded=())
    assert ladder_from_json(None) == LadderState()


def test_the_evidence_of_a_trial_has_its_median_only_of_finite_losses() -> None:
    trial = Trial(
        rung=Rung.SKIP,
        base_step=3,
        problem_step=5,
        last_step=9,
        usual=2.0,
        spread=0.25,
        losses=(3.0, 1.0, 4.0),
    )
    assert trial.evidence() == {
        "rung": 2.0, "base_step": 3.0, "steps_beyond": 3.0, "median": 3.0, "highest": 4.0, "usual": 2.0,
        "limit": 2.75, "refused_updates": 0.0,
    }  # fmt: skip
    odd = replace(trial, losses=(3.0, math.inf), held_out=1.5, spread=0.0).evidence()
    assert math.isnan(odd["median"]) and odd["highest"] == 3.0
    assert (odd["held_out"], odd["limit"]) == (1.5, math.inf)
    none = replace(trial, losses=()).evidence()
    assert math.isnan(none["median"]) and math.isnan(none["highest"]) and none["steps_beyond"] == 0.0


def after(trial: Trial | None, **before: Any) -> LadderState:
    rules = Ladder(section=GuardSection(trial_steps=6))
    state = LadderState(steps=made(1, 2, 3, 4, 5, 6, 7), trial=trial, **before)
    return rules.rewound(state, LadderState(steps=made(1, 2, 3)), Rung.SLOW)


def test_what_trials_found_is_kept_in_their_order_and_the_first_problem_is_that_of_all() -> None:
    first = after(None)
    assert first.trial == Trial(
        rung=Rung.SLOW, base_step=3, problem_step=7, last_step=13, usual=pytest.approx(math.nan, nan_ok=True),
        spread=0.0,
    ) and first.discarded == ()  # fmt: skip
    ended = Trial(
        rung=Rung.SKIP,
        base_step=3,
        problem_step=5,
        last_step=6,
        usual=2.0,
        spread=0.5,
        losses=(4.0,),
        is_over=True,
    )
    over = after(ended, discarded=("before.",))
    assert over.trial is not None and (over.trial.problem_step, over.trial.last_step) == (5, 11)
    assert over.discarded == ("before.", "Leaving samples out: the median loss was 4.0000 in the end.")
    again = after(replace(ended, is_over=False))
    assert again.trial is not None and again.trial.problem_step == 7
    assert again.discarded == ("Leaving samples out: the problem came again.",)


def test_the_last_stop_names_all_that_was_tried_on_forks() -> None:
    trial = Trial(
        rung=Rung.CLAMP, base_step=3, problem_step=5, last_step=6, usual=2.0, spread=0.5, losses=(4.0,)
    )
    state = LadderState(rung=Rung.CLAMP, steps=made(2, 3, 4), trial=trial, discarded=("One: it rose.",))
    stop = Ladder(section=GuardSection()).answer(state, ANOMALY, LAST)
    assert isinstance(stop, Stop) and stop.reason == (
        "it rose. It came again after samples were left out at a lower learning rate and tighter clipping. "
        "Nothing milder is left: a person has to look. Tried on forks: One: it rose. Leaving samples out "
        "with clamps: it rose."
    )
    assert stop.numbers == {**trial.evidence(), "loss": 3.5, "rung": 5.0}
    milder = Ladder(section=GuardSection()).answer(
        replace(state, rung=Rung.SKIP, trial=replace(trial, rung=Rung.SKIP)), ANOMALY, LAST
    )
    assert isinstance(milder, Rewind) and (milder.to_step, milder.latest_step) == (3, 3)
    assert milder.skip.start == 30 and milder.numbers["rung"] == float(Rung.SLOW)


def test_verdicts_are_journalled_with_what_is_theirs() -> None:
    watch = Watch(judged_step=3, kind="spike", reason="up", numbers={"loss": math.inf})
    assert described(watch) == {
        "action": "watch", "reason": "up", "numbers": {"loss": "Infinity"}, "kind": "spike"
    }  # fmt: skip
    rewind = Rewind(judged_step=3, to_step=2, skip=range(5, 9), reason="back", rung=Rung.CLAMP)
    assert described(rewind) == {
        "action": "rewind", "reason": "back", "numbers": {}, "rung": "clamp", "to_step": 2, "skip": [5, 9]
    }  # fmt: skip
    stop = Stop(judged_step=3, reason="end", failed=True, numbers={"a": 1.0})
    assert described(stop) == {"action": "stop", "reason": "end", "numbers": {"a": 1.0}}


@pytest.mark.parametrize(
    ("changed", "left", "same", "kind"),
    [
        ({}, (6, 7), 5, None),
        ({"loss": 2.5}, (), 4, "other bits"),
        ({"loss": 2.5, "cursor": 51}, (6, 7), 4, None),  # on other samples
        ({"loss": 2.5, "peers": 2}, (6, 7), 4, None),  # with another peer
        ({"step": 6, "cursor": 60}, (7,), 5, None),
        ({"step": 4, "cursor": 50, "loss": 2.5}, (5, 6, 7), 4, None),
        ({"step": 8, "cursor": 80}, (), 4, None),
    ],
)
def test_a_step_that_is_made_again_is_compared_on_the_same_samples_alone(
    changed: dict[str, Any], left: tuple[int, ...], same: int, kind: str | None
) -> None:
    state = LadderState(rung=Rung.REPEAT, repeats=made(5, 6, 7), same=4)
    one = report(**{"step": 5, "loss": 2.0, "cursor": 50, **changed})
    after_it, shown = Ladder(section=GuardSection()).after_step(state, one, is_calm=False)
    assert (after_it.repeats, after_it.same) == (made(*left), same)
    assert [watch.kind for watch in shown if isinstance(watch, Watch)] == ([kind] if kind else [])
    if kind:
        assert shown[0].reason == (
            "step 5 was made again from the same state on the same samples, and its loss is 2.5 where it was "
            "2.0: the machine made a mistake then or now, or its kernels are not deterministic"
        )
        assert shown[0].numbers == {"loss": 2.5, "before": 2.0, "same_steps": 4.0}
