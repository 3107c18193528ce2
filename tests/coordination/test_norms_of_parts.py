"""Which parts are too large to be averaged: by the steps that they span, by the past, by what came out."""

import math
import random

import msgspec
import pytest
from tests.coordination.round_world import world
from tests.coordination.test_whole_runs import Counted
from tests.protocol import example

from bloomery.coordination.decide import Propose
from bloomery.coordination.eligibility import OVERSTATED, norm_limit, outliers, suspects
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.records import Ready

SPEEDS = {"a": 1, "b": 3, "c": 12}


def part(name, steps, norm, **changed):
    return example.ready(peer=name, steps=steps, norm=norm, **changed)


def offer(peer, steps, norm):
    """Offer so many steps, with this norm."""
    run = peer.world
    peer.work(steps)
    key = run.keys.ready(run.newest + 1, peer.name)
    ready = decode(run.store.items[key].value, Ready)
    run.put(peer, key, encode_text(msgspec.structs.replace(ready, norm=norm)))


def conclude(run):
    """Let all see, propose, reduce and commit the round under way."""
    goal = run.newest + 1
    while run.newest < goal:
        for peer in run.peers.values():
            peer.see()
            peer.reduce()
            peer.see()
            peer.act()
        run.now += 1.0
        assert run.now < 10_000, [peer.decide() for peer in run.peers.values()]
    for peer in run.peers.values():
        peer.see()


def test_of_peers_at_one_three_and_twelve_times_the_speed_nobody_healthy_is_left_out():
    chance = random.Random(17)
    run = world(samples=dict.fromkeys(SPEEDS, 1), inner_steps=60, outlier_factor=2.0, minimum_peers=3)
    run.settle(1)
    spent = Counted(run)
    for _ in range(20):
        for peer in run.peers.values():
            peer.see()
            steps = SPEEDS[peer.name] * chance.randint(1, 5)
            growth = chance.choice((0.5, 0.75, 1.0))  # between steps in all directions and in one
            offer(peer, steps, chance.uniform(0.8, 1.2) * steps**growth / 60)
        conclude(run)
        assert run.commits[-1].members == ("a", "b", "c"), run.commits[-1].left_out
        spent.check()
    for peer in run.peers.values():
        offer(peer, SPEEDS[peer.name], 1e3 if peer.name == "c" else 1.0)
    conclude(run)
    assert run.commits[-1].members == ("a", "b") and "after 12 steps" in run.commits[-1].left_out["c"]
    spent.check()


def test_fifty_steps_beside_four_are_no_outlier_and_four_steps_as_long_as_fifty_are():
    hurried = {"a": part("a", 4, 0.04), "b": part("b", 4, 0.05)}
    assert outliers(hurried | {"c": part("c", 50, 0.6)}, factor=10.0) == {}
    assert list(outliers(hurried | {"c": part("c", 4, 0.6)}, factor=10.0)) == ["c"]


def test_of_two_parts_the_one_that_is_unlike_its_own_past_is_left_out():
    past = ((10, 1.0), (20, 1.8), (10, 1.1))
    healthy, broken = part("a", 10, 1.0, past=past), part("b", 10, 50.0, past=past)
    assert list(outliers({"a": healthy, "b": broken}, factor=10.0)) == ["b"]
    assert "its own earlier parts let expect" in outliers({"a": healthy, "b": broken}, factor=10.0)["b"]
    # The other one stands still, so that any part is far above it: the past says who is unusual.
    assert outliers({"a": healthy, "b": part("b", 10, 1e-3, past=past)}, factor=10.0) == {}
    # A newcomer without a past beside a peer that is as it always was.
    assert list(outliers({"a": healthy, "b": part("b", 10, 50.0)}, factor=10.0)) == ["b"]
    assert outliers({"a": part("a", 10, 1e-3, past=past), "b": part("b", 10, 1.0)}, factor=10.0) == {}
    # It was as large as that before.
    assert outliers({"a": healthy, "b": part("b", 10, 50.0, past=((10, 45.0),))}, factor=10.0) == {}
    # Its earlier parts had other numbers of steps, which let expect 5.6 of it.
    quick = part("a", 10, 1.0, past=((10, 1.0),))
    slow = {norm: part("b", 40, norm, past=((10, 1.4),)) for norm in (55.0, 57.0)}
    assert outliers({"a": quick, "b": slow[55.0]}, factor=10.0) == {}
    why = "its part's norm is 57 after 40 steps, and its own earlier parts let expect at most 5.6"
    assert outliers({"a": quick, "b": slow[57.0]}, factor=10.0) == {"b": why}
    # It is as large beside the other as it may be.
    assert outliers({"a": part("a", 1, 1.0), "b": part("b", 1, 8.0, past=((1, 0.5),))}, factor=8.0) == {}
    # Both grew alike, for instance because the learning rate did.
    grown = {name: part(name, 10, 50.0, past=past) for name in "ab"}
    assert outliers(grown, factor=10.0) == outliers({"b": broken}, factor=10.0) == {}


def test_quantisation_errors_that_a_peer_adds_are_judged_like_its_part():
    parts = {name: part(name, 4, 1.0) for name in "ab"}
    assert list(outliers(parts | {"c": part("c", 4, 1.0, feedback=1e6)}, factor=10.0)) == ["c"]


def test_feedback_that_may_be_the_sum_of_many_rounds_is_judged_by_them():
    parts = {name: part(name, 4, 1.0, feedback=50.0) for name in "abc"}
    assert sorted(outliers(parts, factor=10.0)) == ["a", "b", "c"]
    assert outliers(parts, factor=10.0, feedback_rounds=20.0) == {}
    parts["c"] = part("c", 4, 1.0, feedback=1e6)
    assert list(outliers(parts, factor=10.0, feedback_rounds=20.0)) == ["c"]


def test_an_honest_average_is_never_above_the_limit():
    chance = random.Random(3)
    readies, weights = {}, (0.5, 0.3, 0.2, 0.0)
    vectors = {name: [chance.gauss(0, 1) for _ in range(50)] for name in "abcd"}
    for name, vector in vectors.items():
        readies[name] = part(name, 1, math.hypot(*vector))
    attempt = example.attempt(members=tuple("abcd"), weights=weights)
    average = [
        sum(weight * vectors[name][index] for name, weight in zip("abcd", weights, strict=True))
        for index in range(50)
    ]
    limit = norm_limit(attempt, readies)
    assert math.hypot(*average) < limit
    assert limit == pytest.approx(
        1.5 * sum(weight * readies[name].norm for name, weight in zip("abcd", weights, strict=True))
    )
    assert norm_limit(attempt, {"a": readies["a"]}) is None


def test_a_limit_counts_the_errors_that_members_add_but_not_those_of_who_has_no_weight():
    attempt = example.attempt(members=("b", "a", "c"), weights=(0.75, 0.25, 0.0))
    readies = {
        "b": part("b", 1, 2.0, feedback=0.5),
        "a": part("a", 1, 4.0, feedback=0.25),
        "c": part("c", 1, 8.0, feedback=100.0),
    }
    assert norm_limit(attempt, readies) == pytest.approx(1.5 * (1.5 + 0.5 + 1.0 + 0.25))
    spoilt = example.ready(peer="a", norm=None, finite=False)
    assert norm_limit(attempt, {**readies, "a": spoilt}) is None


def test_a_part_is_judged_by_the_steps_that_it_spans_and_one_without_tokens_not_at_all():
    since = part("c", 4, 0.6, drift_steps=50, drift_tokens=400)
    usual = {"a": part("a", 4, 0.04), "b": part("b", 4, 0.05)}
    assert outliers({**usual, "c": since}, factor=10.0) == {}
    nothing = part("c", 0, 1e6, tokens=0)
    assert outliers({**usual, "c": nothing}, factor=10.0) == {}
    assert outliers({"a": usual["a"], "c": nothing}, factor=10.0) == {}


def test_one_part_that_was_large_before_is_no_licence_for_more():
    past = ((10, 1.0), (10, 1.2), (10, 30.0))
    parts = {"a": part("a", 10, 1.0), "b": part("b", 10, 50.0, past=past)}
    assert list(outliers(parts, factor=10.0)) == ["b"]


NAMES = [f"p{number:02}" for number in range(16)]


def reported(*epochs, by, kind="norm"):
    failures = tuple(
        example.failed(peer=name, epoch=epoch, kind=kind) for epoch in epochs for name in NAMES[:by]
    )
    return list(suspects(RunSnapshot(failures=failures), reversed(NAMES)))


def test_the_search_for_who_says_too_small_a_norm_leaves_out_one_group_after_the_other():
    assert reported(1, by=7) == ["p00", "p01"]  # 7 are half of 14, the least that an attempt has
    assert reported(1, by=6) == [] == reported(1, by=16, kind="stalled")
    assert reported(1, 2, 3, by=16) == ["p04", "p05"]
    assert reported(*range(8), by=9) == ["p14", "p15"]
    assert reported(*range(9), by=9) == ["p00", "p01"]
    failures = (example.failed(peer="p00", epoch=1, kind="norm"),)
    assert suspects(RunSnapshot(failures=failures), ["p00"]) == {}


def test_who_says_too_small_a_norm_is_found_and_the_others_are_not_blamed():
    run = world(samples=dict.fromkeys("abcd", 2), peers=4, minimum_peers=2)
    run.settle(1)
    spent, liar = Counted(run), "c"
    for peer in run.peers.values():
        peer.see()
        peer.work(2)
    tried = []
    while run.newest < 1:
        for peer in run.peers.values():
            peer.see()
            attempt = peer.attempt()
            if attempt is not None and attempt.epoch not in peer.reported:
                tried.append(attempt)
                if liar in attempt.members:
                    failed(peer, attempt)
                else:
                    peer.reduce()
            peer.see()
            peer.act()
        run.now += 1.0
        assert run.now < 1_000
    assert run.commits[-1].members == ("a", "b", "d")
    assert run.commits[-1].left_out == {liar: OVERSTATED}
    assert len({attempt.epoch for attempt in tried}) == 4  # all, without a, without b, without c
    spent.check()


def failed(peer, attempt):
    """Report, as every honest member does, that the average is larger than it can be."""
    peer.reported.add(attempt.epoch)
    record = example.failed(peer=peer.name, round=attempt.round, epoch=attempt.epoch, kind="norm")
    key = peer.world.keys.failed(attempt.round, attempt.epoch, peer.name)
    peer.world.put(peer, key, encode_text(record))


def test_one_member_alone_has_nobody_left_out_by_such_a_report():
    run = world(samples=dict.fromkeys("abcd", 2), peers=4, minimum_peers=2)
    run.settle(1)
    run.propose_attempt()
    for peer in run.peers.values():
        peer.see()
        if peer.name == "d":
            failed(peer, peer.attempt())
        else:
            peer.reduce(fails="")
    for peer in run.peers.values():
        peer.see()
    proposal = run.peers["a"].decide()
    assert isinstance(proposal, Propose) and proposal.tried.attempt.left_out == {}
