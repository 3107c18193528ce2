"""Which commits are refused, of a run that is followed and of one just listed; and with what words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.coordination.test_commits import ONE, THREE, TWO, holding
from tests.coordination.test_decide import attempted
from tests.coordination.test_gathering import listed, offer, run
from tests.protocol import example

from bloomery.coordination import commits
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.records import Done, ProposedAttempt


def done(name: str, digest: str = "next") -> Done:
    return Done(peer=name, round=2, epoch=5, digest=digest)


def listing(**changed: Any) -> RunSnapshot:
    """A listing with an attempt of 'a' and 'b', of which both announced 'next'."""
    attempt = example.attempt(round=2, epoch=5, members=("a", "b"), weights=(0.5, 0.5))
    tried = ProposedAttempt(attempt=attempt, lives=(1, 1), offers=(1, 1))
    usual = dict(tried=tried, dones={name: done(name) for name in "ab"})
    return replace(run("a", "b"), **usual | changed)


COMMIT = example.commit(round=2, epoch=5, members=("a", "b"), digest="next")


def test_a_listed_commit_is_checked_against_what_its_members_that_are_still_listed_announced() -> None:
    other = {"a": done("a"), "b": done("b", "another")}
    refused = "'b' has not announced the state 'next'"
    assert commits.objection_of_listing(COMMIT, listing()) == ""
    assert commits.objection_of_listing(COMMIT, listing(dones=other)) == refused
    assert commits.objection_of_listing(COMMIT, listing(dones={"a": done("a")})) == refused
    assert commits.objection_of_listing(COMMIT, listing(tried=None, dones={})) == ""
    assert commits.objection_of_listing(msgspec.structs.replace(COMMIT, epoch=6), listing(dones={})) == ""
    gone = listing(dones={"a": done("a")})
    assert commits.objection_of_listing(COMMIT, gone.without("b")) == ""
    anew = replace(gone, members={**gone.members, "b": listed("b", life=9)})
    assert commits.objection_of_listing(COMMIT, anew) == ""


def averaged(snapshot: RunSnapshot, *names: str) -> Any:
    readies = [snapshot.readies[name].ready for name in names]
    assert snapshot.standing is not None
    position = commits.position_after(snapshot.standing.shares.position, readies)
    return example.commit(round=2, epoch=5, members=names, digest="next", position=position)


def test_a_commit_of_an_average_is_refused_with_the_first_thing_that_is_wrong_with_it() -> None:
    before = attempted(done="abc")
    right = averaged(before, "a", "b", "c")
    assert commits.objection(right, before) == ""
    shifted = msgspec.structs.replace(right, position=Position(consumed=13, holes=right.position.holes))
    for commit, snapshot, why in (
        (right, replace(before, tried=None), "no attempt of epoch 5 is under way"),
        (msgspec.structs.replace(right, epoch=6), before, "no attempt of epoch 6 is under way"),
        (
            msgspec.structs.replace(right, digest="0123456789abcdef"),
            before,
            "'c' has not announced the state '0123456789ab'",
        ),
        (right, attempted(done="ab"), "'c' has not announced the state 'next'"),
        (right, replace(before, standing=None), "it names members that brought nothing"),
        (shifted, before, "its position does not follow from what its members spent"),
        (msgspec.structs.replace(right, round=1), before, "it is of round 1, and round 2 is under way"),
        (example.commit(round=2, members=()), before, "it averages nothing and goes back nowhere"),
    ):
        assert commits.objection(commit, snapshot) == why


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.5, 0.5, 0.5)])
def test_an_attempt_that_weighs_a_part_by_other_than_its_tokens_leads_to_no_commit(
    weights: tuple[float, ...],
) -> None:
    before = attempted(done="abc")
    assert before.tried is not None
    unfair = msgspec.structs.replace(before.tried.attempt, weights=weights)
    tried = msgspec.structs.replace(before.tried, attempt=unfair)
    refused = "its weights are not those of its members' tokens"
    assert commits.objection(averaged(before, "a", "b", "c"), replace(before, tried=tried)) == refused


def test_a_commit_of_a_minority_is_refused_by_the_offers_that_came_before_its_attempt() -> None:
    before = attempted(done="abc")
    assert before.tried is not None
    attempt = msgspec.structs.replace(before.tried.attempt, members=("a",), weights=(1.0,))
    tried = msgspec.structs.replace(before.tried, attempt=attempt, lives=(1,), offers=(1,))
    alone = replace(before, tried=tried)
    refused = "its members are fewer than half of those that could take part"
    assert commits.objection(averaged(alone, "a"), alone) == refused
    later = {**alone.readies, **{name: replace(alone.readies[name], modified=9) for name in "bc"}}
    early = replace(alone, readies=later)
    assert commits.objection(averaged(early, "a"), early) == ""


def test_a_rung_is_one_that_somebody_asked_for() -> None:
    low, high = (
        replace(offer(name), ready=example.ready(peer=name, rung=rung)) for name, rung in (("a", 1), ("b", 2))
    )
    snapshot = replace(holding(a="x"), readies={"a": low, "b": high}, standing=None)
    back = example.commit(round=4, members=(), digest="x", rewind_to=1, rung=2, position=Position(consumed=1))
    assert commits.objection(back, snapshot) == ""
    assert commits.objection(back, replace(snapshot, readies={})) == "nobody asked for its rung 2"
    one = msgspec.structs.replace(back, rung=1)
    assert commits.objection(one, replace(snapshot, readies={})) == "nobody asked for its rung 1"


def test_of_several_holders_of_a_forgotten_round_the_first_by_name_is_believed() -> None:
    records = {
        name: example.recovery_record(held=example.commit(round=8, digest=f"of {name}"))
        for name in ("b", "a")
    }
    snapshot = replace(
        holding(a="x", b="y", c="z"), recovery_records={**records, "c": example.recovery_record()}
    )
    assert commits.known_commits(snapshot) == {1: ONE, 2: TWO, 3: THREE, 8: records["a"].held}


@pytest.mark.parametrize("members", ["", "a"])
def test_where_shares_are_not_known_nobody_is_a_minority(members: str) -> None:
    assert not commits.is_minority(members, replace(run("a", "b"), standing=None, readies={"a": offer("a")}))
