"""Whole runs of the coordinator's decisions: whatever happens, samples count once and the run goes on."""

import random

import pytest
from hypothesis import example as seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.coordination.round_world import offers_of, world
from tests.protocol import example

from bloomery.coordination.decide import CommitRound, Wait
from bloomery.data.position import merged, total, within, without
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.records import Commit, Ready, RoundShares


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
