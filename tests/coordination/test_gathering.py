"""Whether a round waits for more parts: for whom, until when, and who is asked to hurry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.protocol import example

from bloomery.coordination.attempts import carried_shares, gather_offers, quorum_window_s
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.snapshot import ListedMember, ListedOffer, ListedShares, RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.records import RoundShares

SETTINGS = RoundSettings(inner_steps=4, total_samples=1000, grace_s=60.0, patience_s=10.0)
FIRST_S = 100.0


def listed(name: str, *, overtaken: int = 0, digest: str = "d", life: int = 1) -> ListedMember:
    member = example.member(peer=name, digest=digest, overtaken=overtaken)
    return ListedMember(member=member, life=life, modified=1, seen_s=0.0, said_s=0.0)


def offer(name: str, *, seen_s: float = FIRST_S, tokens: int = 8, step_s: float = 0.0) -> ListedOffer:
    ready = example.ready(peer=name, tokens=tokens, step_s=step_s)
    return ListedOffer(ready=ready, modified=1, seen_s=seen_s)


def run(*names: str, without_share: tuple[str, ...] = (), **members: ListedMember) -> RunSnapshot:
    """A run whose members hold the newest state, and have a share but for those of `without_share`."""
    present = {name: listed(name) for name in names} | members
    shares = {name: (range(8),) for name in present if name not in without_share}
    round_shares = RoundShares(round=2, position=Position(), shares=shares, live=len(shares))
    return RunSnapshot(
        members=present,
        commits={1: example.commit()},
        standing=ListedShares(shares=round_shares, modified=1),
    )


def gathering(snapshot: RunSnapshot, *offers: ListedOffer, now: float, me: str = "a", **changed: float):
    settings = replace(SETTINGS, **changed)
    by_name = {offer.ready.peer: offer for offer in offers}
    return gather_offers(snapshot, by_name, me=me, settings=settings, now=now)


def test_a_round_without_offers_waits_for_all_who_work() -> None:
    told = gathering(run("a", "b"), now=FIRST_S)
    assert (told.why, told.whom, told.until_s, told.hurries) == ("nobody is ready", ("a", "b"), None, False)


def test_an_attempt_begins_once_all_have_offered() -> None:
    assert not gathering(run("a", "b"), offer("a"), offer("b"), now=FIRST_S).why


def test_offers_of_newcomers_alone_do_not_start_the_time_of_those_who_have_a_share() -> None:
    snapshot = run("a", "b", "c", without_share=("c",))
    told = gathering(snapshot, offer("c", tokens=0), now=FIRST_S + 1000.0)
    assert (told.why, told.whom) == ("nobody who has a share is ready", ("a", "b"))
    assert told.until_s is None and not told.hurries
    # where nobody else is there, the newcomer's round begins
    assert not gathering(run("c", without_share=("c",)), offer("c", tokens=0), now=FIRST_S).why


@pytest.mark.parametrize(
    ("after_s", "until_s"), [(0.0, 10.0), (9.9, 10.0), (10.0, 60.0), (59.9, 60.0), (60.0, None)]
)
def test_slow_peers_are_waited_for_until_the_grace_time_is_over(
    after_s: float, until_s: float | None
) -> None:
    told = gathering(run("a", "b"), offer("a"), now=FIRST_S + after_s)
    assert bool(told.why) == (until_s is not None)
    assert told.until_s == (None if until_s is None else FIRST_S + until_s)
    assert told.whom == (() if until_s is None else ("b",))


def test_time_counts_from_the_first_offer_with_samples() -> None:
    snapshot = run("a", "b", "c", "d", without_share=("d",))
    offers = offer("d", tokens=0, seen_s=0.0), offer("b", seen_s=FIRST_S + 5.0), offer("c", seen_s=FIRST_S)
    assert gathering(snapshot, *offers, now=FIRST_S + 1.0).until_s == FIRST_S + 10.0


def test_a_peer_that_others_wait_for_hurries_once_their_patience_is_over() -> None:
    snapshot = run("a", "b")
    assert not gathering(snapshot, offer("b"), now=FIRST_S + 9.9).hurries
    assert gathering(snapshot, offer("b"), now=FIRST_S + 10.0).hurries
    assert not gathering(snapshot, offer("b"), now=FIRST_S + 10.0, me="b").hurries  # it has offered


def test_fewer_peers_than_are_wanted_wait_though_the_grace_time_is_over() -> None:
    told = gathering(run("a"), offer("a"), now=FIRST_S + 1000.0, minimum_peers=2)
    assert told.why == "1 of at least 2 peers are ready" and told.until_s is None
    told = gathering(run("a"), offer("a"), now=FIRST_S, minimum_peers=2)
    assert told.until_s == FIRST_S + 10.0
    assert not gathering(run("a"), offer("a"), now=FIRST_S, minimum_peers=1).why


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_newcomers_whom_rounds_overtake_are_waited_for_ever_more_rarely(rounds: int) -> None:
    snapshot = run("a", without_share=("n",), n=listed("n", overtaken=rounds, digest="", life=9))
    told = gathering(snapshot, offer("a"), now=FIRST_S)
    assert bool(told.why) == (rounds in (2, 3, 4, 5, 8, 9))
    if told.why:
        assert (told.whom, told.until_s) == (("n",), FIRST_S + 60.0)
    assert not gathering(snapshot, offer("a"), now=FIRST_S + 60.0).why
    assert not gathering(snapshot, offer("a"), offer("n", tokens=0), now=FIRST_S).why


def test_an_asynchronous_round_begins_a_window_after_its_quorum() -> None:
    snapshot = run("a", "b", "c")
    more = {"quorum": 2, "overlap_steps": 20}
    told = gathering(snapshot, offer("a", step_s=2.0), now=FIRST_S, **more)
    assert (told.why, told.whom) == ("1 of a quorum of 2 are ready", ("b", "c"))
    offers = offer("a", step_s=2.0), offer("b", seen_s=FIRST_S + 30.0, step_s=1.0)
    told = gathering(snapshot, *offers, now=FIRST_S + 39.9, **more)
    assert told.whom == ("c",) and told.until_s == FIRST_S + 40.0  # half of 20 steps of the faster one
    assert not gathering(snapshot, *offers, now=FIRST_S + 40.0, **more).why
    # the one that is late is not asked to hurry before the quorum is there, but at once after it
    assert gathering(snapshot, *offers, now=FIRST_S + 30.0, me="c", **more).hurries


def test_a_round_that_waits_for_nobody_does_not_wait_for_newcomers_whom_rounds_overtake_either() -> None:
    snapshot = run("a", without_share=("n",), n=listed("n", overtaken=2, digest="", life=9))
    assert gathering(snapshot, offer("a"), now=FIRST_S).whom == ("n",)
    assert not gathering(snapshot, offer("a", step_s=2.0), now=FIRST_S, quorum=1, overlap_steps=20).why


def test_a_quorum_is_no_larger_than_the_peers_that_can_offer() -> None:
    more = {"quorum": 5, "overlap_steps": 20}
    assert not gathering(run("a", "b"), offer("a"), offer("b"), now=FIRST_S, **more).why
    assert gathering(run("a", "b"), offer("a"), now=FIRST_S + 999.0, **more).why


def test_the_window_of_a_quorum_is_no_longer_than_the_grace_time() -> None:
    settings = replace(SETTINGS, overlap_steps=20)
    assert quorum_window_s({"a": offer("a", step_s=3.0), "b": offer("b", step_s=5.0)}, settings) == 30.0
    assert quorum_window_s({"a": offer("a", step_s=30.0)}, settings) == 60.0
    assert quorum_window_s({"n": offer("n", tokens=0, step_s=1.0)}, settings) == 0.0


def test_peers_that_an_asynchronous_round_did_not_wait_for_keep_their_share() -> None:
    snapshot, attempt = run("a", "b", "c", "d"), example.attempt(members=("a",), left_out={"b": "not finite"})
    holes = (range(4, 20),)
    settings = replace(SETTINGS, quorum=1)
    assert carried_shares(snapshot, attempt, holes, settings) == {"c": (range(4, 8),), "d": (range(4, 8),)}
    assert carried_shares(snapshot, attempt, holes, SETTINGS) == {}
    assert carried_shares(replace(snapshot, standing=None), attempt, holes, settings) == {}


def test_who_is_missing_is_named_where_fewer_than_are_wanted_have_offered() -> None:
    told = gathering(run("a", "b", "c"), offer("b"), now=FIRST_S, minimum_peers=2)
    assert (told.whom, told.until_s) == (("a", "c"), FIRST_S + 10.0)


def test_a_quorum_is_there_with_its_last_offer_in_time_and_not_by_name() -> None:
    offers = offer("a", seen_s=FIRST_S + 30.0, step_s=1.0), offer("b", seen_s=FIRST_S, step_s=1.0)
    told = gathering(run("a", "b", "c"), *offers, now=FIRST_S, quorum=1, overlap_steps=20)
    assert told.until_s == FIRST_S + 10.0  # half of twenty steps after the first
    both = gathering(run("a", "b", "c"), *offers, now=FIRST_S + 30.0, quorum=2, overlap_steps=20)
    assert both.until_s == FIRST_S + 40.0
