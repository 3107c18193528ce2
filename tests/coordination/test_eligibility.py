"""Rules of a round, each by itself: parts that cannot be averaged, links that failed, pauses, shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.coordination.test_gathering import SETTINGS, listed, offer, run
from tests.protocol import example

from bloomery.coordination import eligibility
from bloomery.coordination.eligibility import PIECES_MORE, RoundSettings
from bloomery.coordination.snapshot import ListedOffer, ListedShares, RunSnapshot
from bloomery.data.position import Position, total
from bloomery.protocol.records import ProposedAttempt, RoundShares


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"spent": (range(4),), "kept": (range(4, 8),)}, None),
        ({"finite": False}, "its part is not finite"),
        ({"spent": (range(9),)}, "it spent samples that it was not given"),
        ({"spent": (range(4),), "kept": (range(3, 8),)}, "it spent samples that it was not given"),
        ({"spent": (range(4), range(2, 6))}, "it spent samples that it was not given"),
    ],
)
def test_a_part_is_spoilt_by_its_values_or_by_samples_that_are_not_its_own(fields, why) -> None:
    told = eligibility.unusable_offers(run("a"), {"a": example.ready(**fields)})
    assert told == ({} if why is None else {"a": why})


@pytest.mark.parametrize("more", [0, 1])
def test_a_part_of_too_many_pieces_is_spoilt(more: int) -> None:
    spent = tuple(range(2 * piece, 2 * piece + 1) for piece in range(1 + PIECES_MORE + more))
    shares = RoundShares(round=2, position=Position(), shares={"a": (range(1000),)}, live=1)
    snapshot = replace(run("a"), standing=ListedShares(shares=shares, modified=1))
    told = eligibility.unusable_offers(snapshot, {"a": example.ready(spent=spent)})
    assert told == ({"a": "it spent its samples in too many pieces"} if more else {})


def test_an_offer_that_was_changed_after_the_attempt_began_leaves_its_member_out() -> None:
    attempt = example.attempt(members=("a", "b", "c"), weights=(0.4, 0.3, 0.3))
    tried = ProposedAttempt(attempt=attempt, offers=(1, 2, 3), lives=(1, 1, 1))
    snapshot = replace(
        run("a", "b", "c"),
        readies={
            name: replace(offer(name), modified=revision)
            for name, revision in zip("abc", (1, 2, 9), strict=True)
        },
    )
    assert set(eligibility.changed_offers(snapshot, tried)) == {"c"}
    assert eligibility.changed_offers(snapshot.without("c"), tried) == {}  # it left, and its offer with it
    anew = replace(snapshot, members=snapshot.members | {"c": listed("c", life=7)})
    assert eligibility.changed_offers(anew, tried) == {}


def test_a_link_is_broken_once_two_attempts_failed_between_its_ends() -> None:
    def failures(*pairs):
        failed = [example.failed(peer=peer, culprit=culprit, epoch=epoch) for peer, culprit, epoch in pairs]
        return eligibility.broken_links(replace(run("a", "b", "c"), failures=tuple(failed)))

    assert failures(("a", "b", 1)) == set()
    assert failures(("a", "b", 1), ("b", "a", 1)) == set()  # both ends of one failure
    assert failures(("a", "b", 1), ("b", "a", 2)) == {frozenset("ab")}
    assert failures(("a", "b", 1), ("a", "c", 2)) == set()
    assert failures(("a", None, 1), ("a", None, 2), ("b", "b", 1), ("b", "b", 2)) == set()


@pytest.mark.parametrize(
    ("failed", "rest_s"),
    [(0, 0.0), (3, 0.0), (4, 0.2), (5, 0.4), (9, 6.4), (10, 10.0), (40, 10.0), (5000, 10.0)],
)
def test_attempts_that_fail_again_and_again_pause_ever_longer(failed: int, rest_s: float) -> None:
    failures = tuple(example.failed(epoch=epoch, peer=peer) for epoch in range(failed) for peer in "ab")
    assert eligibility.rest_s(replace(run("a"), failures=failures)) == pytest.approx(rest_s)


def test_answers_may_take_four_ways_to_the_coordinator_and_back() -> None:
    attempt = example.attempt(members=("a", "b"), weights=(0.5, 0.5))
    settings = replace(SETTINGS, answer_s=0.7)

    def after(**round_trips_s: float) -> float:
        readies = {
            name: ListedOffer(ready=example.ready(peer=name, coordinator_s=value), modified=1, seen_s=0.0)
            for name, value in round_trips_s.items()
        }
        return eligibility.answer_s(replace(run("a", "b"), readies=readies), attempt, settings)

    assert after() == pytest.approx(0.7)
    assert after(a=0.1, b=0.3, c=4.0) == pytest.approx(0.7 + 4 * 0.3)  # c is no member
    assert after(a=60.0) == pytest.approx(0.7 + 4 * 5.0)


def test_a_member_without_weight_brings_its_first_part_once_it_offers_samples() -> None:
    attempt = example.attempt(members=("a", "n"), weights=(1.0, 0.0))
    snapshot = replace(run("a", "n"), readies={"a": offer("a"), "n": offer("n")})
    assert eligibility.brings_first_part(snapshot, attempt, "n")
    assert not eligibility.brings_first_part(snapshot, attempt, "a")
    assert not eligibility.brings_first_part(replace(snapshot, readies={}), attempt, "n")
    silent = replace(snapshot, readies={"n": offer("n", tokens=0)})
    assert not eligibility.brings_first_part(silent, attempt, "n")


def test_a_newcomer_takes_a_share_where_it_may_join_within_a_round_or_nobody_works() -> None:
    def may(snapshot, *, joins_within: bool = True) -> bool:
        settings = replace(SETTINGS, joins_within=joins_within)
        return eligibility.may_take_share(snapshot, example.commit(), me="n", settings=settings)

    working = run("a", without_share=("n",), n=listed("n", life=9))
    assert may(working) and not may(working, joins_within=False)
    assert may(run("n", without_share=("n",)), joins_within=False)  # nobody works on the round
    assert not may(run("a", "n"))  # it has one
    assert not may(run("a", without_share=("n",), n=listed("n", digest="older", life=9)))
    assert not may(replace(working, standing=None))


def test_the_state_that_most_members_have_is_the_rounds() -> None:
    assert eligibility.compare_results({"a": "x", "b": "y", "c": "y"}) == ("y", {"a": "its result differs"})
    assert eligibility.compare_results({"b": "x", "a": "y"}) == ("y", {"b": "its result differs"})
    assert eligibility.compare_results({"a": "x", "b": "x"}) == ("x", {})


def leased(names: str, *, samples_left: int, kept=None, inner_steps: int = 4) -> RoundShares:
    settings = RoundSettings(inner_steps=inner_steps, total_samples=samples_left)
    members = {name: listed(name) for name in names}  # of 4 samples a step each
    return eligibility.lease_samples(Position(), members, 2, settings, kept=kept)


def test_each_member_gets_the_samples_of_its_inner_steps() -> None:
    shares = leased("ba", samples_left=1000)
    assert shares.shares == {"a": (range(16),), "b": (range(16, 32),)}
    assert (shares.round, shares.live) == (2, 2)


@pytest.mark.parametrize(("samples_left", "each"), [(32, 16), (31, 16), (24, 12), (17, 12), (8, 4), (3, 4)])
def test_the_last_round_of_a_run_has_fewer_steps(samples_left: int, each: int) -> None:
    assert {total(share) for share in leased("ab", samples_left=samples_left).shares.values()} == {each}


def test_no_samples_are_leased_after_the_runs_end() -> None:
    assert leased("ab", samples_left=0).shares == {}
    assert leased("ab", samples_left=0).live == 0


def test_members_that_use_no_samples_get_none_and_kept_ranges_of_nothing_are_none() -> None:
    idle = replace(listed("a"), member=example.member(peer="a", samples=0))
    settings = RoundSettings(inner_steps=4, total_samples=1000)
    shares = eligibility.lease_samples(Position(), {"a": idle}, 2, settings)
    assert shares.shares == {"a": ()} and shares.live == 1 and shares.position == Position()
    assert leased("ab", samples_left=1000, kept={"a": ()}) == leased("ab", samples_left=1000)


def test_what_a_member_has_leased_and_not_used_is_a_part_of_its_next_share() -> None:
    settings = RoundSettings(inner_steps=4, total_samples=1000)
    before = leased("ab", samples_left=1000)
    kept = {"b": (range(20, 32),)}
    members = {name: listed(name) for name in "ab"}
    after = eligibility.lease_samples(before.position, members, 3, settings, kept=kept)
    # what nobody kept of the round before is given out again, b's rest of it beside what b kept
    assert after.shares == {"a": (range(16),), "b": (range(16, 32),)}


def test_a_newcomer_within_a_round_gets_samples_that_nobody_has() -> None:
    before = leased("ab", samples_left=1000)
    after = eligibility.with_newcomer(before, "n", samples=2, settings=SETTINGS)
    assert after.shares["n"] == (range(32, 40),) and after.live == 3 and after.round == 2
    assert {name: after.shares[name] for name in "ab"} == dict(before.shares)


@pytest.mark.parametrize(
    ("samples_left", "away", "gets"),
    [
        (48, (), 8),
        (36, (), 4),
        (33, (), 2),
        (32, (), None),
        (9, (), None),
        (32, ("b",), 8),
        (9, ("a", "b"), 8),
    ],
)
def test_a_newcomer_gets_no_samples_beyond_those_that_the_run_needs_beside_the_leased_ones(
    samples_left: int, away: tuple[str, ...], gets: int | None
) -> None:
    settings = replace(SETTINGS, total_samples=samples_left)
    before = leased("ab", samples_left=1000)
    after = eligibility.with_newcomer(before, "n", samples=2, away=away, settings=settings)
    assert (after and total(after.shares["n"])) == gets


def test_a_newcomer_takes_no_share_where_those_who_work_have_all_that_the_run_needs() -> None:
    settings = replace(SETTINGS, joins_within=True)
    snapshot = run("a", without_share=("n",), n=listed("n", life=9))  # 'a' works on 8 samples
    for total_samples, may in ((9, True), (8, False)):
        asked = replace(settings, total_samples=total_samples)
        assert eligibility.may_take_share(snapshot, example.commit(), me="n", settings=asked) == may


@pytest.mark.parametrize(
    ("steps", "part", "smallest", "largest"),
    [(4, (1, 2.0), 4.0, 8.0), (1, (4, 8.0), 2.0, 4.0), (3, (3, 5.0), 5.0, 5.0), (0, (0, 5.0), 5.0, 5.0)],
)
def test_a_norm_lies_between_the_root_of_the_steps_and_the_steps(steps, part, smallest, largest) -> None:
    assert eligibility.smallest_norm(steps, part) == pytest.approx(smallest)
    assert eligibility.largest_norm(steps, part) == pytest.approx(largest)


def test_who_the_attempt_before_left_out_stays_out_unless_it_was_only_suspected() -> None:
    left_out = {"b": "not finite", "c": eligibility.OVERSTATED, "d": "not finite"}
    attempt = example.attempt(members=("a",), left_out=left_out)
    tried = ProposedAttempt(attempt=attempt, offers=(1,), lives=(1,))
    snapshot = replace(run("a", "b", "c"), tried=tried)
    assert eligibility.left_out_before(snapshot, {"a", "b", "c"}) == {"b": "not finite"}
    assert eligibility.left_out_before(run("a"), {"a"}) == {}


def test_an_average_is_at_most_as_long_as_weighed_parts_and_the_errors_that_are_sent_with_them():
    attempt = example.attempt(members=("a", "b", "c"), weights=(0.25, 0.75, 0.0))
    readies = {
        name: example.ready(peer=name, norm=norm, feedback=feedback)
        for name, norm, feedback in (("a", 2.0, 0.5), ("b", 4.0, 1.0), ("c", 9.0, 9.0))
    }
    assert eligibility.norm_limit(attempt, readies) == 1.5 * (0.5 + 0.5 + 3.0 + 1.0)


@pytest.mark.parametrize(
    ("names", "reports", "left_out"),
    [("ab", (2, 2, 2), "a"), ("ab", (2, 2), "b"), ("abcdefghi", (4,), "ab"), ("abcdefghi", (3,), "")],
)
def test_each_group_is_suspected_in_turn_where_half_of_the_others_report_too_large_an_average(
    names, reports, left_out
):
    failures = tuple(
        example.failed(peer=name, epoch=epoch, kind=eligibility.NORM_FAILURE)
        for epoch, count in enumerate(reports)
        for name in names[:count]
    )
    found = eligibility.suspects(RunSnapshot(failures=failures), names)
    assert found == dict.fromkeys(left_out, eligibility.OVERSTATED)
