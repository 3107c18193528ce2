"""When the ranks of a peer are started on a round, and what it offers and decides in it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.agent.agent_parts import LIMITS, SETTINGS, listed, run_at
from tests.agent.round_parts import KEYS, Driven, ring_of
from tests.protocol import example

from bloomery.agent import round_driver
from bloomery.coordination.decide import CommitRound, Propose, RequestFlush, TakeShare, Wait
from bloomery.coordination.etcd import TransactionResult
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.encoding import decode
from bloomery.protocol.keys import Keys
from bloomery.protocol.rank_messages import (
    FlushRound,
    Moving,
    RankReady,
    RankRingFailed,
    StartRound,
)
from bloomery.protocol.records import Ready


@pytest.fixture
def driven(monkeypatch) -> Driven:
    return Driven(monkeypatch)


NOTHING = Wait(why="nothing")


def started(driven: Driven, snapshot: RunSnapshot, decision: Any = NOTHING) -> list[Any]:
    driven.driver.start_round(snapshot, decision)
    return driven.told(StartRound)


def test_ranks_are_started_once_with_the_share_of_the_round(driven: Driven) -> None:
    snapshot = run_at(3, "d3", consumed=8)
    for rank in range(2):
        driven.hear(rank, Moving(activity="wait", step=1))
    assert started(driven, snapshot) == [], "what they hold is not known"
    driven.driver.held = (3, "another")
    assert started(driven, snapshot) == []
    driven.driver.held = (3, "d3")
    for not_yet in (
        replace(snapshot, commits={}),
        replace(snapshot, standing=None),
        replace(snapshot, members={"a": listed("a", incarnation="a0")}),
    ):
        assert started(driven, not_yet) == []
    assert started(driven, snapshot, TakeShare(round=4)) == []
    before = time.monotonic()
    assert (
        started(driven, snapshot)
        == started(driven, snapshot)
        == [
            StartRound(
                round=4,
                position=Position(consumed=8, holes=(range(8, 24),)),
                live=1,
                samples=(range(8, 24),),
                number=1,
            )
        ]
    )
    assert driven.events == [("go", {"round": 4, "newcomer": False})]
    due_s = driven.local.progress.next_deadline()
    assert due_s is not None and due_s >= before + LIMITS.step_s


def test_a_peer_without_a_share_waits_with_nothing_unless_it_may_join_within_the_round(monkeypatch) -> None:
    snapshot = run_at(3, "d3", share=False)
    driven = Driven(monkeypatch)
    driven.driver.held = (3, "d3")
    (told,) = started(driven, snapshot)
    assert told.samples == () and driven.events == [("go", {"round": 4, "newcomer": True})]
    joins = Driven(monkeypatch, rounds=replace(SETTINGS.rounds, joins_within=True))
    joins.driver.held = (3, "d3")
    assert started(joins, snapshot) == []
    assert len(started(joins, run_at(3, "d3"))) == 1
    # where no samples are left for it, it waits with nothing
    ends = Driven(monkeypatch, rounds=replace(SETTINGS.rounds, joins_within=True, total_samples=0))
    ends.driver.held = (3, "d3")
    assert [told.samples for told in started(ends, snapshot)] == [()]
    none = Driven(monkeypatch)
    none.driver.held = (3, "d3")
    assert snapshot.standing is not None
    nobody = msgspec.structs.replace(snapshot.standing.shares, live=0)
    assert started(none, replace(snapshot, standing=replace(snapshot.standing, shares=nobody))) == []


def test_a_peer_whose_share_is_empty_is_no_newcomer(driven: Driven) -> None:
    driven.driver.held = (3, "d3")
    snapshot = run_at(3, "d3")
    assert snapshot.standing is not None
    empty = msgspec.structs.replace(snapshot.standing.shares, shares={"a": ()})
    started(driven, replace(snapshot, standing=replace(snapshot.standing, shares=empty)))
    assert driven.events == [("go", {"round": 4, "newcomer": False})]


def test_ranks_that_get_a_share_later_offer_again_and_those_that_are_listed_anew_do_not(
    driven: Driven,
) -> None:
    driven.driver.held = (3, "d3")
    without, with_share = run_at(3, "d3", share=False), run_at(3, "d3")
    started(driven, without)
    driven.offer(tokens=0, spent=())
    driven.driver.offer(without)
    assert driven.writer.jobs == ["ready"]
    assert len(started(driven, with_share)) == 2
    assert driven.local.ready is None
    driven.driver.offer(with_share)
    driven.offer(tokens=16)
    driven.driver.offer(with_share)
    assert [decode(text, Ready).tokens for _, text, _ in driven.listing.offered] == [0, 16]
    assert [event for event, _ in driven.events] == ["go"]
    driven.registration.unlist()
    driven.registration.publish(example.member(peer="a", incarnation="a1"), after=0)
    assert len(started(driven, with_share)) == 3
    driven.offer(tokens=16)  # at once, since its share is the same
    driven.driver.offer(with_share)
    assert len(driven.listing.offered) == 3, "the offer went with the lease"


def test_what_the_ranks_offered_before_they_read_of_their_share_is_not_published(driven: Driven) -> None:
    driven.driver.held = (3, "d3")
    started(driven, run_at(3, "d3", share=False))
    started(driven, run_at(3, "d3"))
    for rank in range(2):
        driven.hear(rank, RankReady(ready=example.ready(round=4, tokens=0, spent=()), number=1))
    driven.driver.offer(run_at(3, "d3"))
    assert driven.listing.offered == []
    driven.offer(tokens=16)
    driven.driver.offer(run_at(3, "d3"))
    assert [decode(text, Ready).tokens for _, text, _ in driven.listing.offered] == [16]


def test_a_share_that_comes_during_an_attempt_is_begun_once_the_attempt_is_over(driven: Driven) -> None:
    driven.driver.held = (3, "d3")
    shares, attempt = run_at(3, "d3"), ring_of(driven)
    started(driven, run_at(3, "d3", share=False))
    driven.offer(tokens=0, spent=())
    driven.driver.ring(attempt)
    assert driven.driver.is_ringing
    assert len(started(driven, shares)) == 1, "its part may be committed"
    driven.hear(0, RankRingFailed(epoch=6, kind="stalled", culprit=None, why="a test"))
    driven.driver.ring(attempt)
    told = started(driven, shares)
    assert [start.samples for start in told] == [(), (range(0, 16),)]


def test_a_part_is_offered_once_with_what_the_coordinator_takes_to_answer(driven: Driven) -> None:
    snapshot = run_at(3, "d3")
    driven.driver.offer(snapshot)
    ready = driven.offer(norm=2.0)
    driven.driver.offer(run_at(2, "d2"))  # of another round
    driven.driver.offer(replace(snapshot, members={}))
    assert driven.listing.offered == []
    for _ in range(2):
        driven.driver.offer(snapshot)
    ((key, text, round),) = driven.listing.offered
    assert (key, round) == (KEYS.ready(4, "a"), 4)
    assert decode(text, Ready) == msgspec.structs.replace(ready, coordinator_s=0.25)


@pytest.mark.parametrize(("overlaps", "step_s"), [(True, 1.5), (False, 0.0)])
def test_with_overlapped_steps_alone_a_part_says_how_long_a_step_takes(monkeypatch, overlaps, step_s) -> None:
    driven = Driven(monkeypatch, overlaps=overlaps)
    driven.local.progress.usual_step_s = lambda: 1.5  # type: ignore[method-assign]
    driven.offer()
    driven.driver.offer(run_at(3, "d3"))
    assert decode(driven.listing.offered[0][1], Ready).step_s == step_s


def test_ranks_that_are_started_again_after_a_stop_offer_again(driven: Driven) -> None:
    driven.driver.held, snapshot = (3, "d3"), run_at(3, "d3")
    for count in (1, 2):
        assert len(started(driven, snapshot)) == count
        driven.offer(tokens=16)
        driven.driver.offer(snapshot)
        assert len(driven.listing.offered) == count
        driven.driver.stop()


def test_the_journal_tells_of_the_start_of_each_round(driven: Driven) -> None:
    driven.driver.seen = 3
    for round in (3, 4):
        driven.driver.follow(run_at(round, f"d{round}"))
        driven.driver.held = (round, f"d{round}")
        started(driven, run_at(round, f"d{round}"))
    assert [fields["round"] for event, fields in driven.events if event == "go"] == [4, 5]


def test_a_peer_that_others_wait_for_has_its_ranks_offer_once_a_round(driven: Driven) -> None:
    for round in (4, 4, 5):
        driven.driver.carry_out(RequestFlush(round=round), run_at(3, "d3"), now=1.0)
    assert driven.ranks.sent == [(None, FlushRound(round=4)), (None, FlushRound(round=5))]
    assert driven.writer.jobs == []


@pytest.fixture
def written(monkeypatch) -> list[Any]:
    """What was asked of the coordinator: which transaction, with what."""
    asked: list[Any] = []

    def note(name: str) -> Any:
        def asked_for(etcd: Any, keys: Keys, *what: Any, **how: Any) -> TransactionResult:
            assert (etcd, keys) == ("etcd", KEYS)
            asked.append((name, *what, how) if how else (name, *what))
            return TransactionResult.REFUSED

        return asked_for

    for name in ("propose", "commit_round", "join_shares"):
        monkeypatch.setattr(round_driver.transactions, name, note(name))
    return asked


def test_a_decision_is_carried_out_once_for_a_snapshot_and_again_after_half_a_second(
    driven: Driven, written: list[Any], caplog
) -> None:
    caplog.set_level("INFO")
    snapshot = run_at(3, "d3", version=7)
    found = Propose(tried=None, offers={})  # type: ignore[arg-type]
    for now, count in ((10.0, 1), (10.49, 1), (10.5, 2), (10.9, 2)):
        driven.driver.carry_out(found, snapshot, now=now)
        assert written == [("propose", snapshot, found)] * count
    later = replace(snapshot, version=8)
    driven.driver.carry_out(found, later, now=10.91)
    assert written[2:] == [("propose", later, found)]
    driven.driver.carry_out(NOTHING, later, now=99.0)
    driven.writer.busy.add("decision")
    driven.driver.carry_out(found, later, now=99.0)
    assert len(written) == 3 and driven.writer.jobs == ["decision once"] * 3
    assert caplog.messages == ["propose: a condition did not hold"] * 3


def test_each_decision_is_written_by_its_own_transaction(driven: Driven, written: list[Any]) -> None:
    snapshot = run_at(3, "d3", members={"a": listed("a", life=9, samples=6)})
    found = CommitRound(commit=example.commit(), shares=None)  # type: ignore[arg-type]
    driven.driver.carry_out(found, snapshot, now=1.0)
    driven.driver.carry_out(TakeShare(round=4, away=frozenset("b")), snapshot, now=2.0)
    how = {"round": 4, "peer": "a", "life": 9, "samples": 6, "settings": SETTINGS.rounds}
    how |= {"away": frozenset("b")}
    assert written == [("commit_round", snapshot, found), ("join_shares", how)]
