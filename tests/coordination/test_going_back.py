"""Which state a run goes back to, and which commits are kept for that."""

from dataclasses import replace

import pytest
from tests.coordination.round_world import Peer, world
from tests.protocol import example

from bloomery.coordination import transactions
from bloomery.coordination.decide import CommitRound, TakeShare, Wait
from bloomery.coordination.etcd import Delete
from bloomery.coordination.snapshot_builder import SnapshotBuilder
from bloomery.data.position import Position, total, within, without
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.records import RoundShares


def begin_attempt(run):
    """Let those who are alive offer, and one of them propose an attempt, which nobody reduces."""
    alive = [peer for peer in run.peers.values() if peer.alive]
    for peer in alive:
        peer.see()
        peer.work(2)
    for peer in alive:
        peer.see()
        run.now += run.settings.grace_s
        peer.act()
    assert any(key.startswith(run.keys.attempts(run.newest + 1)) for key in run.store.items)


def a_commit(round, **changed):
    usual = dict(epoch=round, members=("a",), digest="x", position=Position(), sources=("a",))
    return example.commit(round=round, **usual | changed)


def test_the_run_goes_back_as_far_as_anybody_asks_on_the_highest_rung():
    run = world()
    run.settle(5)
    for peer in run.peers.values():
        peer.see()
        peer.work(2, rewind_to={"a": 3, "b": 2}.get(peer.name), rung={"a": 3, "b": 2}.get(peer.name, 0))
    for peer in run.peers.values():
        peer.see()
    run.peers["a"].act()
    assert run.commits[-1].rewind_to == 2 and run.commits[-1].digest == run.commits[2].digest
    assert run.commits[-1].rung == 3, "the strongest remedy that was asked for"


def test_a_rewind_is_decided_for_everybody_and_its_skip_is_never_given_out():
    run = world()
    run.settle(4)
    before = run.commits[1]
    for peer in run.peers.values():
        peer.see()
        peer.work(2, rewind_to=1 if peer.name == "b" else None, skip=(range(30, 35),))
        peer.see()
    for peer in run.peers.values():
        peer.see()
        peer.act()
    back = run.commits[-1]
    assert (back.round, back.rewind_to, back.members, back.digest) == (4, 1, (), before.digest)
    assert back.position.consumed == before.position.consumed and back.position.skips == (range(30, 35),)
    run.settle(2)
    given_out = run.peers["a"].snapshot.shares.position.holes
    assert not within(given_out, (range(30, 35),))


def test_samples_that_are_skipped_without_going_back_are_never_given_out_and_what_is_kept_stays():
    run = world()
    run.settle(1)
    for peer in run.peers.values():
        peer.see()
        peer.work(2, kept=3, skip=(range(37, 50),) if peer.name == "b" else ())
    run.settle(1)
    assert run.commits[-1].rewind_to is None and run.commits[-1].position.skips == (range(37, 50),)
    shares = decode(run.store.items[run.keys.shares(2)].value, RoundShares).shares
    # c spent 20 to 29 of its 20 to 39 and keeps three; b spent 8 to 13.
    assert not without((range(30, 33),), shares["c"]) and not without((range(14, 17),), shares["b"])
    assert {name: total(share) for name, share in shares.items()} == {"a": 8, "b": 12, "c": 20}


@pytest.mark.parametrize("outage", ["between attempts", "within an attempt"])
def test_after_an_outage_the_newest_state_that_somebody_has_is_gone_back_to(outage):
    run = world(grace_s=30.0)
    run.settle(4)
    kept = {commit.round: commit for commit in run.commits}
    if outage == "within an attempt":
        begin_attempt(run)
    for peer in run.peers.values():
        peer.die()
    for peer, round in zip(run.peers.values(), (1, 2, 2), strict=True):
        peer.begin(digest=kept[round].digest, round=round)
    a = run.peers["a"]
    a.look()
    waiting = a.decide()
    assert isinstance(waiting, Wait) and "nobody has the state of the newest commit" in waiting.why
    run.now += 30.0
    found = a.decide()
    assert isinstance(found, CommitRound)
    assert (found.commit.rewind_to, found.commit.digest) == (2, kept[2].digest)
    assert found.commit.sources == ("b", "c") and set(found.shares.shares) == {"b", "c"}
    assert found.commit.position == kept[2].position
    a.act()
    run.settle(2)
    assert run.commits[-1].members == ("a", "b", "c")


def test_a_newcomer_takes_a_share_after_all_members_of_an_attempt_have_gone():
    run = world(minimum_peers=1)
    run.settle(2)
    begin_attempt(run)
    for peer in run.peers.values():
        peer.die()
    newest = run.commits[-1]
    run.samples["d"] = 1
    run.peers["d"] = d = Peer(run, "d")  # it never had a share
    d.die()
    d.begin(digest=newest.digest, round=newest.round)
    d.look()
    assert d.snapshot.tried is not None and isinstance(d.decide(), TakeShare)
    d.act()
    run.settle(2)
    assert run.commits[-1].members == ("d",)


def test_after_an_outage_fewer_peers_than_a_round_takes_wait_for_more():
    run = world(grace_s=30.0, minimum_peers=3)
    run.settle(4)
    kept = run.commits[2]
    for peer in run.peers.values():
        peer.die()
    for name in ("a", "b"):
        run.peers[name].begin(digest=kept.digest, round=2)
    run.now += 1000.0
    run.peers["a"].look()
    waiting = run.peers["a"].decide()
    assert isinstance(waiting, Wait) and "2 of at least 3 peers are here" in waiting.why


def test_round_0_is_not_begun_while_a_member_holds_a_later_round_or_knows_of_one():
    run = world()
    run.peers["c"].die()
    run.peers["c"].begin(digest="of round 31", round=31)
    run.now = 1000.0
    for peer in run.peers.values():
        peer.look()
        assert peer.snapshot.forgotten and peer.snapshot.peers_ahead == ("c",)
        waiting = peer.decide()
        assert isinstance(waiting, Wait) and "--adopt" in waiting.why and waiting.whom == ("c",)
    run.peers["c"].die()
    run.peers["c"].begin(digest="initial", round=0)  # its checkpoint is lost, and its journal is not
    told = example.recovery_record(epoch=40, commit=a_commit(31), shares=None)
    run.put(run.peers["c"], run.keys.recovery_record("c"), encode_text(told))
    run.peers["a"].look()
    assert isinstance(run.peers["a"].decide(), Wait) and run.peers["a"].snapshot.peers_ahead == ("c",)
    assert not run.commits


def test_what_a_peer_remembers_of_its_former_life_keeps_it_from_an_earlier_round():
    run = world()
    run.settle(3)
    for remembered, is_forgotten in ((31, True), (3, True), (2, False)):
        told = example.recovery_record(epoch=0, commit=a_commit(remembered), shares=None)
        peer = run.peers["a"]
        peer.assembly = SnapshotBuilder(run.keys, clock=lambda: run.now, remembered=told)
        peer.read = 0
        peer.look()
        assert peer.snapshot.forgotten is is_forgotten
        assert (peer.snapshot.remembered == told) is is_forgotten


def test_a_state_whose_commit_was_forgotten_is_gone_back_to_as_its_holder_tells_it():
    run = world(grace_s=30.0, minimum_peers=1)
    run.settle(4)
    for name in "bc":
        run.peers[name].die()
    a = run.peers["a"]
    a.die()
    a.begin(digest="saved long ago", round=1)
    a.look()
    run.now += 30.0
    waiting = a.decide()
    assert isinstance(waiting, Wait) and "nobody has any state that this run ever" in waiting.why
    held = a_commit(1, digest="saved long ago", position=Position(consumed=7))
    # Of round 1 the coordinator has another state, of another run: the holder's word is not taken for it.
    run.put(
        a,
        run.keys.recovery_record("a"),
        encode_text(example.recovery_record(epoch=0, commit=None, shares=None, held=held)),
    )
    a.look()
    assert isinstance(a.decide(), Wait)
    run.store.transact([], [Delete(key=run.keys.commit(1))])
    a.look()
    run.now += 30.0
    found = a.decide()
    assert isinstance(found, CommitRound)
    assert (found.commit.rewind_to, found.commit.digest) == (1, "saved long ago")
    assert found.commit.position == Position(consumed=7)


def test_with_one_step_a_round_the_commits_that_saves_rest_on_are_kept_and_gone_back_to(monkeypatch):
    monkeypatch.setattr(transactions, "COMMITS_KEPT", 20)
    run = world(inner_steps=1, minimum_peers=1, grace_s=30.0)
    run.peers["a"].saves, run.peers["b"].saves = (4, 9), (9,)
    for peer in run.peers.values():
        peer.list()
    run.settle(61, steps=1)
    assert [commit.round for commit in run.commits] == [4, 9, *range(41, 61)]
    saved = next(commit for commit in run.commits if commit.round == 9)
    for peer in run.peers.values():
        peer.die()
    a = run.peers["a"]
    a.begin(digest=saved.digest, round=9)
    a.look()
    run.now += 30.0
    found = a.decide()
    assert isinstance(found, CommitRound)
    assert (found.commit.rewind_to, found.commit.position) == (9, saved.position)
    a.act()
    a.saves = (9,)  # a later save took the place of the first
    a.list()
    run.settle(2, steps=1)
    assert min(commit.round for commit in run.commits) == 9


def test_commits_that_go_are_few_at_once_and_those_that_saves_rest_on_are_bounded(monkeypatch):
    monkeypatch.setattr(transactions, "COMMITS_KEPT", 10)
    monkeypatch.setattr(transactions, "SAVED_COMMITS_KEPT", 3)
    run = world()
    commits = {number: a_commit(number, save=number == 12) for number in range(100)}
    peer = run.peers["a"]
    peer.saves = (2, 5, 8, 11)
    peer.list()
    peer.look()
    snapshot = replace(peer.snapshot, commits=commits)
    assert (
        transactions.outdated_rounds(snapshot, 100)
        == [number for number in range(19) if number not in (8, 11, 12)][:16]
    )
    left = {number: one for number, one in commits.items() if number in (8, 11, 12) or number > 90}
    assert transactions.outdated_rounds(replace(snapshot, commits=left), 100) == []


def test_nobody_goes_back_while_a_member_has_not_said_what_it_holds_since_the_commit():
    run = world(grace_s=0.001)
    run.settle(2)
    run.now += 1000.0
    a = run.peers["a"]
    a.look()  # it reads the commit, and nobody has listed the new state yet
    waiting = a.decide()
    assert isinstance(waiting, Wait) and waiting.whom == ("a", "b", "c")
