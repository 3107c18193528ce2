"""When a peer has made its last step before it offers its part, or while its round is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.protocol import example

from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Position
from bloomery.diloco.outer_loop_state import AwaitingCommit, RoundState, TrainingRound
from bloomery.diloco.round_transition import is_last_step
from bloomery.guard.verdict import Rewind, Save
from bloomery.protocol.rank_messages import StartRound

SECTION = ElasticSection(inner_steps=6, fragments=2, overlap_steps=2)  # three steps a round, and two ahead
START = StartRound(round=1, position=Position(), live=2, samples=(range(20),), number=0)
TRAINING = TrainingRound(start=START)
AWAITING = AwaitingCommit(start=START, ready=example.ready(steps=3))


def is_last(phase: TrainingRound | AwaitingCommit, *, unused: int = 8, **fields: object) -> bool:
    state = RoundState(averages_gradients=False, phase=phase, **fields)  # type: ignore[arg-type]
    return is_last_step(state, SECTION, unused=unused, batch=4)


@pytest.mark.parametrize(("phase", "count"), [(TRAINING, 3), (AWAITING, 2)])
def test_a_round_and_what_is_made_ahead_of_the_next_have_the_steps_of_the_recipe(phase, count: int) -> None:
    assert [is_last(replace(phase, steps=steps)) for steps in range(count + 2)] == [False] * count + [
        True
    ] * 2


@pytest.mark.parametrize("phase", [TRAINING, AWAITING])
def test_no_step_follows_without_a_batch_of_samples_or_once_the_guards_want_to_go_back(phase) -> None:
    assert [is_last(phase, unused=unused) for unused in (0, 3, 4)] == [True, True, False]
    assert is_last(phase, wants=Rewind(judged_step=1, to_step=0, skip=range(0), reason="spike"))
    assert not is_last(phase, wants=Save(judged_step=1, reason="by the hour"))


def test_a_round_for_which_others_wait_ends_with_the_step_under_way() -> None:
    assert is_last(replace(TRAINING, is_flushed=True))


@pytest.mark.parametrize(
    ("steps", "is_asynchronous", "hurries"), [(2, True, True), (3, True, False), (2, False, False)]
)
def test_who_was_hurried_makes_no_steps_ahead_where_no_round_waits_for_anybody(
    steps: int, is_asynchronous: bool, hurries: bool
) -> None:
    hurried = replace(AWAITING, ready=example.ready(steps=steps))
    assert is_last(hurried, is_asynchronous=is_asynchronous) is hurries
