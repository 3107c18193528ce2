"""A part is offered once all ranks have measured it; steps that overlap the round do not wait for that."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from tests.diloco.recorder import Recorder
from tests.protocol import example

from bloomery.data.position import Position
from bloomery.diloco.outer_loop_state import AwaitingCommit, Idle, RoundState
from bloomery.diloco.part_offer import PartOffer
from bloomery.protocol.rank_messages import StartRound

START = StartRound(round=1, position=Position(), live=2, samples=(range(0, 8),), number=4)
UNMEASURED = example.ready(peer="a", round=1, norm=None, feedback=0.0, finite=False)
AWAITING = RoundState(averages_gradients=False, phase=AwaitingCommit(start=START, ready=UNMEASURED))
DEADLINE_S = 60.0


class Rank:
    """The offer of one rank, whose part is measured once that is allowed; `others` are the other ranks."""

    def __init__(self, *, squares: float = 9.0) -> None:
        self.calls, self.others = list[Any](), list[Any]()
        self.may_measure, self.squares = threading.Event(), squares
        update = Recorder("update", self.calls, offer=lambda round: self.measure)
        agent = Recorder("agent", self.calls)
        self.offer = PartOffer(update, agent, lambda value: [value, *self.others])  # type: ignore[arg-type]

    def measure(self) -> tuple[float, float]:
        assert self.may_measure.wait(DEADLINE_S)
        return self.squares, 4.0

    def told(self) -> list[Any]:
        return [call[2:] for call in self.calls if call[1] == "offer_part"]


def test_a_part_is_offered_once_it_is_measured_and_the_training_goes_on_until_then() -> None:
    rank = Rank()
    rank.offer.fix(1)
    rank.offer.send(AWAITING, number=4)
    assert rank.offer.sent_if_measured(AWAITING, waits=False) == AWAITING and rank.told() == []
    rank.may_measure.set()
    measured = rank.offer.sent_if_measured(AWAITING, waits=True)
    assert isinstance(measured.phase, AwaitingCommit)
    ready = measured.phase.ready
    assert (ready.norm, ready.feedback, ready.finite) == (3.0, 2.0, True)
    assert rank.told() == [(ready, {"number": 4})]
    assert rank.offer.sent_if_measured(measured, waits=True) == measured and len(rank.told()) == 1
    rank.offer.send(measured, number=5)  # the agent asks for it again
    assert rank.told()[1:] == [(ready, {"number": 5})]


@pytest.mark.parametrize(
    ("other", "norm", "feedback"), [(["16.0", "5.0"], 5.0, 3.0), (["inf", "0.0"], None, 0.0)]
)
def test_the_norm_is_that_of_all_ranks_and_none_is_offered_before_all_know_theirs(
    other: list[str], norm: float | None, feedback: float
) -> None:
    rank = Rank()
    rank.may_measure.set()
    rank.others = [None]
    rank.offer.fix(1)
    rank.offer.send(AWAITING, number=6)
    assert rank.offer.sent_if_measured(AWAITING, waits=True) == AWAITING and rank.told() == []
    rank.others = [other]
    phase = rank.offer.sent_if_measured(AWAITING, waits=True).phase
    assert isinstance(phase, AwaitingCommit)
    assert (phase.ready.norm, phase.ready.feedback, phase.ready.finite) == (norm, feedback, norm is not None)
    assert rank.told() == [(phase.ready, {"number": 6})]


def test_a_part_that_was_decided_without_this_peer_is_not_offered() -> None:
    rank = Rank()
    rank.offer.fix(1)
    rank.offer.send(AWAITING, number=4)
    decided = RoundState(averages_gradients=False, phase=Idle())
    assert rank.offer.sent_if_measured(decided, waits=True) == decided
    rank.may_measure.set()
    rank.squares = math.nan
    rank.offer.fix(2)
    phase = rank.offer.sent_if_measured(AWAITING, waits=True).phase
    assert isinstance(phase, AwaitingCommit) and not phase.ready.finite
    assert len(rank.told()) == 1


def test_what_goes_wrong_while_a_part_is_measured_ends_the_training() -> None:
    rank = Rank()
    rank.measure = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    rank.offer.fix(1)
    with pytest.raises(ZeroDivisionError):
        rank.offer.sent_if_measured(AWAITING, waits=True)
