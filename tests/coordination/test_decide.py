"""What one peer decides from one snapshot, where a whole run seldom comes to it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.coordination.test_gathering import SETTINGS, listed, offer, run
from tests.protocol import example

from bloomery.coordination.decide import CommitRound, Ended, Propose, TakeShare, Wait, decide
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.records import Done, ProposedAttempt


def decided(snapshot, *, me="a", now=1000.0, start=None, **changed):
    return decide(snapshot, me=me, settings=replace(SETTINGS, **changed), now=now, start=start)


def test_a_run_begins_where_the_state_of_its_first_member_stands():
    snapshot = RunSnapshot(members={"b": listed("b", digest="x"), "c": listed("c", digest="y")}, epoch=3)
    start = Position(consumed=40)
    found = decided(snapshot, me="b", start=start)
    assert isinstance(found, CommitRound)
    assert (found.commit.position, found.commit.digest, found.commit.sources) == (start, "x", ("b",))
    assert (found.commit.round, found.commit.epoch, found.shares.round) == (0, 3, 1)
    assert dict(found.lives) == {"b": 1} and set(found.shares.shares) == {"b"}
    assert decided(snapshot, me="b").commit.position == Position()
    other = decided(snapshot, me="c", start=start)
    assert isinstance(other, Wait) and other.whom == ("b",) and "another peer's state" in other.why


def test_members_that_hold_nothing_yet_do_not_begin_a_run():
    snapshot = RunSnapshot(members={"a": listed("a", digest=""), "b": listed("b", digest="x")})
    found = decided(snapshot, me="b", minimum_peers=2)
    assert isinstance(found, Wait) and "1 of at least 2" in found.why
    assert decided(snapshot, me="b").commit.digest == "x"


def test_a_run_is_over_with_its_last_sample():
    commit = example.commit(position=Position(consumed=1000))
    assert decided(replace(run("a"), commits={1: commit})) == Ended(commit=commit)
    more = example.commit(position=Position(consumed=999))
    assert not isinstance(decided(replace(run("a"), commits={1: more})), Ended)


def test_a_peer_that_is_not_listed_decides_nothing():
    found = decided(run("b"), me="a")
    assert isinstance(found, Wait) and found.whom == ("a",)


MEMBERS = ("c", "a", "b")


def attempted(*, done=(), failed=(), **changed):
    """An attempt of three members in round 2, of which some are done and some have failed."""
    attempt = example.attempt(round=2, epoch=5, members=MEMBERS, weights=(0.5, 0.25, 0.25))
    tried = ProposedAttempt(attempt=attempt, lives=(1, 1, 1), offers=(3, 1, 2))
    tokens, modified = {"c": 16, "a": 8, "b": 8}, {"c": 3, "a": 1, "b": 2}
    snapshot = replace(
        run("a", "b", "c"),
        epoch=5,
        tried=tried,
        tried_revision=9,
        readies={name: replace(offer(name, tokens=tokens[name]), modified=modified[name]) for name in "abc"},
        dones={name: Done(peer=name, round=2, epoch=5, digest="next") for name in done},
        failures=tuple(example.failed(peer=name, round=2, epoch=5) for name in failed),
        failed_s=990.0,
    )
    shares = {name: (range(8 * place, 8 * place + 8),) for place, name in enumerate("abc")}
    position = Position(holes=(range(24),))
    record = msgspec.structs.replace(snapshot.standing.shares, shares=shares, position=position)
    readies = {
        name: replace(
            snapshot.readies[name],
            ready=msgspec.structs.replace(snapshot.readies[name].ready, spent=(shares[name][0][:4],)),
        )
        for name in "abc"
    }
    snapshot = replace(snapshot, standing=replace(snapshot.standing, shares=record), readies=readies)
    return replace(snapshot, **changed)


def test_a_round_is_concluded_with_what_its_members_announced():
    found = decided(attempted(done="abc"))
    assert isinstance(found, CommitRound)
    commit = found.commit
    assert (commit.round, commit.epoch, commit.digest) == (2, 5, "next")
    assert commit.members == commit.sources == ("a", "b", "c")
    assert commit.position == Position(consumed=12, holes=(range(4, 8), range(12, 16), range(20, 24)))
    assert commit.why == "" and not commit.save and commit.rewind_to is None
    assert found.shares.round == 3 and dict(found.offers) == {"a": 1, "b": 2, "c": 3}
    last = decided(attempted(done="abc"), total_samples=12)
    assert last.commit.why == "the samples are done" and last.shares.shares == {}


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_one_member_that_asks_for_a_save_has_all_save(who):
    snapshot = attempted(done="abc")
    asked = msgspec.structs.replace(snapshot.readies[who].ready, wants_save=True)
    readies = {**snapshot.readies, who: replace(snapshot.readies[who], ready=asked)}
    assert decided(replace(snapshot, readies=readies)).commit.save


def test_only_results_of_all_members_conclude_a_round_and_the_first_by_name_does_so():
    waiting = decided(attempted(done="ab"))
    assert isinstance(waiting, Wait) and waiting.whom == ("c",)
    snapshot = attempted(done="abc", changed_s=999.9)
    assert isinstance(decided(snapshot), CommitRound)
    second = decided(snapshot, me="b", stagger_s=0.5)
    assert isinstance(second, Wait) and second.whom == ("a",)
    assert second.until_s == pytest.approx(1000.4)
    third = decided(snapshot, me="c", stagger_s=0.5)
    assert third.until_s == pytest.approx(1000.9) and third.whom == ("a", "b")
    assert isinstance(decided(snapshot, me="c", now=1000.9, stagger_s=0.5), CommitRound)


def test_weights_that_are_not_those_of_the_members_tokens_are_not_concluded():
    snapshot = attempted(done="abc")
    more = msgspec.structs.replace(snapshot.readies["a"].ready, tokens=9)
    readies = {**snapshot.readies, "a": replace(snapshot.readies["a"], ready=more)}
    found = decided(replace(snapshot, readies=readies))
    assert isinstance(found, Propose)
    attempt = found.tried.attempt
    weights = dict(zip(attempt.members, attempt.weights, strict=True))
    assert weights == pytest.approx({"a": 9 / 33, "b": 8 / 33, "c": 16 / 33})
    assert attempt.epoch == 6


def test_who_does_not_answer_that_an_attempt_failed_is_left_out_unless_a_member_is_gone():
    snapshot = attempted(failed="a", done="b")
    waiting = decided(snapshot, now=990.5, answer_s=0.7)
    assert isinstance(waiting, Wait) and waiting.whom == ("c",)
    assert waiting.until_s == pytest.approx(990.7)
    found = decided(snapshot, now=990.7, answer_s=0.7)
    assert isinstance(found, Propose) and found.tried.attempt.members == ("a", "b")
    assert list(found.tried.attempt.left_out) == ["c"]
    gone = snapshot.without("b")
    found = decided(gone, now=990.1, answer_s=0.7)
    assert isinstance(found, Propose) and found.tried.attempt.members == ("a", "c")
    assert found.tried.attempt.left_out == {}


def test_a_failure_of_an_earlier_attempt_is_none_of_this_one():
    earlier = (example.failed(peer="a", round=2, epoch=4),)
    found = decided(replace(attempted(done="ab"), failures=earlier))
    assert isinstance(found, Wait) and "being reduced" in found.why


def test_a_member_that_came_back_is_another_one_than_that_of_the_attempt():
    snapshot = attempted(done="ab")
    again = replace(snapshot, members={**snapshot.members, "c": listed("c", life=44)})
    found = decided(again)
    assert isinstance(found, Propose) and found.tried.lives == (1, 1, 44)


def test_attempts_that_fail_again_and_again_pause():
    failures = tuple(example.failed(peer=name, round=2, epoch=epoch) for epoch in range(5) for name in "abc")
    snapshot = attempted(failed="abc")
    snapshot = replace(snapshot, failures=(*failures, *snapshot.failures))
    waiting = decided(snapshot, now=990.1)
    assert isinstance(waiting, Wait) and waiting.until_s == pytest.approx(990.8)
    assert isinstance(decided(snapshot, now=990.9), Propose)


def test_a_proposal_rests_on_the_offers_and_on_those_who_have_offered_nothing():
    snapshot = replace(
        run("a", "b", "c"), epoch=7, readies={"a": replace(offer("a"), modified=31), "b": offer("b")}
    )
    found = decided(snapshot, now=1000.0)
    assert isinstance(found, Propose)
    assert dict(found.offers) == {"a": 31, "b": 1} and found.unseen == ("c",)
    assert found.tried.offers == (31, 1) and found.tried.lives == (1, 1)
    assert (found.tried.attempt.round, found.tried.attempt.epoch) == (2, 8)


def test_a_newcomer_without_a_share_takes_one_where_nobody_has_tokens():
    snapshot = run("n", without_share=("n",))
    snapshot = replace(snapshot, readies={"n": offer("n", tokens=0)})
    assert isinstance(decided(snapshot, me="n"), TakeShare)


def outage(*, digest="older", modified=20, said_s=900.0, **changed):
    """Nobody holds the newest state; 'a' holds that of an older commit."""
    older = example.commit(round=1, digest="older", position=Position(consumed=10, skips=(range(3, 5),)))
    newest = example.commit(round=2, digest="newest", position=Position(consumed=20, skips=(range(33, 36),)))
    member = replace(listed("a", digest=digest), modified=modified, said_s=said_s)
    snapshot = replace(
        run("b"),
        members={"a": member},
        commits={1: older, 2: newest},
        commit_revision=10,
        committed_s=880.0,
        standing=None,
    )
    return replace(snapshot, **changed)


def test_after_an_outage_the_grace_counts_from_the_last_that_was_heard_and_skips_stay():
    waiting = decided(outage(), now=959.0)
    assert isinstance(waiting, Wait) and waiting.until_s == pytest.approx(960.0)
    assert decided(outage(committed_s=930.0), now=959.0).until_s == pytest.approx(990.0)
    found = decided(outage(), now=960.0)
    assert isinstance(found, CommitRound)
    assert (found.commit.round, found.commit.rewind_to, found.commit.digest) == (3, 1, "older")
    assert found.commit.position == Position(consumed=10, skips=(range(3, 5), range(33, 36)))
    assert dict(found.lives) == {"a": 1} and list(found.shares.shares) == ["a"]


def test_a_member_that_has_not_said_what_it_holds_since_the_commit_is_waited_for():
    assert decided(outage(modified=11), now=960.0).commit.rewind_to == 1
    for busy in (outage(modified=10), outage(digest="")):
        waiting = decided(busy, now=99_999.0)
        assert isinstance(waiting, Wait) and waiting.whom == ("a",) and "have not said" in waiting.why
    nobody = decided(outage(digest="of another run"), now=960.0)
    assert isinstance(nobody, Wait) and "nobody has any state" in nobody.why
