"""The value that says how far a run is: its end, what it counts, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bloomery.data.position import Position
from bloomery.diloco.outer import UnderWay
from bloomery.guard.restraint import Restraint
from bloomery.train.state import Goal, TrainingOutcome, TrainState

STATE = TrainState(goal=Goal(samples=100), step=7, position=Position(consumed=99))


@pytest.mark.parametrize(
    ("goal", "step", "consumed", "is_reached"),
    [
        (Goal(), 10**9, 10**12, False),
        (Goal(samples=100), 10**9, 99, False),
        (Goal(samples=100), 0, 100, True),
        (Goal(samples=100), 0, 101, True),
        (Goal(steps=5), 4, 10**9, False),
        (Goal(steps=5), 5, 0, True),
        (Goal(samples=100, steps=5), 5, 0, True),
        (Goal(samples=100, steps=5), 0, 100, True),
        (Goal(samples=100, steps=5), 4, 99, False),
    ],
)
def test_a_goal_is_reached_by_either_figure(
    goal: Goal, step: int, consumed: int, *, is_reached: bool
) -> None:
    assert goal.is_reached(step=step, consumed=consumed) is is_reached


def test_a_restraint_ends_by_the_samples_of_all_peers_also_within_a_round() -> None:
    restraints = (Restraint(start=90, stop=120, rate=0.5, clip=1.0),)
    alone = replace(STATE, restraints=restraints)
    assert alone.restraint.rate == 0.5
    within = replace(alone, under_way=UnderWay(committed=90, live=3))  # 9 of its own: 27 of all
    assert within.restraint.rate == 0.5
    assert replace(within, position=Position(consumed=100)).restraint.rate == 1.0


def test_a_run_is_done_at_its_goal_or_when_it_was_told_to_stop_but_not_within_a_round() -> None:
    at_goal = replace(STATE, position=Position(consumed=100))
    assert not STATE.done and at_goal.done
    assert not replace(at_goal, under_way=UnderWay(committed=90, live=2)).done
    for reason, failed in (("control/stop", False), ("enough", True)):
        halted = STATE.halting(reason, failed=failed)
        assert halted.stopped == TrainingOutcome(reason=reason, step=7, finished=False, failed=failed)
        assert halted.done and replace(halted, under_way=UnderWay(committed=90, live=2)).done


def test_within_a_round_all_peers_are_taken_to_use_as_many_samples_as_this_one() -> None:
    assert STATE.consumed() == 99 and STATE.consumed(beyond=4) == 103
    among_three = replace(STATE, under_way=UnderWay(committed=90, live=3))
    assert among_three.consumed() == 90 + 3 * 9 and among_three.consumed(beyond=1) == 90 + 3 * 10


def test_a_step_consumes_its_samples_and_its_outcome_is_counted() -> None:
    after = STATE.after([range(99, 103)])
    assert (after.step, after.position.consumed) == (8, 103)
    refused = after.counting(applied=False, loss_is_nan=True).counting(applied=False, loss_is_nan=False)
    assert (refused.refused_updates, refused.refused_in_a_row, refused.nan_losses) == (2, 2, 1)
    applied = refused.counting(applied=True, loss_is_nan=False)
    assert (applied.refused_updates, applied.refused_in_a_row, applied.nan_losses) == (2, 0, 1)


def test_a_checkpoint_keeps_all_but_the_goal_and_the_stop() -> None:
    state = replace(STATE, refused_updates=5, refused_in_a_row=2, nan_losses=3)
    values = json.loads(json.dumps(state.halting("enough", failed=True).to_json()))
    goal = Goal(steps=3)
    assert TrainState.from_json(values, goal=goal) == replace(state, goal=goal)
    del values["restraints"]
    assert TrainState.from_json(values, goal=goal) == replace(state, goal=goal)
