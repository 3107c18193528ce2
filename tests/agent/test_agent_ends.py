"""How a peer's part in its run ends: with the run, by its own ranks, or by an error."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from tests.agent.agent_parts import LIMITS, SETTINGS, Led, listed, run_at
from tests.protocol import example

from bloomery.agent.agent import PeerOutcome, _RanksEnded
from bloomery.agent.rank_server import RankGone
from bloomery.coordination.decide import Ended
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import CoordinatorError
from bloomery.protocol.rank_messages import (
    RankLeaves,
    StopTraining,
)


@pytest.fixture
def led(monkeypatch) -> Led:
    return Led(monkeypatch, SETTINGS)


def test_a_peer_with_another_number_of_ranks_than_one_listed_before_ends_and_names_that_number(
    led: Led,
) -> None:
    led.begin(world=2)
    members = {"a": listed("a", life=5), "b": listed("b", life=6, ranks=8), "c": listed("c", life=2, ranks=2)}
    led.step(RunSnapshot(members=members))
    assert led.agent._ending is None
    assert led.pool_kept == [{("a", "a1"), ("b", "b1"), ("c", "c1")}]
    changed = {**members, "c": listed("c", life=2, ranks=4)}
    led.step(RunSnapshot(members=changed))
    assert led.agent._ending is None, "what a member writes later ends nobody"
    led.step(RunSnapshot(members={**changed, "a": listed("a", life=7), "b": listed("b", life=8, ranks=8)}))
    assert led.agent._ending == PeerOutcome(
        why="'c', who was listed before, has 4 ranks: use --nproc 4", failed=True
    )
    assert led.ranks.sent[-1] == (None, StopTraining(why=led.agent._ending.why, failed=True))


@pytest.mark.parametrize(("why", "told"), [("enough", "enough"), ("", "the samples are done")])
def test_a_peer_ends_with_the_commit_that_ends_the_run_once_its_ranks_know_of_it(
    led: Led, why: str, told: str
) -> None:
    led.begin(round=3, digest="d3")
    snapshot = run_at(3, "d3", consumed=1000)
    final = example.commit(round=3, digest="d3", why=why, position=Position(consumed=1000))
    led.step(replace(snapshot, commits={3: final}))
    assert led.agent._ending == PeerOutcome(why=told, failed=False)
    assert led.ranks.sent[-1] == (None, StopTraining(why=told, failed=False))
    other: Any = led.agent
    other._ending = None
    unseen = Ended(commit=example.commit(round=4, digest="d4"))
    other._take_part(snapshot, unseen, 0.0)
    assert other._ending is None


def test_a_rank_that_leaves_ends_its_peer_which_is_unlisted_first(led: Led) -> None:
    led.begin(round=3, digest="d3")
    led.step(run_at(3, "d3"))
    led.hear(1, RankLeaves(why="SIGTERM"))
    assert led.agent._ending == PeerOutcome(why="SIGTERM", failed=False)
    assert led.events[-1] == ("leave", {"round": 3, "why": "SIGTERM"}) and led.listing.withdrawn == 1
    listings = len(led.listing.listed)
    assert led.step(run_at(4, "d4"), now=10.0) == 11.0
    assert len(led.listing.listed) == listings, "a peer that ends is not listed again"


def test_an_error_of_the_coordinator_ends_a_peer_with_its_message_and_the_first_reason_stays(
    led: Led,
) -> None:
    led.agent._take(CoordinatorError("no such right", remedy="ask"))
    led.agent._take(CoordinatorError("another"))
    assert led.agent._ending == PeerOutcome(why="no such right", failed=True)
    assert led.agent._is_over(), "no rank has come that could end"


@pytest.mark.parametrize("failed", [False, True])
def test_a_peer_whose_ranks_have_all_ended_is_over_at_once(led: Led, failed: bool) -> None:
    led.begin(round=3, digest="d3")
    led.step(run_at(3, "d3"))
    assert not led.agent._is_over()
    led.agent._take(_RanksEnded(failed=failed))
    assert led.agent._ending == PeerOutcome(why="its ranks have ended", failed=failed)
    assert led.agent._is_over() and led.listing.withdrawn == 1


def test_an_ending_peer_is_over_once_its_ranks_are_gone_or_the_time_for_that_is(led: Led) -> None:
    led.begin(world=2)
    led.agent._end("enough", failed=False)
    assert not led.agent._is_over()
    led.agent._take(RankGone(rank=0, why="it ended"))
    assert not led.agent._is_over()
    led.agent._ending_s = time.monotonic() - LIMITS.ending_s - 1.0
    assert led.agent._is_over()
    led.agent._ending_s = time.monotonic()
    led.agent._take(RankGone(rank=1, why="it ended"))
    assert led.agent._is_over()


def test_the_run_of_an_agent_ends_with_the_outcome_and_all_of_its_parts_closed(led: Led, monkeypatch) -> None:
    led.view.snapshot = newest = RunSnapshot(version=12)
    looks: list[RunSnapshot] = []
    agent: Any = led.agent
    agent._step = lambda snapshot, now: (looks.append(snapshot), now)[1]
    moments, costs = iter([5.0, 5.25]), list[float]()
    monkeypatch.setattr(time, "thread_time", lambda: next(moments))
    led.listener.note_cost = costs.append
    led.agent.ranks_ended(failed=True)
    assert led.agent.run() == PeerOutcome(why="its ranks have ended", failed=True)
    assert led.notes == [
        ("ranks gone?", 2.0),
        ("listener started", 12),
        "listener closed",
        ("writer closed", LIMITS.coordinator_s),
        "ranks closed",
        "view closed",
    ]
    assert looks == [newest] and looks[0] is newest
    assert costs == [0.25], "the time of a core that the look took"


def test_what_the_ranks_said_last_is_taken_before_their_end(led: Led) -> None:
    agent: Any = led.agent
    led.ranks.wait_until_gone = lambda seconds: agent._mailbox.put("last words")
    led.agent.ranks_ended(failed=False)
    assert [agent._mailbox.get_nowait() for _ in range(2)] == ["last words", _RanksEnded(failed=False)]


def test_a_listed_peer_that_an_error_ends_leaves_the_list_with_its_agent(led: Led) -> None:
    led.agent._registration.publish(listed("a").member, after=0)
    led.agent._mailbox.put(CoordinatorError("no such right"))
    assert led.agent.run() == PeerOutcome(why="no such right", failed=True)
    assert led.listing.withdrawn == 1


@pytest.mark.parametrize(("consumed", "is_finished"), [(999, False), (1000, True)])
def test_a_run_is_finished_with_its_last_sample(led: Led, consumed: int, is_finished: bool) -> None:
    assert not led.agent._is_finished()
    led.view.snapshot = run_at(3, "d3", consumed=consumed)
    assert led.agent._is_finished() is is_finished
