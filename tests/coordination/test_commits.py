"""Which commits follow from what members wrote, and to which state a run goes back."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.coordination.test_evidence import begun
from tests.coordination.test_gathering import listed, offer, run
from tests.protocol import example

from bloomery.coordination import commits
from bloomery.coordination.snapshot import ListedOffer
from bloomery.data.position import Position
from bloomery.protocol.records import RoundShares

ONE, TWO, THREE = (
    example.commit(round=round, digest=digest, position=Position(consumed=10 * round))
    for round, digest in ((1, "x"), (2, "y"), (3, "z"))
)
COMMITS = {1: ONE, 2: TWO, 3: THREE}


def holding(**digests: str):
    """A run with three commits, whose members hold these states."""
    members = {name: listed(name, digest=digest) for name, digest in digests.items()}
    return replace(run(**members), commits=COMMITS, epoch=9)


def test_the_newest_state_that_somebody_holds_may_be_known_to_its_holder_alone():
    assert commits.newest_held(holding(a="x", b="y")) == TWO
    assert commits.newest_held(holding(a="other")) is None
    saved = example.commit(round=7, digest="s")
    snapshot = replace(
        holding(a="x", b="s"), recovery_records={"b": example.recovery_record(commit=None, held=saved)}
    )
    assert commits.newest_held(snapshot) == saved
    told_by_one_that_left = replace(snapshot, recovery_records={"c": snapshot.recovery_records["b"]})
    assert commits.newest_held(told_by_one_that_left) == ONE
    other = replace(snapshot, recovery_records={"b": example.recovery_record(held=replace_round(saved, 2))})
    assert commits.known_commits(other)[2] == TWO  # what the coordinator has counts first


def replace_round(commit, round):
    return msgspec.structs.replace(commit, round=round)


def test_the_earliest_round_that_guards_name_is_gone_back_to_or_the_last_one_before_it():
    snapshot = replace(holding(a="x"), commits={2: TWO, 4: replace_round(THREE, 4), 6: replace_round(ONE, 6)})

    def target(*rounds):
        asking = [
            example.ready(peer=name, rewind_to=round, why=f"why {name}")
            for name, round in zip("abc", rounds, strict=False)
        ]
        return commits.requested_target(snapshot, [*asking, example.ready(peer="d", why="nothing")])

    found, reason = target(5, 6)
    assert found.round == 4 and reason == "a: why a; b: why b"
    assert target(4)[0].round == 4
    assert target(6, 3)[0].round == 2
    assert target(1)[0].round == 2  # the oldest that is kept


def test_who_goes_back_to_a_commit_that_went_back_itself_names_the_round_where_its_state_began():
    back = example.commit(round=3, digest="x", members=(), rewind_to=1, position=Position(consumed=10))
    again = example.commit(round=4, digest="x", members=(), rewind_to=3, position=Position(consumed=10))
    snapshot = replace(holding(a="x", b="y", c="x"), commits={1: ONE, 2: TWO, 3: back, 4: again})
    made = commits.rewind_commit(snapshot, again, skips=[(range(20, 25),)], why="spike", rung=3)
    assert (made.round, made.epoch, made.rewind_to, made.digest) == (5, 9, 1, "x")
    assert (made.members, made.sources, made.rung, made.why) == ((), ("a", "c"), 3, "spike")
    assert made.position == Position(consumed=10, skips=(range(20, 25),))
    assert commits.rewind_commit(snapshot, TWO, skips=[], why="").rewind_to == 2
    from_one_that_was_pruned = msgspec.structs.replace(TWO, rewind_to=0)
    assert commits.rewind_commit(snapshot, from_one_that_was_pruned, skips=[], why="").rewind_to == 2


def test_a_round_without_a_usable_part_is_repeated_without_its_samples_unless_guards_ask_for_more():
    snapshot = replace(run("a", "b"), commits={4: replace_round(ONE, 4)})
    bad = {"a": "its part is not finite", "b": "it spent others' samples"}
    offers = {
        name: ListedOffer(ready=example.ready(peer=name, spent=(piece,)), modified=1, seen_s=0.0)
        for name, piece in (("a", range(3)), ("b", range(5, 9)))
    }
    repeated = commits.rewind_requests(snapshot, offers, {}, bad)
    assert [(r.peer, r.rewind_to, r.skip, r.why) for r in repeated] == [
        ("a", 4, (range(3),), bad["a"]),
        ("b", 4, (range(5, 9),), bad["b"]),
    ]
    asking = example.ready(peer="b", rewind_to=2)
    offers["b"] = replace(offers["b"], ready=asking)
    assert commits.rewind_requests(snapshot, offers, {}, bad) == [asking]
    assert commits.rewind_requests(snapshot, offers, {"a": offers["a"].ready}, {"b": bad["b"]}) == []
    assert commits.rewind_requests(snapshot, offers, {}, {"a": bad["a"]}) == []  # b is only silent


def test_a_state_is_lost_once_nobody_listed_holds_it_or_has_offered_a_part():
    assert commits.is_lost(holding(a="x", b="y"), THREE)
    assert not commits.is_lost(holding(a="x", b="z"), THREE)
    assert not commits.is_lost(replace(holding(a="x"), readies={"a": offer("a")}), THREE)
    assert not commits.is_lost(replace(holding(), members={}), THREE)


def test_a_commit_is_of_the_round_under_way_and_the_first_one_of_a_state_that_somebody_holds():
    snapshot = holding(a="z")
    for round in (3, 5):
        assert f"it is of round {round}" in commits.objection(replace_round(THREE, round), snapshot)
    first = example.commit(round=0, members=(), digest="x")
    empty = replace(holding(a="x"), commits={})
    assert commits.objection(first, empty) == ""
    held_by_nobody = msgspec.structs.replace(first, digest="q")
    assert "nobody holds the state" in commits.objection(held_by_nobody, empty)


def test_a_rewind_counts_no_more_samples_than_the_run_had_and_no_higher_rung_than_was_asked_for():
    ready = example.ready(rung=2)
    snapshot = replace(
        holding(a="x"), readies={"a": ListedOffer(ready=ready, modified=1, seen_s=0.0)}, standing=None
    )
    back = example.commit(
        round=4, members=(), digest="x", rewind_to=1, rung=2, position=Position(consumed=30)
    )
    assert commits.objection(back, snapshot) == ""
    beyond = msgspec.structs.replace(back, position=Position(consumed=31))
    assert "counts more samples" in commits.objection(beyond, snapshot)
    assert "rung 3" in commits.objection(msgspec.structs.replace(back, rung=3), snapshot)
    assert "another" in commits.objection(msgspec.structs.replace(back, rewind_to=2), snapshot)
    never = msgspec.structs.replace(back, rewind_to=77, digest="q")
    assert "never committed" in commits.objection(never, snapshot)
    assert commits.objection(msgspec.structs.replace(back, rewind_to=77), snapshot) == ""  # of an old round


def test_a_commit_follows_from_its_members_offers_as_they_were_when_the_attempt_began():
    before = begun(reduced=("a", "b", "c")).peers["a"].snapshot
    members = before.tried.attempt.members
    readies = [before.readies[name].ready for name in members]
    right = example.commit(
        round=1,
        epoch=before.epoch,
        members=tuple(sorted(members)),
        digest=before.dones["a"].digest,
        position=commits.position_after(before.standing.shares.position, readies),
    )
    assert commits.objection(right, before) == ""
    assert "its members are not" in commits.objection(
        msgspec.structs.replace(right, members=("a", "b")), before
    )
    more = msgspec.structs.replace(right, members=("a", "b", "c", "d"))
    assert "its members are not" in commits.objection(more, before)
    changed = replace(before.readies["b"], modified=before.readies["b"].modified + 1)
    anew = replace(before, readies={**before.readies, "b": changed})
    assert "'b': what it brings was changed" in commits.objection(right, anew)
    foreign = replace(
        before.readies["b"],
        ready=msgspec.structs.replace(before.readies["b"].ready, spent=(range(900, 904),)),
    )
    stolen = replace(before, readies={**before.readies, "b": foreign})
    assert "'b': it spent samples" in commits.objection(right, stolen)
    gone = {name: offered for name, offered in before.readies.items() if name != "c"}
    assert "brought nothing" in commits.objection(right, replace(before, readies=gone))
    assert "brought nothing" in commits.objection(right, replace(before, standing=None))
    later = msgspec.structs.replace(right, epoch=right.epoch + 1)
    assert "no attempt of epoch" in commits.objection(later, before)


@pytest.mark.parametrize(
    ("members", "is_minority"),
    [("ab", False), ("a", True), ("ac", False), ("n", True), ("an", True), ("", True)],
)
def test_half_of_those_who_have_a_share_and_a_usable_part_are_no_minority(members, is_minority):
    snapshot = run("a", "b", "c", "d", "n", without_share=("n",))
    readies = {name: offer(name) for name in "abcdn"}
    assert commits.is_minority(members, replace(snapshot, readies=readies)) is is_minority


def test_who_offers_nothing_and_has_no_share_does_not_count_for_a_majority():
    snapshot = run("a", "b", "c", "n", without_share=("n",))
    waiting = ListedOffer(ready=example.ready(peer="n", spent=()), modified=1, seen_s=0.0)
    readies = {**{name: offer(name) for name in "abc"}, "n": waiting}
    assert commits.is_minority("an", replace(snapshot, readies=readies))
    assert not commits.is_minority("ab", replace(snapshot, readies=readies))


def test_who_is_a_minority_is_judged_by_the_usable_offers_that_were_there_when_the_attempt_began():
    snapshot = run("a", "b", "c")
    readies = {name: replace(offer(name), modified=at) for name, at in (("a", 4), ("b", 5), ("c", 6))}
    snapshot = replace(snapshot, readies=readies)
    assert commits.is_minority("a", snapshot)  # one of three
    assert not commits.is_minority("a", snapshot, before=6)  # one of two
    assert not commits.is_minority("a", snapshot, before=5)
    spoilt = {name: replace(offer(name), ready=example.ready(peer=name, finite=False)) for name in "bc"}
    assert not commits.is_minority("a", replace(snapshot, readies={**readies, **spoilt}))


def test_a_request_to_skip_that_makes_a_position_no_larger_is_followed_however_large_that_is(monkeypatch):
    monkeypatch.setattr(commits, "SKIPS_AT_MOST", 2)
    before = Position(consumed=1, skips=(range(10, 12), range(20, 22), range(30, 32)))
    longer = commits.position_after(before, [example.ready(spent=(), skip=(range(22, 25),))])
    assert longer.skips == (range(10, 12), range(20, 25), range(30, 32))
    assert commits.position_after(before, [example.ready(spent=(), skip=(range(50, 60),))]) == before


def test_a_request_to_skip_up_to_where_no_message_can_count_is_ignored():
    before = Position(consumed=1)
    requests = [
        example.ready(spent=(), skip=(range(10, 1 << 62),)),
        example.ready(spent=(), skip=(range(5, 6),)),
    ]
    after = commits.position_after(before, requests)
    assert after.skips == (range(5, 6),)
    furthest = example.ready(spent=(), skip=(range(10, 10**15),))
    assert commits.position_after(before, [furthest]).skips == (range(10, 10**15),)


def test_shares_only_add_to_earlier_ones_where_these_and_their_position_stay():
    skips, own, more = (range(90, 91),), (range(4, 8),), (range(8, 12),)
    before = RoundShares(
        round=3, position=Position(consumed=4, skips=skips, holes=own), shares={"a": own}, live=1
    )
    holes = (range(4, 12),)
    after = RoundShares(
        round=3,
        position=Position(consumed=4, skips=skips, holes=holes),
        shares={"a": own, "b": more},
        live=2,
    )
    assert commits.only_adds(after, before) and commits.only_adds(before, before)
    assert not commits.only_adds(before, after)
    for changed in (
        {"shares": {"a": (range(4, 7),), "b": more}},
        {"position": Position(consumed=5, skips=skips, holes=holes)},
        {"position": Position(consumed=4, holes=holes)},
    ):
        assert not commits.only_adds(msgspec.structs.replace(after, **changed), before)
