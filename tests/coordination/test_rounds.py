"""Whole runs of rounds by peers that decide for themselves, on views that lag: nothing is counted twice."""

import pytest
from tests.coordination.round_world import Peer, offers_of, world

from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, Ended, Propose, RequestFlush, Wait
from bloomery.coordination.etcd import TransactionResult
from bloomery.data.position import merged, total
from bloomery.protocol.encoding import decode
from bloomery.protocol.records import ProposedAttempt, RoundShares


def test_a_run_begins_with_the_state_of_the_first_member_by_name():
    run = world()
    run.settle(1)
    (commit,) = run.commits
    assert (commit.round, commit.digest, commit.sources) == (0, "initial", ("a", "b", "c"))
    for peer in run.peers.values():
        peer.see()
    assert {name: total(share) for name, share in run.peers["a"].snapshot.shares.shares.items()} == {
        "a": 8,
        "b": 12,
        "c": 20,
    }


def test_a_run_waits_for_its_planned_peers_until_the_grace_has_passed():
    run = world()
    run.peers["c"].die()
    for peer in (run.peers["a"], run.peers["b"]):
        peer.see()
    waiting = run.peers["a"].decide()
    assert isinstance(waiting, Wait) and waiting.until_s == 60.0
    run.now = 60.0
    assert isinstance(run.peers["a"].decide(), CommitRound)


def test_the_grace_of_a_beginning_counts_from_when_there_are_enough_peers():
    run = world({"a": 2})
    run.now = 50.0
    run.samples["b"] = 3
    run.peers["b"] = Peer(run, "b")
    for peer in run.peers.values():
        peer.see()
    waiting = run.peers["a"].decide()
    assert isinstance(waiting, Wait) and waiting.until_s == 110.0


def test_rounds_follow_one_another_and_weights_are_shares_of_the_tokens():
    run = world()
    run.settle(4)
    assert [commit.round for commit in run.commits] == [0, 1, 2, 3]
    assert run.commits[-1].members == ("a", "b", "c")
    # Each round spends 2 steps of 2 + 3 + 5 samples.
    assert [commit.position.consumed for commit in run.commits] == [0, 20, 40, 60]
    assert run.epoch == 3


def test_a_member_that_dies_in_the_ring_is_not_waited_for_and_its_samples_are_given_out_again():
    run = world()
    run.settle(1)
    for peer in run.peers.values():
        peer.see()
        peer.work(2)
    for peer in run.peers.values():
        peer.see()
    assert run.peers["a"].act() is TransactionResult.DONE
    run.peers["b"].see()
    run.peers["b"].reduce()
    run.peers["c"].die()
    run.peers["a"].see()
    proposal = run.peers["a"].decide()
    assert isinstance(proposal, Propose) and proposal.tried.attempt.members == ("a", "b")
    run.settle(1)
    newest = run.commits[-1]
    assert newest.members == ("a", "b") and newest.epoch == 2
    assert newest.position.consumed == 2 * (2 + 3)
    # The next round serves what c and the steps not made have left before anything new.
    shares = decode(run.store.items[run.keys.shares(2)].value, RoundShares)
    assert min(piece.start for part in shares.shares.values() for piece in part) == 4


def test_who_is_silent_when_an_attempt_fails_is_left_out_and_those_who_answer_are_not():
    run = world()
    run.settle(1)
    run.propose_attempt()
    for name in ("a", "b"):
        run.peers[name].see()
        run.peers[name].reduce(fails="c")
    run.peers["a"].see()
    waiting = run.peers["a"].decide()
    assert isinstance(waiting, Wait) and waiting.whom == ("c",)
    run.now += 1.0
    proposal = run.peers["a"].decide()
    assert proposal.tried.attempt.members == ("a", "b")
    assert "did not answer" in proposal.tried.attempt.left_out["c"]


def test_a_member_behind_an_ocean_has_time_to_answer_when_an_attempt_fails():
    run = world()
    run.settle(1)
    offers_of(run, c={"coordinator_s": 0.6})
    run.peers["a"].act()
    for name in ("a", "b"):
        run.peers[name].see()
        run.peers[name].reduce(fails="")
    run.peers["a"].see()
    run.now += 1.3  # c has just learnt of the failure, and says so
    waiting = run.peers["a"].decide()
    assert isinstance(waiting, Wait) and waiting.whom == ("c",) and waiting.until_s == pytest.approx(3.1)
    run.peers["c"].see()
    run.peers["c"].reduce(fails="")
    run.peers["a"].see()
    assert run.peers["a"].decide().tried.attempt.members == ("a", "b", "c")


def test_a_peer_that_only_was_slow_is_asked_to_hurry_and_waited_for_until_the_grace_ends():
    run = world()
    run.settle(1)
    a, c = run.peers["a"], run.peers["c"]
    for name in ("a", "b"):
        run.peers[name].see()
        run.peers[name].work(2)
    began = run.now
    a.see(), c.see()
    assert isinstance(a.decide(), Wait) and a.decide().whom == ("c",)
    run.now = began + 10.0
    assert isinstance(c.decide(), RequestFlush)
    assert isinstance(a.decide(), Wait)
    run.now = began + 59.9
    assert isinstance(a.decide(), Wait)
    run.now = began + 60.0
    assert a.decide().tried.attempt.members == ("a", "b")
    c.work(1)
    a.see()
    assert a.decide().tried.attempt.members == ("a", "b", "c")
    assert a.decide().tried.attempt.weights == pytest.approx((4 / 15, 6 / 15, 5 / 15))


def test_a_newcomer_that_waits_with_nothing_makes_nobody_hurry():
    run = world(peers=4)
    run.now = 60.0
    run.settle(1)
    run.samples["d"] = 4
    run.peers["d"] = Peer(run, "d")
    for peer in run.peers.values():
        peer.see()
    run.peers["d"].work(1)
    for peer in run.peers.values():
        peer.see()
    run.now += 1000.0
    for name in "abcd":
        assert isinstance(run.peers[name].decide(), Wait), name
    run.settle(1)
    assert run.commits[-1].members == ("a", "b", "c", "d")


def test_rounds_wait_a_while_and_ever_less_often_for_a_newcomer_whom_they_overtake():
    run = world()
    run.settle(1)
    run.samples["d"] = 4
    newcomer = run.peers["d"] = Peer(run, "d")
    waited = []
    for overtaken in range(20):
        newcomer.overtaken = overtaken
        newcomer.list()  # it still fetches
        for name in "abc":
            run.peers[name].see()
            run.peers[name].work(1)
        run.peers["a"].see()
        if isinstance(found := run.peers["a"].decide(), Wait):
            assert found.whom == ("d",)
            waited.append(overtaken)
            run.now = found.until_s
        del run.peers["d"]
        run.settle(1)
        run.peers["d"] = newcomer
    assert waited == [2, 3, 4, 5, 8, 9, 16, 17]
    newcomer.overtaken = 8
    newcomer.list()
    run.settle(1)  # now it holds the state, and offers nothing: nobody waits any longer
    assert run.commits[-1].members == ("a", "b", "c", "d")


def test_a_newcomer_takes_a_share_of_the_round_under_way_that_nobody_else_has():
    run = world()
    run.settle(1)
    run.samples["d"] = 4
    run.peers["d"] = Peer(run, "d")
    run.peers["d"].see()
    share = transactions.join_shares(
        run.store, run.keys, round=1, peer="d", life=run.peers["d"].life(), samples=4, settings=run.settings
    )
    shares = decode(run.store.items[run.keys.shares(1)].value, RoundShares)
    assert total(share) == 16 and shares.live == 4
    everything = [piece for part in shares.shares.values() for piece in part]
    assert total(merged(everything)) == total(everything) == 40 + 16
    run.settle(1)
    assert run.commits[-1].members == ("a", "b", "c", "d")
    assert (
        transactions.join_shares(
            run.store, run.keys, round=9, peer="d", life=1, samples=4, settings=run.settings
        )
        is None
    )


def test_a_newcomer_takes_no_share_of_a_round_that_is_committed():
    run = world()
    run.settle(2)  # whose shares are still there: the next commit deletes them
    assert run.keys.shares(1) in run.store.items and run.keys.commit(1) in run.store.items
    run.samples["d"] = 4
    run.peers["d"] = Peer(run, "d")
    before = run.store.items[run.keys.shares(1)]
    taken = transactions.join_shares(
        run.store, run.keys, round=1, peer="d", life=run.peers["d"].life(), samples=4, settings=run.settings
    )
    assert taken is None and run.store.items[run.keys.shares(1)] == before


@pytest.mark.parametrize("garbage", ["", "{", '{"round": 1}', "9" * 400])
def test_a_newcomer_takes_no_share_of_what_is_no_record_of_shares_and_goes_on(garbage):
    run = world()
    run.settle(1)
    run.store.put(run.keys.shares(1), garbage)
    taken = transactions.join_shares(
        run.store, run.keys, round=1, peer="a", life=run.peers["a"].life(), samples=1, settings=run.settings
    )
    assert taken is None and run.store.items[run.keys.shares(1)].value == garbage


def test_a_member_that_takes_its_first_share_after_an_attempt_began_is_in_the_next_attempt():
    run = world(peers=2, samples={"a": 2, "b": 3}, minimum_peers=1)
    run.settle(1)
    a, b = run.peers["a"], run.peers["b"]
    b.die()
    b.begin(digest="initial", round=-1)
    for peer in (a, b):
        peer.see()
    a.work(2)
    a.see()
    run.now += 60.0
    assert a.act() is TransactionResult.DONE  # round 1 is a's alone, so b has no share of round 2
    a.see(), a.reduce(), a.see(), a.act()
    for peer in (a, b):
        peer.see()
    a.work(2)
    b.work(2)
    for peer in (a, b):
        peer.see()
    a.act()
    tried = run.peers["b"].world.store.items[run.keys.attempt(2, 2)]
    assert decode(tried.value, ProposedAttempt).attempt.weights == (1.0, 0.0)
    a.die()
    a.begin(digest="initial", round=-1)
    a.see(), a.see()
    a.work(2, finite=False)
    b.see()
    b.act()  # nobody with samples can take part, so b takes a share
    assert total(b.snapshot.shares.shares["b"]) == 4
    b.work(2)
    b.see()
    proposal = b.decide()
    assert isinstance(proposal, Propose) and proposal.tried.attempt.members == ("b",)
    assert set(proposal.tried.attempt.left_out) == {"a"}
    run.settle(1)
    assert run.commits[-1].members == ("b",)


def test_those_whom_earlier_attempts_left_out_are_tried_again_where_the_rest_is_a_minority():
    run = world()
    run.settle(1)
    for peer in run.peers.values():
        peer.see()
        peer.work(2)
    for epoch in (1, 2):
        for peer in run.peers.values():
            peer.see()
        assert run.peers["a"].act() is TransactionResult.DONE
        for name, peer in run.peers.items():
            peer.see()
            peer.digest = f"{name} {epoch}"  # a faulty memory: each has another result
            peer.reduce()
        run.peers["a"].see()
        proposal = run.peers["a"].decide()
        assert isinstance(proposal, Propose)
        assert proposal.tried.attempt.members == ("a", "b", "c") and not proposal.tried.attempt.left_out


def test_a_run_ends_when_its_samples_are_done_and_gives_out_no_more_than_is_left():
    run = world(total_samples=45)
    run.settle(3)
    shares = decode(run.store.items[run.keys.shares(3)].value, RoundShares)
    assert total(piece for part in shares.shares.values() for piece in part) == 10  # one step of everybody
    run.settle(1)
    for peer in run.peers.values():
        peer.see()
        assert isinstance(peer.decide(), Ended)
    assert run.commits[-1].why == "the samples are done"


def test_of_two_proposers_one_succeeds():
    run = world()
    run.settle(1)
    for peer in run.peers.values():
        peer.see()
        peer.work(2)
    for peer in run.peers.values():
        peer.see()
    run.now += 5.0
    outcomes = [peer.act() for peer in run.peers.values()]
    assert outcomes == [TransactionResult.DONE, TransactionResult.REFUSED, TransactionResult.REFUSED]
    assert run.epoch == 1
