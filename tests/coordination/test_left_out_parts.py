"""Whose part is left out of an average, and that it costs nobody else the round."""

import msgspec
import pytest
from tests.coordination.round_world import offers_of, rewrite, world
from tests.protocol import example

from bloomery.coordination import eligibility, transactions
from bloomery.coordination.decide import CommitRound, Propose, Wait
from bloomery.coordination.etcd import Delete, TransactionResult
from bloomery.data.position import merged, within
from bloomery.protocol.records import ProposedAttempt


def test_a_part_that_is_not_finite_or_far_too_large_or_of_samples_not_given_is_left_out():
    run = world()
    run.settle(1)
    for peer in run.peers.values():
        peer.see()
        peer.work(2, finite=peer.name != "b")
    run.peers["a"].see()
    proposal = run.peers["a"].decide()
    assert proposal.tried.attempt.members == ("a", "c")
    assert proposal.tried.attempt.left_out == {"b": "its part is not finite"}


def left_out_of_the_next_attempt(run):
    run.now += 60.0
    proposal = run.peers["a"].decide()
    assert isinstance(proposal, Propose), proposal
    return proposal.tried.attempt.left_out


def test_samples_that_a_peer_was_not_given_keep_its_part_out():
    for spent in ((range(2), range(20, 25)), (range(20, 22), range(20, 22)), (range(0, 4),)):
        run = world()
        run.settle(1)
        offers_of(run, c={"spent": spent})
        assert left_out_of_the_next_attempt(run) == {"c": "it spent samples that it was not given"}


def test_a_part_whose_norm_is_far_above_the_others_is_left_out_alone():
    run = world()
    run.settle(1)
    offers_of(run, a={"norm": 0.5}, b={"norm": 2.0}, c={"norm": 1e6})
    left_out = left_out_of_the_next_attempt(run)
    assert list(left_out) == ["c"]
    assert "norm is 1e+06 after 2 steps, and the others' parts let expect at most 2" in left_out["c"]


def test_a_round_is_not_concluded_on_an_attempt_that_another_has_followed():
    """The concluder has not seen the later attempt; the coordinator has."""
    run = world()
    run.settle(1)
    offers_of(run)
    a, b = run.peers["a"], run.peers["b"]
    assert a.act() is TransactionResult.DONE
    for peer in run.peers.values():
        peer.see()
        peer.reduce()
    a.see()
    found = a.decide()
    assert isinstance(found, CommitRound) and found.commit.epoch == 1
    b.see()
    again = Propose(
        tried=msgspec.structs.replace(
            a.snapshot.tried, attempt=msgspec.structs.replace(a.snapshot.tried.attempt, epoch=2)
        ),
        offers=found.offers,
    )
    assert transactions.propose(run.store, run.keys, b.snapshot, again) is TransactionResult.DONE
    assert a.act() is TransactionResult.REFUSED
    assert [commit.round for commit in run.commits] == [0]


@pytest.mark.parametrize(
    "changed",
    [
        {"spent": (range(2), range(20, 25))},  # another's samples
        {"spent": (range(20, 21),), "tokens": 1},  # fewer: the rest would be given out again
        {"why": "nothing that counts"},
    ],
    ids=["another's samples", "fewer samples", "a word"],
)
@pytest.mark.parametrize("when", ["while it is reduced", "when all are done"])
def test_an_offer_that_is_rewritten_after_the_proposal_costs_its_peer_the_round_and_nobody_else(
    changed, when
):
    run = world()
    run.settle(1)
    offers_of(run)
    assert run.peers["a"].act() is TransactionResult.DONE
    for peer in run.peers.values():
        peer.see()
        if when == "when all are done":
            peer.reduce()
    rewrite(run, "c", **changed)
    for peer in run.peers.values():
        peer.see()
        assert isinstance(peer.decide(), Propose | Wait)
    assert "changed after the attempt" in left_out_of_the_next_attempt(run)["c"]
    run.settle(1)
    commit = run.commits[-1]
    assert commit.members == ("a", "b") and "changed after the attempt" in commit.left_out["c"]
    assert commit.position.consumed == 2 * (2 + 3)
    run.settle(1)
    shares = run.peers["a"].snapshot.shares
    assert commit.epoch == 2 and not within(merged(shares.shares["a"]), merged(shares.shares["b"]))


def test_an_offer_that_is_withdrawn_after_the_proposal_is_no_reason_to_wait():
    run = world()
    run.settle(1)
    offers_of(run)
    run.peers["a"].act()
    for peer in run.peers.values():
        peer.see()
        peer.reduce()
    run.store.transact([], [Delete(key=run.keys.ready(1, "c"))])
    run.settle(1)
    assert run.commits[-1].members == ("a", "b")


def test_a_proposer_that_takes_in_samples_not_given_does_not_bring_them_into_a_commit():
    run = world()
    run.settle(1)
    offers_of(run, c={"spent": (range(2), range(20, 25))})  # of a's samples, and its own
    c = run.peers["c"]
    modified = {name: one.modified for name, one in c.snapshot.readies.items()}
    lives = tuple(c.snapshot.members[name].life for name in "abc")
    forged = Propose(
        tried=ProposedAttempt(
            attempt=example.attempt(
                round=1, epoch=1, members=("a", "b", "c"), weights=(4 / 20, 6 / 20, 10 / 20)
            ),
            lives=lives,
            offers=tuple(modified[name] for name in "abc"),
        ),
        offers=modified,
    )
    assert transactions.propose(run.store, run.keys, c.snapshot, forged) is TransactionResult.DONE
    for peer in run.peers.values():
        peer.see()
        peer.reduce()
    run.settle(1)
    assert run.commits[-1].members == ("a", "b")
    assert run.commits[-1].left_out == {"c": "it spent samples that it was not given"}


def test_unequal_results_are_not_committed_and_the_minority_stays_out():
    run = world()
    run.settle(1)
    run.propose_attempt()
    for peer in run.peers.values():
        peer.see()
        peer.reduce(differs=peer.name == "a")
    run.settle(1)
    assert run.commits[-1].members == ("b", "c")
    assert "differs" in run.commits[-1].left_out["a"]
    consumed = run.commits[-1].position.consumed
    run.settle(1)
    # a has fetched, and waits with nothing, for it was given no share of that round.
    assert run.commits[-1].members == ("a", "b", "c")
    assert run.commits[-1].position.consumed == consumed + 2 * (3 + 5)
    for peer in run.peers.values():
        peer.see()
    assert {peer.digest for peer in run.peers.values()} == {run.commits[-1].digest}


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_link_that_failed_twice_is_tried_again_where_the_round_needs_both_its_ends(names: str) -> None:
    run = world(dict.fromkeys(names, 4), peers=len(names), minimum_peers=len(names))
    run.settle(2)
    run.propose_attempt()
    for _ in range(eligibility.LINK_FAILURES):
        for name, peer in run.peers.items():
            peer.see()
            peer.reduce(fails={"a": "b", "b": "a"}.get(name, ""))
        for peer in run.peers.values():
            peer.see()
        run.now += 20.0
        proposal = run.peers["a"].decide()
        assert isinstance(proposal, Propose) and not proposal.tried.attempt.left_out
        run.peers["a"].act()
    run.settle(1)
    assert run.commits[-1].members == tuple(names)
