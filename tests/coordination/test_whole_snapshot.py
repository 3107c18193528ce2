"""A snapshot as a whole: each key of a run in its field, with the revision and time at which it was read."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.protocol import example

from bloomery.coordination.etcd_watch import KeyValue, WatchEvent
from bloomery.coordination.snapshot import ListedMember, ListedOffer, ListedShares, RunSnapshot
from bloomery.coordination.snapshot_builder import SnapshotBuilder
from bloomery.data.position import Position
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Done, ProposedAttempt, RecoveryRecord, RoundShares

KEYS = Keys("run")


class Reading:
    """A builder that is given keys, each at a revision and a second of its own."""

    def __init__(self, remembered: RecoveryRecord | None = None) -> None:
        self.revision, self.now = 10, 100.0
        self.builder = SnapshotBuilder(KEYS, clock=lambda: self.now, remembered=remembered)

    def take(self, key: str, record: Any, *, created: int = 0) -> None:
        """Read that this key has been written, or deleted where the record is None."""
        self.revision, self.now = self.revision + 1, self.now + 1.0
        item = None
        if record is not None:
            value = record if isinstance(record, str) else encode_text(record)
            item = KeyValue(key=key, value=value, created=created or self.revision, modified=self.revision)
        self.builder.take(WatchEvent(key=key, item=item))

    def put(self, key: str, record: Any, *, created: int = 0) -> RunSnapshot:
        self.take(key, record, created=created)
        return self.builder.snapshot(changed=True)


def commit(round: int, **changed: Any) -> Any:
    return example.commit(round=round, **{"epoch": 0, "digest": f"d{round}"} | changed)


HOLES = Position(holes=(range(8),))
SHARES = RoundShares(round=3, position=HOLES, shares={"a": (range(8),)}, live=1)
TRIED = ProposedAttempt(attempt=example.attempt(round=3, epoch=5, members=("a",)), lives=(3,), offers=(17,))


def test_each_key_of_a_run_is_in_the_field_of_its_own() -> None:
    run = Reading()
    member, ready = example.member(peer="a", epoch=4, round=2, digest="d2"), example.ready(peer="a", round=3)
    failed = example.failed(peer="a", round=3, epoch=5)
    done = Done(peer="a", round=3, epoch=5, digest="d3")
    record = example.recovery_record(epoch=1, commit=commit(1))
    run.take(KEYS.commit(1), commit(1))  # revision 11 at 101 s, and so on
    run.take(KEYS.commit(2), commit(2))
    run.take(KEYS.member("a"), member, created=3)
    run.take(KEYS.shares(3), SHARES)
    run.take(KEYS.shares(2), replace(SHARES, round=2))
    run.take(KEYS.epoch, "5")
    run.take(KEYS.ready(3, "a"), ready)
    run.take(KEYS.ready(2, "a"), replace(ready, round=2))
    run.take(KEYS.attempt(3, 5), TRIED)
    run.take(KEYS.done(3, 5, "a"), done)
    run.take(KEYS.failed(3, 5, "a"), failed)
    run.take(KEYS.recovery_record("a"), record)
    run.take(KEYS.rate("a"), '{"b": 12.5}')
    run.take(KEYS.revoked("0A"), "c")
    run.builder.heard(60)
    run.now = 200.0
    run.builder.note_change()
    run.now = 300.0
    run.builder.heard(50)
    expected = RunSnapshot(
        version=1,
        revision=60,
        epoch=5,
        members={"a": ListedMember(member=member, life=3, modified=13, seen_s=103.0, said_s=103.0)},
        commits={1: commit(1), 2: commit(2)},
        commit_revision=12,
        committed_s=102.0,
        standing=ListedShares(shares=SHARES, modified=14),
        readies={"a": ListedOffer(ready=ready, modified=17, seen_s=107.0)},
        tried=TRIED,
        tried_s=109.0,
        tried_revision=19,
        dones={"a": done},
        failures=(failed,),
        failed_s=111.0,
        recovery_records={"a": record},
        rates={"a": {"b": 12.5}},
        revoked=frozenset({"0A"}),
        changed_s=200.0,
        heard_s=300.0,
        highest=5,
        own_highest=5,
    )
    assert run.builder.snapshot() == expected
    run.now = 400.0
    run.builder.heard(61)
    later = run.builder.snapshot()
    assert (later.revision, later.heard_s, later.version) == (61, 400.0, 1)
    run.builder.begin(70)
    begun = run.builder.snapshot(changed=True)
    assert begun == RunSnapshot(
        version=2,
        revision=70,
        changed_s=400.0,
        heard_s=400.0,
        highest=5,
        own_highest=5,
        forgotten=True,
        remembered=example.recovery_record(epoch=5, commit=commit(2), shares=SHARES),
    )


def test_what_is_deleted_is_gone_but_for_revocations_the_newest_commit_and_its_shares() -> None:
    run = Reading()
    keys = {
        KEYS.member("a"): example.member(peer="a"),
        KEYS.shares(3): SHARES,
        KEYS.ready(3, "a"): example.ready(peer="a", round=3),
        KEYS.recovery_record("a"): example.recovery_record(),
        KEYS.rate("a"): '{"b": 1.0}',
        KEYS.revoked("0A"): "c",
        KEYS.commit(1): commit(1),
        KEYS.commit(2): commit(2),
        KEYS.epoch: "5",
        KEYS.attempt(3, 5): TRIED,
        KEYS.done(3, 5, "a"): Done(peer="a", round=3, epoch=5, digest="x"),
        KEYS.failed(3, 5, "a"): example.failed(peer="a", round=3, epoch=5),
    }
    for key, record in keys.items():
        run.take(key, record)
    full = run.builder.snapshot(changed=True)
    assert full.members and full.standing and full.readies and full.recovery_records and full.rates
    assert full.tried and full.dones and full.failures and full.epoch == 5
    for key in keys:
        left = run.put(key, None)
    assert (left.epoch, left.own_highest, left.forgotten) == (0, 5, True)
    assert left.commits == {2: commit(2)} and left.commit_revision == 18 and left.revoked == {"0A"}
    assert not (left.members or left.readies or left.recovery_records or left.rates)
    assert left.standing == ListedShares(shares=SHARES, modified=0)
    assert left.tried is None and not left.dones and left.failures == () and left.failed_s == 0.0


def test_what_a_later_listing_does_not_have_is_gone_whatever_was_followed_before() -> None:
    run = Reading()
    for key, record in {
        KEYS.commit(1): commit(1),
        KEYS.commit(2): commit(2),
        KEYS.epoch: "5",
        KEYS.member("a"): example.member(peer="a", digest="d2"),
        KEYS.shares(3): SHARES,
        KEYS.ready(3, "a"): example.ready(peer="a", round=3),
        KEYS.attempt(3, 5): TRIED,
        KEYS.done(3, 5, "a"): Done(peer="a", round=3, epoch=5, digest="x"),
        KEYS.failed(3, 5, "a"): example.failed(peer="a", round=3, epoch=5),
        KEYS.recovery_record("a"): example.recovery_record(),
        KEYS.rate("a"): '{"b": 1.0}',
        KEYS.revoked("0A"): "c",
    }.items():
        run.take(key, record)
    run.builder.snapshot(changed=True)
    before = run.put(KEYS.commit(3), commit(3))
    assert before.refused and before.tried and before.dones and before.failures and before.standing
    run.builder.begin(90)
    run.take(KEYS.commit(2), commit(2))
    run.take(KEYS.epoch, "5")
    now = run.builder.snapshot(changed=True)
    assert (now.commits, now.commit_revision, now.revision, now.refused) == ({2: commit(2)}, 24, 90, 0)
    assert (now.tried, now.tried_s, now.failures, now.failed_s) == (None, 0.0, (), 0.0)
    assert not (now.members or now.readies or now.dones or now.recovery_records or now.rates or now.revoked)
    assert now.standing is None and now.epoch == 5 and not now.forgotten
    again = run.put(KEYS.attempt(3, 5), TRIED)
    assert again.tried == TRIED and again.failures == () and not again.dones


def test_members_that_know_of_a_later_round_are_named_in_order_and_prove_that_the_data_is_lost() -> None:
    run = Reading()
    assert not run.put(KEYS.member("c"), example.member(peer="c", round=0)).forgotten
    for name in "cab":
        ahead = run.put(KEYS.member(name), example.member(peer=name, round=1))
    assert ahead.forgotten and ahead.peers_ahead == ("a", "b", "c") and ahead.remembered is None
    other = Reading()
    other.put(KEYS.commit(1), commit(1))
    same = example.recovery_record(commit=commit(1))
    assert not other.put(KEYS.recovery_record("z"), same).forgotten
    later = other.put(KEYS.recovery_record("z"), example.recovery_record(commit=commit(2)))
    assert later.forgotten and later.peers_ahead == ("z",)
    assert later.remembered == example.recovery_record(epoch=0, commit=commit(1))


def test_an_epoch_below_one_that_a_present_member_or_record_names_is_that_of_lost_data() -> None:
    run = Reading()
    run.put(KEYS.epoch, "7")
    run.put(KEYS.member("b"), example.member(peer="b", epoch=3))
    assert not run.put(KEYS.member("a"), example.member(peer="a", epoch=7)).forgotten
    claimed = run.put(KEYS.member("a"), example.member(peer="a", epoch=8))
    assert (claimed.forgotten, claimed.highest, claimed.own_highest) == (True, 8, 7)
    gone = run.put(KEYS.member("a"), None)
    assert not gone.forgotten and gone.highest == 8
    told = run.put(KEYS.recovery_record("b"), example.recovery_record(epoch=9))
    assert (told.forgotten, told.highest, told.own_highest) == (True, 9, 7)


def test_a_peer_remembers_the_epoch_of_its_former_life() -> None:
    assert Reading().builder.snapshot(changed=True) == RunSnapshot(version=1, changed_s=100.0, heard_s=100.0)
    former = Reading(example.recovery_record(epoch=6, commit=commit(0)))
    snapshot = former.builder.snapshot(changed=True)
    assert (snapshot.highest, snapshot.own_highest, snapshot.forgotten) == (6, 6, True)


def test_a_commit_that_does_not_follow_is_refused_with_its_revision_until_a_right_one_is_written(
    caplog,
) -> None:
    run = Reading()
    run.put(KEYS.commit(1), commit(1))  # of the listing
    run.put(KEYS.member("a"), example.member(peer="a", digest="d1"))
    for wrong in (commit(2), commit(9), "{"):
        snapshot = run.put(KEYS.commit(2), wrong)
        assert (snapshot.refused, snapshot.round) == (run.revision, 2)
    assert "the commit of round 2, written at revision 13, is refused" in caplog.text
    right = commit(2, members=(), digest="d1", rewind_to=1)
    snapshot = run.put(KEYS.commit(2), right)
    assert snapshot.commit == right and snapshot.refused == 0
    again = run.put(KEYS.commit(2), commit(2, why="another"))
    assert again.commit == right and again.refused == 0 and again.commit_revision == run.revision - 1
    refused = run.put(KEYS.commit(3), commit(3))
    assert refused.refused == run.revision
    assert run.put(KEYS.commit(3), None).refused == 0


def test_a_commit_that_an_operator_adopted_is_believed_and_no_other_of_later_transactions() -> None:
    run = Reading()
    run.put(KEYS.epoch, "1")
    run.take(KEYS.adopted, "9")
    run.revision -= 1  # written in one transaction
    assert run.put(KEYS.commit(5), commit(5)).round == 6
    assert run.put(KEYS.commit(6), commit(6)).round == 6
    run.put(KEYS.adopted, None)
    assert run.put(KEYS.commit(6), commit(6)).round == 6


def test_shares_that_take_back_samples_are_told_and_those_before_stay(caplog) -> None:
    run = Reading()
    run.put(KEYS.commit(2), commit(2))
    run.put(KEYS.shares(3), SHARES)
    fewer = run.put(KEYS.shares(3), replace(SHARES, shares={"b": (range(8),)}))
    assert fewer.standing == ListedShares(shares=SHARES, modified=run.revision)
    assert "it takes back leased samples" in caplog.text
    spoilt = run.put(KEYS.shares(3), "{")
    assert spoilt.standing == ListedShares(shares=SHARES, modified=run.revision)
    assert run.put(KEYS.shares(3), None).standing == ListedShares(shares=SHARES, modified=0)
    run.put(KEYS.member("a"), example.member(peer="a", digest="d2"))
    run.put(KEYS.commit(3), commit(3, members=(), digest="d2", rewind_to=2))
    run.put(KEYS.shares(4), replace(SHARES, round=4))
    run.put(KEYS.shares(3), None)
    assert not run.builder._standing.keys() - {4}, "those of earlier rounds go"


def test_a_key_that_says_it_is_another_is_told_with_both(caplog) -> None:
    run = Reading()
    run.put(KEYS.member("b"), example.member(peer="c"))
    assert "its content says 'c', its key 'b'" in caplog.text
    run.put(KEYS.ready(3, "b"), example.ready(peer="b", round=4))
    assert "its content says (4, 'b'), its key (3, 'b')" in caplog.text
    run.put(f"{KEYS.epoch}/more", "4")
    assert "its content says ['more'], its key []" in caplog.text


def listed(name: str, *, life: int, digest: str, modified: int | None = None) -> ListedMember:
    member = example.member(peer=name, digest=digest)
    return ListedMember(member=member, life=life, modified=modified or life, seen_s=0.0, said_s=0.0)


def test_who_can_work_on_a_share_was_there_when_it_was_leased_or_holds_the_newest_state() -> None:
    members = {
        "late": listed("late", life=21, digest="old"),
        "then": listed("then", life=20, modified=25, digest="old"),
        "holds": listed("holds", life=30, digest="d2"),
        "free": listed("free", life=1, digest="d2"),
    }
    shares = dict.fromkeys(("late", "then", "holds", "gone"), ())
    standing = ListedShares(shares=replace(SHARES, shares=shares), modified=1)
    snapshot = RunSnapshot(members=members, commits={2: commit(2)}, commit_revision=20, standing=standing)
    assert snapshot.working == {"then", "holds"} and snapshot.round == 3
    assert list(snapshot.holders("d2")) == ["free", "holds"] and list(snapshot.holders("")) == []
    assert snapshot.lives(("holds", "free")) == (30, 1)
    assert snapshot.without("nobody") is snapshot
    assert set(snapshot.without("late").members) == {"then", "holds", "free"}
    empty = RunSnapshot(members=members)
    assert (empty.working, empty.commit, empty.round, empty.shares) == (set(), None, 0, None)
    fresh = {"a": listed("a", life=1, digest="")}
    assert list(RunSnapshot(members=fresh).holders("")) == []


def test_the_newest_commit_is_remembered_though_nobody_asked_for_a_snapshot_before_the_listing() -> None:
    run = Reading()
    run.take(KEYS.commit(4), commit(4))
    run.builder.note_change()
    run.builder.begin(50)
    lost = run.builder.snapshot(changed=True)
    assert lost.forgotten and lost.remembered == example.recovery_record(epoch=0, commit=commit(4))


def test_an_earlier_commit_of_a_coordinator_that_lost_data_is_not_what_is_remembered() -> None:
    run = Reading()
    run.put(KEYS.commit(4), commit(4))
    run.builder.begin(50)
    run.put(KEYS.commit(2), commit(2))
    lost = run.put(KEYS.rate("a"), '{"b": 1.0}')
    assert lost.round == 3 and lost.forgotten
    assert lost.remembered == example.recovery_record(epoch=0, commit=commit(4))


def test_the_time_of_failures_is_that_of_the_last_one_though_the_first_is_written_again() -> None:
    run = Reading()
    attempt = example.attempt(round=3, epoch=5, members=("a", "b"), weights=(0.5, 0.5))
    run.take(KEYS.commit(2), commit(2))
    run.take(KEYS.epoch, "5")
    run.take(KEYS.attempt(3, 5), ProposedAttempt(attempt=attempt, lives=(3, 3), offers=(17, 17)))
    for peer in "ab":
        run.take(KEYS.failed(3, 5, peer), example.failed(peer=peer, round=3, epoch=5))
    seen_s = run.now
    again = run.put(KEYS.failed(3, 5, "a"), example.failed(peer="a", round=3, epoch=5))
    assert len(again.failures) == 2 and again.failed_s == seen_s


def test_shares_may_change_before_their_round_is_under_way_and_within_a_listing() -> None:
    others = replace(SHARES, shares={"b": (range(8),)})
    early = Reading()
    early.builder.snapshot(changed=True)
    early.put(KEYS.shares(3), SHARES)
    early.put(KEYS.shares(3), others)
    early.builder.begin(50)
    early.take(KEYS.commit(2), commit(2))
    early.take(KEYS.shares(3), SHARES)
    assert early.put(KEYS.shares(3), others).shares == others
    followed = Reading()
    followed.put(KEYS.commit(1), commit(1))
    followed.put(KEYS.member("a"), example.member(peer="a", digest="d1"))
    followed.put(KEYS.shares(3), SHARES)
    back = commit(2, members=(), digest="d1", rewind_to=1)
    assert followed.put(KEYS.commit(2), back).shares is None, "any member may have written them before"
    assert followed.put(KEYS.shares(3), others).shares == others
    assert followed.put(KEYS.shares(3), SHARES).shares == others


def test_an_attempt_that_was_written_before_its_epoch_keeps_no_other_out() -> None:
    run, early = Reading(), replace(TRIED, lives=(9,))
    run.put(KEYS.commit(2), commit(2))
    run.take(KEYS.attempt(3, 5), early)
    run.take(KEYS.attempt(3, 9), replace(TRIED, attempt=replace(TRIED.attempt, epoch=9)))
    run.take(KEYS.epoch, "5")
    run.revision -= 1  # written in one transaction
    assert run.put(KEYS.attempt(3, 5), TRIED).tried == TRIED
    run.take(KEYS.epoch, "5")
    assert run.put(KEYS.attempt(3, 5), early).tried == TRIED


@pytest.mark.parametrize(("knows", "round"), [("nobody", 3), ("a holder", 51), ("a record", 51)])
def test_a_listed_commit_far_from_the_others_counts_if_somebody_knows_of_it(knows: str, round: int) -> None:
    run = Reading()
    for number in (1, 2, 50):
        run.take(KEYS.commit(number), commit(number))
    digest = "d50" if knows == "a holder" else "d2"
    snapshot = run.put(KEYS.member("a"), example.member(peer="a", round=2, digest=digest))
    if knows == "a record":
        listing = Reading()
        for number in (1, 2, 50):
            listing.take(KEYS.commit(number), commit(number))
        snapshot = listing.put(KEYS.recovery_record("a"), example.recovery_record(held=commit(50)))
    assert snapshot.round == round


def test_commits_that_are_refused_again_and_again_are_logged_once_for_each_round(caplog) -> None:
    run = Reading()
    run.put(KEYS.commit(1), commit(1))
    for _ in range(5):
        assert run.put(KEYS.commit(2), commit(2)).refused == run.revision
    assert caplog.text.count("the commit of round 2") == 1


@pytest.mark.parametrize("is_adopted", [True, False])
def test_a_listed_commit_without_announcements_is_believed_if_it_was_adopted(is_adopted: bool) -> None:
    run = Reading()
    run.take(KEYS.commit(2), commit(2))
    run.take(KEYS.epoch, "5")
    run.take(KEYS.member("a"), example.member(peer="a"), created=3)
    run.take(KEYS.attempt(3, 5), TRIED)
    if is_adopted:
        run.take(KEYS.adopted, "5")
        run.revision -= 1  # written in one transaction
    listed = run.put(KEYS.commit(3), commit(3, epoch=5, members=("a",)))
    assert (listed.round, listed.refused) == ((4, 0) if is_adopted else (3, run.revision))


@pytest.mark.parametrize(
    ("key", "record", "told"),
    [
        (KEYS.failed(3, 5, "a"), example.failed(peer="a", round=4, epoch=5), "(4, 5, 'a')"),
        (KEYS.failed(3, 5, "a"), example.failed(peer="a", round=3, epoch=6), "(3, 6, 'a')"),
        (KEYS.failed(3, 5, "a"), example.failed(peer="b", round=3, epoch=5), "(3, 5, 'b')"),
        (KEYS.done(3, 5, "a"), Done(peer="a", round=4, epoch=5, digest="x"), "(4, 5, 'a')"),
        (KEYS.done(3, 5, "a"), Done(peer="a", round=3, epoch=6, digest="x"), "(3, 6, 'a')"),
        (KEYS.done(3, 5, "a"), Done(peer="b", round=3, epoch=5, digest="x"), "(3, 5, 'b')"),
        (KEYS.attempt(3, 6), TRIED, "(3, 5)"),
        (KEYS.attempt(4, 5), TRIED, "(3, 5)"),
        (KEYS.ready(3, "a"), example.ready(peer="b", round=3), "(3, 'b')"),
        (KEYS.shares(4), SHARES, "3"),
    ],
)
def test_each_part_of_a_key_is_that_of_its_record(caplog, key: str, record: Any, told: str) -> None:
    run = Reading()
    run.put(key, record)
    assert f"the key {key} is ignored: its content says {told}, its key" in caplog.text
