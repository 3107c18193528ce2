"""A member that writes what only a conclusion may write: the others refuse it, name it, and go on.

The forger, 'c', holds a place in the run and may write every key that a peer may write.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.coordination.round_world import Peer, world
from tests.protocol import example

from bloomery.coordination.decide import Propose, Wait
from bloomery.coordination.etcd import Delete, Put
from bloomery.data.position import Position, merged, total
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.records import Done, ProposedAttempt, RoundShares

FORGED = "f" * 64


def begun(*, reduced=()):
    """A run whose round 1 is being reduced; these peers are done with it."""
    run = world()
    run.settle(1)
    run.propose_attempt()
    for peer in run.peers.values():
        peer.see()
        if peer.name in reduced:
            peer.reduce()
    for peer in run.peers.values():
        peer.see()
    return run


def forged(run, **changed):
    """The commit that the others expect, with the forger's state."""
    usual = dict(
        round=1,
        epoch=run.epoch,
        members=("a", "b", "c"),
        digest=FORGED,
        position=Position(consumed=20, holes=(range(4, 8), range(14, 20), range(30, 40))),
        sources=("c",),
    )
    return example.commit(**usual | changed)


def write(run, commit):
    """As a conclusion does, without its conditions."""
    shares = RoundShares(round=commit.round + 1, position=commit.position, shares={}, live=1)
    run.store.transact(
        [],
        [
            Put(key=run.keys.commit(commit.round), value=encode_text(commit)),
            Put(key=run.keys.shares(shares.round), value=encode_text(shares)),
        ],
    )


FORGERIES = {
    "before anybody is done": ((), {}, "'a' has not announced the state"),
    "when all are done": (("a", "b", "c"), {}, "'a' has not announced the state"),
    "of another epoch": (("a", "b", "c"), {"epoch": 9}, "no attempt of epoch 9 is under way"),
    "of other members": ((), {"members": ("c",)}, "its members are not those of the attempt"),
    "of a later round": ((), {"round": 7}, "it is of round 7, and round 1 is under way"),
    "that goes back to a state of its own": (
        (),
        {"members": (), "rewind_to": 0},
        "the state of round 0 is another",
    ),
    "that goes back to a round that never was": (
        (),
        {"members": (), "rewind_to": 5},
        "it goes back to a state that the run never committed",
    ),
    "that goes back on a rung that nobody asked for": (
        (),
        {"members": (), "rewind_to": 0, "digest": "initial", "position": Position(), "rung": 4},
        "nobody asked for its rung 4",
    ),
    "that averages nothing": ((), {"members": ()}, "it averages nothing and goes back nowhere"),
}


@pytest.mark.parametrize("reduced, changed, why", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_commit_is_refused_by_all_and_the_round_is_committed_over_it(reduced, changed, why, caplog):
    run = begun(reduced=reduced)
    write(run, forged(run, **changed))
    for peer in run.peers.values():
        peer.see()
        assert peer.digest == "initial", "it goes on from the forger's state"
    assert sum(why in record.getMessage() for record in caplog.records) == 3, caplog.text
    right = None
    for _ in range(20):
        for peer in run.peers.values():
            peer.see()
            peer.reduce()
            peer.see()
            peer.act()
        run.now += 1.0
        right = run.peers["a"].snapshot.commits.get(1)
    assert right is not None and right.digest != FORGED and right.members == ("a", "b", "c")
    assert {peer.digest for peer in run.peers.values()} == {right.digest}
    assert right.position.consumed == 20


def test_the_right_digest_with_another_position_is_refused():
    """So that samples would be given out again, or never."""
    run = begun(reduced=("a", "b", "c"))
    digest = run.peers["a"].candidate[1]
    write(run, forged(run, digest=digest, position=Position(consumed=40)))
    for peer in run.peers.values():
        peer.look()
        assert peer.snapshot.commit.round == 0 and peer.snapshot.refused == run.store.revision


def test_an_attempt_of_the_forger_alone_makes_no_commit(caplog):
    """Everything that it needs it may write: the epoch, an attempt, its own announcement, the commit."""
    run = begun(reduced=("a", "b", "c"))
    c = run.peers["c"]
    ready = c.snapshot.readies["c"]
    epoch = run.epoch + 1
    attempt = example.attempt(round=1, epoch=epoch, members=("c",), weights=(1.0,))
    tried = ProposedAttempt(attempt=attempt, lives=(c.life(),), offers=(ready.modified,))
    position = c.snapshot.shares.position.after(ready.ready.spent)
    run.store.put(run.keys.epoch, str(epoch))
    run.store.put(run.keys.attempt(1, epoch), encode_text(tried))
    run.store.put(
        run.keys.done(1, epoch, "c"), encode_text(Done(peer="c", round=1, epoch=epoch, digest=FORGED))
    )
    write(run, forged(run, epoch=epoch, members=("c",), position=position))
    for name in "ab":
        run.peers[name].see()
        assert run.peers[name].digest == "initial"
    assert "its members are fewer than half of those that could take part" in caplog.text


def test_fewer_than_half_of_those_who_are_ready_do_not_go_on_by_themselves():
    """Else nobody could tell them from a forger."""
    run = begun()
    for name in ("a", "b"):
        run.peers[name].reduce(fails="c")
    for peer in run.peers.values():
        peer.see()
    run.now += 60.0
    found = run.peers["a"].decide()
    assert isinstance(found, Propose) and found.tried.attempt.members == ("a", "b")  # two of three
    run = begun()
    run.peers["a"].reduce(fails="c")  # b and c do not answer
    for peer in run.peers.values():
        peer.see()
    run.now += 60.0
    run.settings = replace(run.settings, minimum_peers=1)
    assert isinstance(run.peers["a"].decide(), Wait)
    run.peers["c"].die()  # its lease runs out: one of two
    run.peers["a"].see()
    found = run.peers["a"].decide()
    assert isinstance(found, Propose) and found.tried.attempt.members == ("a", "b")


def test_what_was_committed_stays_whatever_is_written_over_it_and_though_it_is_removed(caplog):
    run = begun()
    run.settle(2)
    before = run.peers["a"].snapshot.commits
    run.store.put(run.keys.commit(1), encode_text(forged(run)))
    run.store.put(run.keys.commit(2), "{}")
    run.store.transact([], [Delete(key=run.keys.commit(2))])
    for peer in run.peers.values():
        peer.look()
        assert {round: peer.snapshot.commits[round] for round in before} == before
        assert peer.snapshot.round == 3
    assert caplog.text.count("was written a second time") == 2 * 3


def test_garbage_where_the_commit_belongs_does_not_keep_the_round_from_its_end(caplog):
    run = begun(reduced=("a", "b", "c"))
    run.store.put(run.keys.commit(1), '{"round": 1}')
    for peer in run.peers.values():
        peer.look()
    run.peers["a"].act()
    for peer in run.peers.values():
        peer.look()
        assert peer.snapshot.commit.round == 1
    assert "the commit of round 1" in caplog.text and "is refused" in caplog.text


def test_who_lists_the_run_anew_refuses_what_members_that_are_there_did_not_announce(caplog):
    run = begun(reduced=("a", "b", "c"))
    write(run, forged(run))
    run.samples["d"] = 1
    newcomer = run.peers["d"] = Peer(run, "d")
    newcomer.look()
    written = run.store.items[run.keys.commit(1)].modified
    assert newcomer.snapshot.commit.round == 0 and newcomer.snapshot.refused == written
    run.peers["a"].see()
    run.peers["a"].act()
    newcomer.look()
    assert newcomer.snapshot.commit.round == 1 and newcomer.snapshot.commit.digest != FORGED


def test_who_lists_the_run_anew_takes_a_right_commit_though_its_members_are_gone_since():
    run = begun(reduced=("a", "b", "c"))
    run.peers["a"].act()
    run.peers["b"].die()
    run.samples["d"] = 1
    newcomer = run.peers["d"] = Peer(run, "d")
    newcomer.look()
    assert newcomer.snapshot.commit.round == 1


def test_a_hostile_peer_can_still_hold_up_the_run_and_is_seen_doing_it():
    """What docs/guides/coordinator.md says that it can."""
    run = begun(reduced=("a", "b"))  # c never says what it holds
    for name in ("a", "b"):
        found = run.peers[name].decide()
        assert isinstance(found, Wait) and found.whom == ("c",)

    run = begun()
    run.store.put(run.keys.epoch, "0")  # a key that every peer must be able to write
    for name in ("a", "b"):
        run.peers[name].look()
        found = run.peers[name].decide()
        assert isinstance(found, Wait) and "has lost what it knew" in found.why
        assert run.peers[name].digest == "initial"


def test_a_hostile_peer_can_have_the_run_go_back_and_skip_samples_in_its_name():
    run = world()
    run.settle(3)
    for peer in run.peers.values():
        peer.see()
        hostile = {"rewind_to": 0, "skip": (range(100, 10_000),)} if peer.name == "c" else {}
        peer.work(2, **hostile)
    for peer in run.peers.values():
        peer.see()
    run.peers["a"].act()
    back = run.commits[-1]
    assert back.rewind_to == 0 and back.digest == "initial" and back.position.skips == (range(100, 10_000),)
    assert back.why.startswith("c:")
    run.settle(1)
    assert run.commits[-1].members == ("a", "b", "c")


def test_a_hostile_peer_can_take_a_large_share_of_a_round_and_no_sample_of_anothers():
    run = world({"a": 2, "b": 3, "c": 1_000_000})
    run.settle(1)
    for peer in run.peers.values():
        peer.see()
    shares = run.peers["a"].snapshot.shares.shares
    given = [piece for part in shares.values() for piece in part]
    assert total(shares["c"]) > 100_000 and total(merged(given)) == total(given)
    assert total(shares["a"]) and total(shares["b"])


def test_shares_of_a_round_under_way_are_not_taken_back():
    run = begun()
    a = run.peers["a"]
    right = a.snapshot.shares
    taken = msgspec.structs.replace(right, shares={"c": right.position.holes})
    run.store.put(run.keys.shares(1), encode_text(taken))
    for peer in run.peers.values():
        peer.look()
        assert peer.snapshot.shares == right
        assert peer.snapshot.standing.modified == run.store.revision
