"""Whole decisions, where a peer waits, begins an attempt anew or has the run go back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from tests.coordination.test_decide import attempted, decided, outage
from tests.coordination.test_gathering import listed, offer, run
from tests.protocol import example

from bloomery.coordination.decide import FORGOTTEN, CommitRound, Propose, RequestFlush, Wait
from bloomery.coordination.eligibility import NORM_FAILURE, OVERSTATED
from bloomery.coordination.snapshot import ListedOffer, ListedShares, RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.records import RoundShares


def with_offer(snapshot: RunSnapshot, name: str, *, modified: int = 0, **fields: Any) -> RunSnapshot:
    """The snapshot with other fields of a member's offer. modified: 0: the revision of before."""
    before = snapshot.readies[name]
    ready = msgspec.structs.replace(before.ready, **fields)
    changed = replace(before, ready=ready, modified=modified or before.modified)
    return replace(snapshot, readies={**snapshot.readies, name: changed})


def test_the_first_member_by_name_begins_the_run_in_whatever_order_they_are_listed() -> None:
    members = {"c": listed("c", digest="y"), "b": listed("b", digest="x"), "a": listed("a", digest="")}
    found = decided(RunSnapshot(members=members), me="b", peers=3, now=60.0)
    assert isinstance(found, CommitRound) and found.commit.digest == "x"
    early = decided(RunSnapshot(members=members), me="b", peers=3, now=59.0)
    assert early == Wait(why="2 of 3 planned peers are here", until_s=60.0)
    assert isinstance(decided(RunSnapshot(members=members), me="b", peers=2, now=0.0), CommitRound)


def test_planned_peers_are_waited_for_since_the_fewest_that_the_run_needs_were_there() -> None:
    seen_s = {"a": 30.0, "b": 10.0, "c": 20.0}
    members = {name: replace(listed(name), seen_s=since_s) for name, since_s in seen_s.items()}
    for fewest, until_s in ((0, 70.0), (1, 70.0), (2, 80.0), (3, 90.0)):
        found = decided(RunSnapshot(members=members), peers=4, minimum_peers=fewest, now=until_s - 1.0)
        assert found == Wait(why="3 of 4 planned peers are here", until_s=until_s)


def test_a_round_that_waits_for_offers_says_for_whose_and_until_when() -> None:
    snapshot = replace(run("a", "b"), readies={"a": offer("a")})
    waiting = Wait(why="slow peers have not offered yet", whom=("b",), until_s=110.0)
    assert decided(snapshot, now=100.0) == waiting
    assert decided(snapshot, me="b", now=110.0) == RequestFlush(round=2)


def first_part(*, done: str) -> RunSnapshot:
    """Member 'c' had nothing when the attempt began, and offers samples by now."""
    snapshot = attempted(done=done)
    assert snapshot.tried is not None
    attempt = msgspec.structs.replace(snapshot.tried.attempt, weights=(0.0, 0.5, 0.5))
    tried = msgspec.structs.replace(snapshot.tried, attempt=attempt)
    return with_offer(replace(snapshot, tried=tried), "c", modified=9)


def test_a_member_that_brings_its_first_part_is_in_the_next_attempt_which_begins_at_once() -> None:
    for done in ("", "a", "abc"):
        found = decided(first_part(done=done))
        assert isinstance(found, Propose)
        attempt = found.tried.attempt
        assert (attempt.members, attempt.left_out) == (("a", "b", "c"), {})
        assert attempt.weights == (0.25, 0.25, 0.5)


def test_a_first_part_does_not_hide_that_the_result_of_another_member_differs() -> None:
    snapshot = first_part(done="abc")
    wrong = msgspec.structs.replace(snapshot.dones["b"], digest="another")
    found = decided(replace(snapshot, dones={**snapshot.dones, "b": wrong}))
    assert isinstance(found, Propose)
    assert found.tried.attempt.left_out == {"b": "its result differs"}


def test_the_strongest_remedy_is_taken_whoever_asks_for_it() -> None:
    snapshot = with_offer(replace(attempted(), tried=None), "a", rewind_to=1, rung=1, why="odd")
    found = decided(with_offer(snapshot, "b", rewind_to=1, rung=3, why="worse"))
    assert isinstance(found, CommitRound)
    assert (found.commit.rewind_to, found.commit.rung, found.commit.why) == (1, 3, "a: odd; b: worse")


def test_only_whose_part_can_be_averaged_is_suspected_of_too_small_a_norm() -> None:
    failures = tuple(example.failed(peer=name, round=2, epoch=5, kind=NORM_FAILURE) for name in "abc")
    snapshot = with_offer(attempted(failures=failures), "a", finite=False)
    found = decided(snapshot)
    assert isinstance(found, Propose)
    assert found.tried.attempt.left_out == {"a": "its part is not finite", "b": OVERSTATED}


def test_a_round_for_which_too_few_answer_waits_for_the_grace_and_names_who_does_not() -> None:
    snapshot = attempted(failed="ab")
    assert decided(snapshot, now=999.0, minimum_peers=3) == Wait(
        why="2 of 3 peers can take part, 3 are wanted", whom=("c",), until_s=999.0 + 60.0
    )
    found = decided(snapshot, now=999.0, minimum_peers=2)
    assert isinstance(found, Propose) and found.tried.attempt.members == ("a", "b")
    # Whose part cannot be averaged is here all the same.
    spoilt = with_offer(replace(attempted(), tried=None), "c", finite=False)
    found = decided(spoilt, minimum_peers=3)
    assert isinstance(found, Propose) and found.tried.attempt.left_out == {"c": "its part is not finite"}


def test_whoever_would_be_a_minority_waits_for_those_that_are_silent() -> None:
    waiting = decided(attempted(failed="a"), now=999.0, answer_s=0.7)
    assert waiting == Wait(
        why="1 of 3 peers can take part, 1 are wanted", whom=("c", "b"), until_s=999.0 + 60.0
    )


def test_a_pause_after_failures_is_over_at_its_moment() -> None:
    failures = tuple(example.failed(peer="a", round=2, epoch=epoch) for epoch in range(4))
    snapshot = attempted(failed="abc")
    snapshot = replace(snapshot, failures=(*failures, *snapshot.failures), failed_s=990.0)
    assert decided(snapshot, now=990.3) == Wait(why="attempts fail again and again", until_s=990.4)
    assert isinstance(decided(snapshot, now=990.4), Propose)


def test_a_run_that_goes_back_skips_what_it_skipped_since_and_what_others_ask_for() -> None:
    older = example.commit(round=1, digest="older", position=Position(consumed=4, skips=(range(90, 91),)))
    newest = example.commit(
        round=2, digest="newest", position=Position(consumed=9, skips=(range(90, 91), range(70, 72)))
    )
    snapshot = replace(attempted(), tried=None, commits={1: older, 2: newest}, epoch=5)
    assert snapshot.standing is not None
    shares = msgspec.structs.replace(snapshot.standing.shares, round=3)
    members = {name: listed(name, digest="newest", life=life) for life, name in enumerate("abc", start=4)}
    snapshot = replace(snapshot, standing=replace(snapshot.standing, shares=shares), members=members)
    snapshot = with_offer(snapshot, "b", rewind_to=1, skip=(range(50, 52),), why="spike", rung=2)
    snapshot = with_offer(snapshot, "c", skip=(range(60, 61),), rung=1)
    found = decided(snapshot)
    assert isinstance(found, CommitRound)
    skips = (range(50, 52), range(60, 61), range(70, 72), range(90, 91))
    assert found.commit == example.commit(
        round=3,
        epoch=5,
        members=(),
        digest="older",
        position=Position(consumed=4, skips=skips),
        sources=(),
        rewind_to=1,
        why="b: spike",
        rung=2,
    )
    assert found.lives == {"a": 4, "b": 5, "c": 6} and found.offers == {}
    assert found.shares.round == 4 and list(found.shares.shares) == ["a", "b", "c"]
    later = decided(replace(snapshot, changed_s=1000.0), me="c", stagger_s=0.5)
    assert later == Wait(why="another peer proposes", whom=("a", "b"), until_s=1001.0)


def test_what_a_member_keeps_after_its_steps_and_its_wish_to_save_go_into_the_commit() -> None:
    snapshot = with_offer(attempted(done="abc"), "b", kept=(range(12, 14),), wants_save=True)
    found = decided(snapshot, inner_steps=1)
    assert isinstance(found, CommitRound) and found.commit.save
    # One step of each is 4 samples: a's are what it left, b keeps two, c's come after.
    assert dict(found.shares.shares) == {
        "a": (range(4, 8),),
        "b": (range(12, 16),),
        "c": (range(20, 24),),
    }


def test_only_offers_of_members_that_are_listed_count() -> None:
    shares = RoundShares(round=2, position=Position(holes=(range(16),)), shares={"a": (range(8),)}, live=1)
    ready = example.ready(peer="z", round=2, spent=())
    stray = ListedOffer(ready=ready, modified=7, seen_s=1.0)
    snapshot = replace(
        run("a"),
        standing=ListedShares(shares=shares, modified=1),
        readies={"z": stray, "a": offer("a")},
    )
    found = decided(snapshot)
    assert isinstance(found, Propose) and found.tried.attempt.members == ("a",)
    assert found.offers == {"a": 1} and found.unseen == ()


def test_what_a_member_keeps_is_not_given_to_it_where_another_has_skipped_it() -> None:
    snapshot = with_offer(attempted(done="abc"), "b", kept=(range(12, 14),))
    found = decided(with_offer(snapshot, "a", skip=(range(12, 13),)), inner_steps=1)
    assert isinstance(found, CommitRound)
    shares = found.shares.shares
    assert 12 not in [index for pieces in shares.values() for piece in pieces for index in piece]
    assert 13 in shares["b"][0]


def test_who_was_not_in_an_asynchronous_round_keeps_its_share_but_for_what_another_has_skipped() -> None:
    snapshot = attempted(done="abc")
    assert snapshot.standing is not None
    shares = msgspec.structs.replace(
        snapshot.standing.shares,
        shares={**snapshot.standing.shares.shares, "d": (range(24, 32),)},
        position=Position(holes=(range(32),)),
        live=4,
    )
    members = {**snapshot.members, "d": listed("d")}
    snapshot = replace(snapshot, standing=replace(snapshot.standing, shares=shares), members=members)
    found = decided(with_offer(snapshot, "a", skip=(range(24, 26),)), quorum=3, inner_steps=2)
    assert isinstance(found, CommitRound)
    assert found.shares.shares["d"] == (range(26, 32), range(44, 46))


def test_of_several_that_hold_the_state_the_first_by_name_begins_the_run_and_brings_it_back() -> None:
    members = {name: listed(name, digest="x", life=life) for life, name in enumerate("ab", start=3)}
    beginning = RunSnapshot(members=members, changed_s=1000.0)
    later = decided(beginning, me="b", stagger_s=0.5)
    assert later == Wait(why="another peer proposes", whom=("a",), until_s=1000.5)
    first = decided(beginning, me="a", stagger_s=0.5)
    assert isinstance(first, CommitRound)
    assert first.commit.sources == ("a", "b") and first.lives == {"a": 3, "b": 4}
    assert first.commit.why == "the beginning" and first.commit.left_out == {}
    lost = outage(changed_s=1000.0)
    lost = replace(lost, members={**lost.members, "b": replace(lost.members["a"], life=4)})
    assert decided(lost, me="b", stagger_s=0.5) == later
    assert decided(lost, minimum_peers=3) == Wait(why="2 of at least 3 peers are here")
    back = decided(lost, me="a", stagger_s=0.5)
    assert isinstance(back, CommitRound) and back.lives == {"a": 1, "b": 4}
    assert back.commit.why == "nobody has the newest state any more"


def test_a_coordinator_that_lost_data_is_waited_for_whatever_else_there_is_to_do() -> None:
    over = example.commit(position=Position(consumed=1000))
    for snapshot in (RunSnapshot(), attempted(done="abc"), replace(run("a"), commits={1: over})):
        found = decided(replace(snapshot, forgotten=True, peers_ahead=("b", "c")))
        assert found == Wait(why=FORGOTTEN, whom=("b", "c"))
