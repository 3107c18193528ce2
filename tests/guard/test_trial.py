"""Remedies on trial: what is adopted, what is discarded, from where the next one begins, and what is told."""

import json
import math

import pytest
from tests.guard.reports import BATCH, guards_of, judged, noisy, report

from bloomery.config.checkpoint import GuardSection
from bloomery.guard.judge import Guards, described
from bloomery.guard.ladder import ladder_from_json
from bloomery.guard.trial import ADOPTED, after_step, begin_trial, trial_from_json
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind, Rung, Stop, Watch

BASE, BAD, STEPS = 300, 401, 40
CALM = [report(step, loss) for step, loss in enumerate(noisy(BAD - 1), 1)]


class Run:
    """A run whose guards go back as a run would: to the histories that the checkpoint of step 300 holds."""

    def __init__(self, **settings: object) -> None:
        self.guards: Guards = guards_of(trial_steps=STEPS, **settings)
        judged(self.guards, CALM[:BASE])
        self.stored = self.guards.state_values()
        judged(self.guards, CALM[BASE:])

    def go_back(self, rung: Rung) -> None:
        before = self.guards.state_values()
        self.guards.load_state_values(self.stored)
        self.guards.rewound(before, rung=rung)
        self.stored = json.loads(json.dumps(self.guards.state_values()))  # it saves at once

    def steps(self, losses: list[float], first: int) -> list[Watch | Rewind | Stop]:
        """What is said of steps, until the run goes back or stops."""
        said = []
        for step, loss in enumerate(losses, first):
            verdict = judged(self.guards, [report(step, loss)])[0]
            if not isinstance(verdict, CarryOn):
                said.append(verdict)
            if isinstance(verdict, Rewind | Stop):
                break
        return said

    @property
    def trial(self):
        return ladder_from_json(self.guards.state_values()["ladder"]).trial


def spiked(**settings: object) -> tuple[Run, Rewind]:
    run = Run(**settings)
    (*_, rewind) = run.steps([3.5] * 30, BAD)
    assert isinstance(rewind, Rewind) and rewind.judged_step == BAD + 9
    run.go_back(rewind.rung)
    return run, rewind


def test_a_remedy_that_helps_is_adopted_with_its_evidence():
    run, _ = spiked(repeat=False)
    assert run.trial.rung is Rung.SKIP and run.trial.base_step == BASE
    assert (run.trial.problem_step, run.trial.last_step) == (BAD + 9, BAD + 9 + STEPS)
    (told,) = run.steps(noisy(200, seed=3), BASE + 1)
    assert isinstance(told, Watch) and told.kind == ADOPTED and told.judged_step == BAD + 9 + STEPS
    assert "tried on a fork of step 300" in told.reason and told.reason.endswith("it is adopted")
    assert told.numbers["steps_beyond"] == STEPS and abs(told.numbers["median"] - 2.5) < 0.02
    assert described(told)["numbers"]["limit"] == told.numbers["limit"] < 2.6
    assert run.trial is None and ladder_from_json(run.guards.state_values()["ladder"]).rung is Rung.SKIP


@pytest.mark.parametrize("end", [2.57, math.nan])
def test_a_remedy_after_which_the_loss_is_higher_than_before_is_discarded(end):
    """No guard finds anything there: the loss came down with the trial, and stayed a little too high."""
    run, first = spiked(repeat=False, not_finite_losses=0)
    losses = noisy(BAD + 9 - BASE, seed=3) + noisy(STEPS, seed=4, level=2.57, spread=0.001)
    losses = losses if end == 2.57 else [*losses[:-1], end]
    (*_, second) = run.steps(losses, BASE + 1)
    assert isinstance(second, Rewind) and second.rung is Rung.SLOW
    assert second.to_step == BASE == second.latest_step, "from the checkpoint that the fork began from"
    assert second.skip.start == BASE * BATCH == first.skip.start - BATCH * (first.to_step - BASE)
    assert "is discarded. The run goes back" in second.reason and "0.5 times the learning" in second.reason
    run.go_back(second.rung)
    assert run.trial.rung is Rung.SLOW and run.trial.last_step == BAD + 9 + STEPS, "as long as the first"


def test_a_problem_that_comes_again_ends_a_trial_at_once_and_the_last_names_all_that_were_tried():
    run, _ = spiked()
    rungs = [run.trial.rung]
    for seed in range(3):
        losses = [*noisy(BAD - BASE - 1, seed=seed), *[3.5] * 30]
        (*_, again) = run.steps(losses, BASE + 1)
        assert isinstance(again, Rewind) and again.to_step == BASE and again.judged_step == BAD + 9
        assert again.numbers["base_step"] == BASE and again.numbers["steps_beyond"] == 0
        run.go_back(again.rung)
        rungs.append(run.trial.rung)
    assert rungs == [Rung.REPEAT, Rung.SKIP, Rung.SLOW, Rung.CLAMP]
    (*_, stop) = run.steps([*noisy(BAD - BASE - 1, seed=9), *[3.5] * 30], BASE + 1)
    assert isinstance(stop, Stop) and "a person has to look. Tried on forks: Making the same" in stop.reason
    assert stop.reason.count("Leaving samples out") == 3


def test_a_trial_goes_on_after_a_restart_and_after_going_back_by_hand():
    run, _ = spiked(repeat=False)
    run.steps(noisy(BAD + 20 - BASE, seed=3), BASE + 1)
    resumed = guards_of(trial_steps=STEPS, repeat=False)
    resumed.load_state_values(json.loads(json.dumps(run.guards.state_values())))
    resumed.resumed()
    assert ladder_from_json(resumed.state_values()["ladder"]).trial == run.trial
    assert trial_from_json(run.trial.to_json()) == run.trial and len(run.trial.losses) == 11
    run.go_back(Rung.WATCH)
    assert run.trial is not None and run.trial.losses == ()


def test_nothing_is_on_trial_by_default_nor_after_a_rewind_that_is_no_remedy():
    run = Run()
    run.go_back(Rung.WATCH)
    assert run.trial is None and GuardSection().trial_steps == 0
    trial = begin_trial(Rung.SKIP, base_step=3, problem_step=5, steps=4, losses_before=[2.0, 2.1])
    assert trial.limit == math.inf, "too few losses to tell what is usual"
    kept = trial_from_json(json.loads(json.dumps(trial.to_json())))
    assert kept is not None and math.isnan(kept.usual) and kept.limit == math.inf


def test_the_checkpoint_that_a_trial_began_from_is_kept_for_it():
    (by_loss, _), (longer, _) = GuardSection().reach_steps, GuardSection(trial_steps=STEPS).reach_steps
    assert longer == by_loss + STEPS


def test_the_newest_held_out_loss_of_a_trial_is_among_its_evidence():
    run, _ = spiked(repeat=False)
    judged(run.guards, [report(BASE + 1, 2.5, held_out_loss=2.8), report(BASE + 2, 2.5, held_out_loss=2.7)])
    (told,) = run.steps(noisy(200, seed=3), BASE + 3)
    assert told.kind == ADOPTED and told.numbers["held_out"] == 2.7


@pytest.mark.parametrize(("loss", "kind"), [(2.5, Watch), (2.7, Anomaly)])
def test_the_end_of_a_trial_says_what_was_usual_and_by_which_numbers_it_was_judged(loss, kind):
    trial = begin_trial(Rung.SKIP, base_step=300, problem_step=302, steps=1, losses_before=noisy(96))
    for step in (301, 302):
        trial, none = after_step(trial, report(step, loss))
        assert none is None and trial.losses == ()
    _, end = after_step(trial, report(303, loss))
    assert isinstance(end, kind) and end.judged_step == 303
    assert f"(before the problem {trial.usual:.4f}, at most {trial.limit:.4f} is taken)" in end.reason
    assert end.numbers["median"] == loss and end.numbers["limit"] == trial.limit
    unknown = begin_trial(Rung.SKIP, base_step=0, problem_step=0, steps=1, losses_before=[])
    assert "before the problem" not in after_step(unknown, report(1, loss))[1].reason
