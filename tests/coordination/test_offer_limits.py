"""What a peer's offer and entry may claim, beside the samples that it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.coordination.test_gathering import SETTINGS, listed, run
from tests.protocol import example

from bloomery.coordination import commits, eligibility
from bloomery.coordination.offer_limits import OfferLimits
from bloomery.coordination.snapshot import ListedOffer, ListedShares
from bloomery.coordination.snapshot_builder import SnapshotBuilder
from bloomery.data.position import Position, total
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Done, ProposedAttempt, RoundShares

LIMITS = OfferLimits(tokens_per_sample=32, steps=4, batch=2)  # 8 samples a round


def snapshot_of(*names: str, limits: OfferLimits | None = LIMITS, share: int = 8):
    """A run in which each peer has the first `share` samples, after 100 that were consumed."""
    shares = {name: (range(share),) for name in names}
    position = Position(consumed=100, holes=(range(share),))
    known = RoundShares(round=2, position=position, shares=shares, live=len(names))
    return replace(run(*names), standing=ListedShares(shares=known, modified=1), limits=limits)


HONEST = {"round": 2, "steps": 4, "tokens": 256, "spent": (range(8),)}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"steps": 3, "tokens": 192, "spent": (range(6),), "kept": (range(6, 8),)}, None),
        ({"steps": 0, "tokens": 0, "spent": ()}, None),
        ({"tokens": 1 << 62}, "it claims 4611686018427387904 tokens for 8 samples of 32"),
        ({"tokens": 255}, "it claims 255 tokens for 8 samples of 32"),
        ({"steps": 5}, "it claims 5 steps with 8 samples"),
        ({"steps": 3, "tokens": 64, "spent": (range(2),)}, "it claims 3 steps with 2 samples"),
        ({"drift_tokens": 257, "drift_steps": 4}, "it claims more of earlier rounds than there was"),
        ({"drift_steps": 5}, "it claims more of earlier rounds than there was"),
    ],
)
def test_tokens_and_steps_that_the_samples_do_not_allow_spoil_a_part(fields, why) -> None:
    told = eligibility.unusable_offers(snapshot_of("a"), {"a": example.ready(**HONEST | fields)})
    assert told == ({} if why is None else {"a": why})
    believed = snapshot_of("a", limits=None)
    assert eligibility.unusable_offers(believed, {"a": example.ready(**HONEST | fields)}) == {}


def test_a_peer_that_gave_itself_a_larger_share_than_rounds_have_cannot_spend_it() -> None:
    for share, told in ((8, {}), (9, {"a": "it spent more samples than a peer gets for a round"})):
        ready = example.ready(**HONEST | {"spent": (range(share),), "tokens": 32 * share})
        assert eligibility.unusable_offers(snapshot_of("a", share=share), {"a": ready}) == told


@pytest.mark.parametrize(
    ("drift", "is_bad"),
    [
        ({"drift_tokens": 108 * 32, "drift_steps": 8}, False),  # of 100 samples consumed and 8 of this round
        ({"drift_tokens": 108 * 32 + 1, "drift_steps": 8}, True),
        ({"drift_tokens": 108 * 32, "drift_steps": 9}, True),
    ],
)
def test_a_fragment_spans_no_more_than_the_run_has_consumed(drift, is_bad: bool) -> None:
    snapshot = snapshot_of("a", limits=replace(LIMITS, fragments=2))
    assert bool(eligibility.unusable_offers(snapshot, {"a": example.ready(**HONEST | drift)})) == is_bad


def test_a_commit_with_overstated_tokens_is_refused_by_peers_that_know_what_a_sample_has() -> None:
    claims = {"a": 256, "b": 256 << 20}
    attempt = example.attempt(round=2, members=("a", "b"), weights=commits.weights_of([*claims.values()]))
    tried = ProposedAttempt(attempt=attempt, offers=(1, 1), lives=(1, 1))
    shares = {"a": (range(8),), "b": (range(8, 16),)}
    position = Position(consumed=100, holes=(range(16),))
    known = RoundShares(round=2, position=position, shares=shares, live=2)
    readies = {
        name: example.ready(**HONEST | {"peer": name, "tokens": tokens, "spent": shares[name]})
        for name, tokens in claims.items()
    }
    snapshot = replace(
        run("a", "b"),
        standing=ListedShares(shares=known, modified=1),
        tried=tried,
        tried_revision=9,
        readies={name: ListedOffer(ready=ready, modified=1, seen_s=0.0) for name, ready in readies.items()},
        dones={name: Done(peer=name, round=2, epoch=1, digest="d") for name in claims},
    )
    commit = example.commit(
        round=2, members=("a", "b"), position=commits.position_after(position, readies.values())
    )
    assert commits.objection(commit, snapshot) == ""
    judged = replace(snapshot, limits=LIMITS)
    assert commits.objection(commit, judged) == "'b': it claims 268435456 tokens for 8 samples of 32"


def test_snapshots_of_a_view_with_limits_carry_them() -> None:
    builder = SnapshotBuilder(Keys("r"), clock=lambda: 0.0, limits=LIMITS)
    assert builder.snapshot(changed=True).limits == LIMITS


def test_a_member_that_names_a_huge_batch_gets_samples_for_the_recipes_batch_alone() -> None:
    greedy = replace(listed("b"), member=example.member(peer="b", samples=10**9))
    members = {"a": replace(listed("a"), member=example.member(peer="a", samples=2)), "b": greedy}
    settings = replace(SETTINGS, total_samples=20, limits=LIMITS)
    shares = eligibility.lease_samples(Position(), members, 2, settings)
    assert {name: total(share) for name, share in shares.shares.items()} == {"a": 8, "b": 8}
    assert settings.batch_of(greedy.member) == 2 and settings.batch_of(example.member(samples=1)) == 1


def test_shares_beyond_all_numbers_of_samples_are_not_usable() -> None:
    far = commits.SKIP_END_AT_MOST
    for stop, is_usable in ((far, True), (far + 1, False)):
        shares = RoundShares(
            round=2, position=Position(holes=(range(stop),)), shares={"n": (range(8, stop),)}, live=1
        )
        if is_usable:
            assert commits.shares_of(encode_text(shares), round=2) == shares
        else:
            with pytest.raises(ValueError, match="leases samples beyond"):
                commits.shares_of(encode_text(shares), round=2)
