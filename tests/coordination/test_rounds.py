"""Whole runs of rounds by peers that decide for themselves, on views that lag: nothing is counted twice."""

import random

import pytest
from hypothesis import example as seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.coordination.round_world import Peer, offers_of, world
from tests.protocol import example

from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, Ended, Propose, RequestFlush, Wait
from bloomery.coordination.etcd import TransactionResult
from bloomery.data.position import merged, total, within, without
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.records import Commit, ProposedAttempt, Ready, RoundShares


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


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
@seeded(seed=102)  # a member takes its first share after the attempt that it is in has begun
@seeded(seed=214)  # the same, and another member's result differs
@seeded(seed=517)  # attempts leave out one peer after the other until the rest is a minority
@seeded(seed=596)
def test_whatever_happens_a_sample_counts_once_epochs_grow_and_rounds_have_no_gap(seed):
    chance = random.Random(seed)
    names = "abcd"[: chance.randint(1, 4)]
    run = world(
        {name: chance.randint(1, 4) for name in names},
        peers=len(names),
        minimum_peers=1,
        inner_steps=3,
        grace_s=chance.choice((1.0, 30.0)),
    )
    run.store.loses_answers = lambda: chance.random() < 0.1
    spent, epochs = Counted(run), [0]
    for _ in range(300):
        peer = run.peers[chance.choice(names)]
        _one_thing(peer, chance)
        run.now += chance.random() * chance.choice((0.1, 1.0, 5.0))
        assert run.epoch >= epochs[-1]
        epochs.append(run.epoch)
        spent.check()
    run.store.loses_answers = lambda: False
    for peer in run.peers.values():
        if not peer.alive:
            peer.begin(digest=run.commits[-1].digest if run.commits else "initial", round=-1)
    run.settle(3)
    spent.check()


@seeded(seed=0)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_whenever_all_peers_die_and_whatever_states_they_come_back_with_the_run_goes_on(seed):
    chance = random.Random(seed)
    names = "abc"[: chance.randint(1, 3)]
    run = world(dict.fromkeys(names, 2), peers=len(names), minimum_peers=1, inner_steps=3, grace_s=5.0)
    run.settle(chance.randint(1, 3))
    for _ in range(chance.randint(0, 40)):
        _one_thing(run.peers[chance.choice(names)], chance)
        run.now += chance.random()
    kept = run.commits
    back = chance.sample(names, chance.randint(1, len(names)))
    for peer in run.peers.values():
        peer.die()
    for name in back:
        state = chance.choice(kept)
        run.peers[name].begin(digest=state.digest, round=state.round)
    for _ in range(100):
        for name in chance.sample(back, len(back)):
            run.peers[name].look()
            if run.commits[-1].digest not in {run.peers[other].digest for other in back}:
                run.peers[name].act()
        run.now += 1.0
    assert run.commits[-1].digest in {run.peers[name].digest for name in back}, (
        "somebody has the newest state"
    )
    run.settle(2)
    assert set(run.commits[-1].members) == set(back)


def _one_thing(peer, chance):
    move = chance.random()
    if not peer.alive:
        if move < 0.3:
            peer.begin(digest="initial", round=-1)
            peer.see()
        return
    if move < 0.35:
        peer.see(chance.choice((1, 2, None)))
    elif move < 0.55:
        peer.work(chance.randint(1, 3), kept=chance.choice((0, 0, 1, 2)), finite=chance.random() < 0.95)
    elif move < 0.75:
        peer.reduce(
            fails=chance.choice(("", "a", "b")) if chance.random() < 0.1 else None,
            differs=chance.random() < 0.03,
        )
    elif move < 0.98:
        peer.act()
    else:
        peer.die()


class Counted:
    """A second account of the samples: from the readies of who was committed, kept as they were put."""

    def __init__(self, run):
        self.run, self.done, self.commits, self.readies, self.read = run, [], 0, {}, 0
        self.before, self.kept = [], {}

    def check(self):
        for _, change in self.run.store.log[self.read :]:
            kind, *names = self.run.keys.parts(change.key)
            if kind == "ready" and change.item is not None:
                self.readies[int(names[0]), names[1]] = decode(change.item.value, Ready)
            if kind == "commit" and change.item is not None:
                commit = decode(change.item.value, Commit)
                assert commit.round == self.commits, "a round is missing, or was committed twice"
                self.commits += 1
                spent = [r for peer in commit.members for r in self.readies[commit.round, peer].spent]
                earlier = self.done if commit.rewind_to is None else self.before[commit.rewind_to]
                self.done = [*earlier, *spent]
                self.kept = {peer: self.readies[commit.round, peer].kept for peer in commit.members}
                self.before.append(self.done)
                assert total(merged(self.done)) == total(self.done), "a sample was committed twice"
                assert commit.position.consumed == total(self.done)
            if kind == "shares" and change.item is not None:
                shares = decode(change.item.value, RoundShares)
                given = [piece for part in shares.shares.values() for piece in part]
                assert total(given) == total(merged(given)), "a sample was given out twice"
                assert not within(merged(given), merged(self.done)), "a sample was given out that is done"
                for peer, kept in self.kept.items() if shares.shares else ():
                    assert not without(merged(kept), merged(shares.shares[peer])), "what was kept is gone"
                self.kept = {}
        self.read = len(self.run.store.log)


def test_only_the_peer_whose_turn_it_is_puts_the_commit_together(monkeypatch):
    run = world()
    run.settle(1)
    offers_of(run)
    run.peers["a"].act()
    for peer in run.peers.values():
        peer.look()
        peer.reduce()
    for peer in run.peers.values():
        peer.look()
    assert isinstance(run.peers["a"].decide(), CommitRound)
    monkeypatch.setattr(
        "bloomery.coordination.decide.lease_samples", lambda *_, **more: pytest.fail("leased")
    )
    for name in "bc":
        decision = run.peers[name].decide()
        assert isinstance(decision, Wait) and decision.why == "another peer proposes"


def test_a_peer_of_an_earlier_run_stops_this_one_only_while_it_is_listed():
    run = world({"a": 4, "b": 4}, peers=2, minimum_peers=1)
    run.settle(5)
    stale = example.member(peer="c", round=300, digest="of the earlier run", epoch=500)
    run.store.put(run.keys.member("c"), encode_text(stale), lease="c1")
    for peer in run.peers.values():
        peer.see()
        waiting = peer.decide()
        assert isinstance(waiting, Wait) and waiting.whom == ("c",)
        assert peer.snapshot.own_highest == peer.snapshot.epoch < 500, "it repeats no claim of another"
    run.store.end_lease("c1")
    run.settle(3)
