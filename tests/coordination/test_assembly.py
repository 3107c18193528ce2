"""What one member writes ends nobody's view of the run, whatever it is."""

import json
import math

import pytest
from msgspec.structs import replace
from tests.coordination.test_membership import member, ready
from tests.protocol import example

from bloomery.coordination.etcd_watch import KeyValue, WatchEvent
from bloomery.coordination.recovery import _commits_in, _holders, _peers_ahead, _shares
from bloomery.coordination.snapshot_builder import _NAMED_AT_MOST, SnapshotBuilder
from bloomery.data.position import Position
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Done, ProposedAttempt, RecoveryRecord, RoundShares

KEYS = Keys("run")
HUGE = 10**400


class Watched:
    """An assembly and the revisions of what it is given."""

    def __init__(self) -> None:
        self.now, self.revision = 0.0, 0
        self.assembly = SnapshotBuilder(KEYS, clock=lambda: self.now)

    def put(self, key, value):
        self.revision += 1
        item = KeyValue(key=key, value=value, created=self.revision, modified=self.revision)
        self.assembly.take(WatchEvent(key=key, item=item))
        return self.assembly.snapshot(changed=True)


def changed(record, **fields):
    return json.dumps({**json.loads(encode_text(record)), **fields})


GARBAGE = {
    "a step of 400 digits": (KEYS.ready(0, "b"), changed(ready("b", 0), step_s=HUGE)),
    "a norm of 400 digits": (KEYS.ready(0, "b"), changed(ready("b", 0), norm=HUGE)),
    "a count of 400 digits": (KEYS.ready(0, "b"), changed(ready("b", 0), tokens=HUGE)),
    "a number of 5,000 digits": (KEYS.ready(0, "b"), '{"step_s": 1' + "0" * 5_000 + "}"),
    "an hour and more for a step": (KEYS.ready(0, "b"), changed(ready("b", 0), step_s=1e300)),
    "a rate of 400 digits": (KEYS.rate("b"), json.dumps({"a": HUGE})),
    "a rate below zero": (KEYS.rate("b"), json.dumps({"a": -1.0})),
    "not a number": (KEYS.rate("b"), json.dumps({"a": math.nan})),
    "a round that has no key after it": (KEYS.member("b"), changed(member("b"), round=10**10 - 1)),
    "an epoch that has no key after it": (KEYS.epoch, str(10**10 - 1)),
    "a range of 400 digits": (KEYS.ready(0, "b"), changed(ready("b", 0), spent=[[0, HUGE]])),
    "no text": (KEYS.member("b"), "\ufffd\ufffd"),
    "nothing": (KEYS.member("b"), ""),
    "brackets": (KEYS.member("b"), "[" * 100_000),
    "a key with a number spelled otherwise": (f"{KEYS.root}commit/1_0", "{}"),
    "a key with a number of other digits": (f"{KEYS.root}commit/٣٣٣٣٣٣٣٣٣٣", "{}"),
    "a key with a number of 5,000 digits": (f"{KEYS.root}commit/{'1' * 5_000}", "{}"),
    "a key with a part more": (f"{KEYS.commit(3)}/more", "{}"),
    "a key with a part less": (f"{KEYS.root}attempt", "{}"),
}


@pytest.mark.parametrize("key, value", GARBAGE.values(), ids=GARBAGE)
def test_a_value_that_makes_no_sense_counts_as_absent_and_is_named_once(key, value, caplog):
    run = Watched()
    run.put(KEYS.member("a"), encode_text(member("a")))
    for _ in range(3):
        snapshot = run.put(key, value)
    assert set(snapshot.members) == {"a"} and not snapshot.readies and not snapshot.commits
    assert caplog.text.count("is ignored") == 1
    assert caplog.records[0].getMessage().startswith(f"the key {key[:200]}")


def test_a_record_that_is_written_over_with_garbage_is_absent_as_for_who_lists_anew():
    run = Watched()
    run.put(KEYS.member("b"), encode_text(member("b")))
    assert not run.put(KEYS.member("b"), "{}").members
    assert set(run.put(KEYS.member("b"), encode_text(member("b"))).members) == {"b"}


def test_one_who_writes_garbage_below_ever_other_names_does_not_fill_the_log(caplog):
    run = Watched()
    for number in range(_NAMED_AT_MOST + 50):
        run.put(KEYS.ready(number, "b"), "{}")
    assert len(caplog.records) == _NAMED_AT_MOST + 1
    assert "no more of them are logged" in caplog.records[-1].message


@pytest.mark.parametrize("kind", ["epoch", "epoch/", "adopted", "commit/0000000000", "shares/0000000000"])
def test_what_only_the_run_says_counts_for_nothing_below_a_peers_name(kind):
    run = Watched()
    run.put(KEYS.epoch, "7")
    run.put(KEYS.of_peer("b") + kind, "9")
    snapshot = run.put(f"{KEYS.epoch}/b", "9")
    assert snapshot.epoch == 7 and not snapshot.refused and snapshot.standing is None
    assert KEYS.parts(KEYS.of_peer("b") + kind) == ("",)


ALL = Position(holes=(range(10),))


@pytest.mark.parametrize(
    "shares",
    [{"a": (range(5),), "b": (range(4, 8),)}, {"a": (range(5), range(3, 6))}, {"a": (range(8, 12),)}],
    ids=["of two peers", "twice", "beyond what was given out"],
)
def test_shares_in_which_a_sample_is_given_twice_or_was_never_given_out_are_none(shares):
    run = Watched()
    right = RoundShares(round=0, position=ALL, shares={"a": (range(5),), "b": (range(5, 10),)}, live=2)
    assert run.put(KEYS.shares(0), encode_text(right)).shares == right
    assert run.put(KEYS.shares(0), encode_text(replace(right, shares=shares))).shares is None


def test_an_attempt_stays_what_it_was_when_it_was_proposed(caplog):
    run = Watched()
    attempt = example.attempt(round=0, epoch=1, members=("a", "b"), weights=(0.5, 0.5))
    tried = ProposedAttempt(attempt=attempt, lives=(1, 2), offers=(3, 4))
    run.put(KEYS.epoch, "1")
    run.put(KEYS.attempt(0, 1), encode_text(tried))
    other = replace(tried, attempt=replace(attempt, members=("b", "a"), weights=(0.0, 1.0)))
    assert run.put(KEYS.attempt(0, 1), encode_text(other)).tried == tried
    assert "an attempt was written a second time" in caplog.text


def test_failures_of_attempts_that_never_were_count_for_nothing():
    run = Watched()
    for epoch in range(1, 9):
        failed = example.failed(peer="b", round=0, epoch=epoch, kind="stalled", culprit="a")
        snapshot = run.put(KEYS.failed(0, epoch, "b"), encode_text(failed))
    assert snapshot.failures == () and snapshot.failed_s == 0.0


def test_changes_that_nobody_asks_about_cost_no_snapshot(monkeypatch):
    """Hundreds of members change thousands of keys a round, and each of them reads all these changes."""
    watched, made = Watched(), []
    frozen = SnapshotBuilder._frozen
    monkeypatch.setattr(SnapshotBuilder, "_frozen", lambda self: made.append(1) or frozen(self))
    first = watched.put(KEYS.member("p000"), encode_text(member("p000")))
    made.clear()
    for number in range(1, 200):
        key = KEYS.member(f"p{number:03d}")
        item = KeyValue(key=key, value=encode_text(member(f"p{number:03d}")), created=number, modified=number)
        watched.assembly.take(WatchEvent(key=key, item=item))
        watched.assembly.note_change()
    assert not made and watched.assembly.version == first.version + 199
    last = watched.assembly.snapshot()
    assert len(made) == 1 and len(last.members) == 200 and last.version == watched.assembly.version
    assert watched.assembly.snapshot().version == last.version and len(made) == 1


def test_nothing_is_kept_of_commits_that_were_deleted():
    run = Watched()
    for round in range(6):
        text = encode_text(example.commit(round=round, members=("a",) if round else ()))
        item = KeyValue(key=KEYS.commit(round), value=text, created=1, modified=1)
        run.assembly.take(WatchEvent(key=item.key, item=item))
    assert list(run.assembly.snapshot(changed=True).commits) == [0, 1, 2, 3, 4, 5]
    for round in range(4):
        run.assembly.take(WatchEvent(key=KEYS.commit(round), item=None))
    assert list(run.assembly.snapshot(changed=True).commits) == [4, 5]
    assert list(run.assembly._commit_revisions) == [4, 5]


def test_a_recovery_record_that_its_peer_took_back_is_forgotten_and_its_epoch_is_not_used_again():
    watched = Watched()
    record = RecoveryRecord(epoch=41, commit=None, shares=None, held=None)
    assert watched.put(KEYS.recovery_record("b"), encode_text(record)).recovery_records == {"b": record}
    watched.assembly.take(WatchEvent(key=KEYS.recovery_record("b"), item=None))
    after = watched.assembly.snapshot(changed=True)
    assert after.recovery_records == {} and after.highest == 41


@pytest.mark.parametrize(
    ("key", "record"),
    [
        (KEYS.member("b"), member("a")),
        (KEYS.ready(3, "b"), ready("b", 4)),
        (KEYS.ready(3, "b"), ready("a", 3)),
        (KEYS.shares(3), RoundShares(round=4, position=Position(), shares={}, live=0)),
        (KEYS.commit(0), example.commit(round=1, members=())),
        (KEYS.done(0, 5, "b"), Done(peer="b", round=0, epoch=4, digest="x")),
        (KEYS.failed(0, 5, "b"), example.failed(peer="a", round=0, epoch=5)),
        (
            KEYS.attempt(0, 5),
            ProposedAttempt(attempt=example.attempt(round=0, epoch=4), lives=(1,), offers=(1,)),
        ),
        (
            KEYS.attempt(0, 5),
            ProposedAttempt(attempt=example.attempt(round=0, epoch=5), lives=(1, 2), offers=(1,)),
        ),
        (
            KEYS.attempt(0, 5),
            ProposedAttempt(attempt=example.attempt(round=0, epoch=5), lives=(1,), offers=(1, 2)),
        ),
        (
            KEYS.attempt(0, 5),
            ProposedAttempt(
                attempt=example.attempt(round=0, epoch=5, members=("a", "b")), lives=(1,), offers=(1,)
            ),
        ),
        (
            KEYS.attempt(0, 5),
            ProposedAttempt(
                attempt=example.attempt(round=0, epoch=5, weights=(0.5, 0.5)), lives=(1,), offers=(1,)
            ),
        ),
    ],
)
def test_a_record_that_says_it_is_another_than_its_key_counts_for_nothing(key, record, caplog):
    run = Watched()
    run.put(KEYS.epoch, "5")
    snapshot = run.put(key, encode_text(record))
    assert not (snapshot.members or snapshot.readies or snapshot.commits or snapshot.dones)
    assert not snapshot.failures and snapshot.tried is None and snapshot.standing is None
    assert "is ignored" in caplog.text or "is refused" in caplog.text


def test_times_are_those_at_which_a_life_an_offer_and_a_failure_were_seen_first():
    run = Watched()
    attempt = ProposedAttempt(
        attempt=example.attempt(round=0, epoch=1, members=("b",)), lives=(1,), offers=(1,)
    )
    run.put(KEYS.epoch, "1")
    run.put(KEYS.attempt(0, 1), encode_text(attempt))

    def take(created, digest):
        text = encode_text(replace(member("b"), digest=digest))
        item = KeyValue(key=KEYS.member("b"), value=text, created=created, modified=created + 1)
        run.assembly.take(WatchEvent(key=item.key, item=item))
        return run.assembly.snapshot(changed=True).members["b"]

    run.now = 10.0
    take(1, "x")
    run.put(KEYS.ready(0, "b"), encode_text(ready("b", 0)))
    run.put(KEYS.failed(0, 1, "b"), encode_text(example.failed(peer="b", round=0, epoch=1)))
    run.now = 20.0
    assert (take(1, "y").seen_s, take(1, "y").said_s) == (10.0, 20.0)
    assert (
        run.put(KEYS.ready(0, "b"), encode_text(replace(ready("b", 0), tokens=9))).readies["b"].seen_s == 10.0
    )
    other = example.failed(peer="b", round=0, epoch=1, why="again")
    assert run.put(KEYS.failed(0, 1, "b"), encode_text(other)).failed_s == 10.0
    assert take(2, "y").seen_s == 20.0  # another life


def test_what_was_announced_in_an_earlier_attempt_counts_for_nothing_in_the_present_one():
    run = Watched()
    for epoch in (1, 2):
        attempt = example.attempt(round=0, epoch=epoch, members=("b",))
        run.put(KEYS.epoch, str(epoch))
        tried = ProposedAttempt(attempt=attempt, lives=(1,), offers=(1,))
        run.put(KEYS.attempt(0, epoch), encode_text(tried))
        if epoch == 1:
            done = Done(peer="b", round=0, epoch=1, digest="x")
            assert run.put(KEYS.done(0, 1, "b"), encode_text(done)).dones == {"b": done}
    snapshot = run.assembly.snapshot()
    assert snapshot.dones == {} and snapshot.tried.attempt.epoch == 2
    assert run.put(KEYS.epoch, "7").tried is None  # it was proposed before the data was lost


def test_shares_of_a_round_under_way_may_grow_by_those_of_newcomers_and_not_otherwise():
    run = Watched()
    item = KeyValue(
        key=KEYS.commit(0), value=encode_text(example.commit(round=0, members=())), created=1, modified=1
    )
    run.assembly.take(WatchEvent(key=item.key, item=item))
    run.assembly.snapshot(changed=True)
    first = RoundShares(round=1, position=Position(holes=(range(10),)), shares={"a": (range(5),)}, live=1)
    assert run.put(KEYS.shares(1), encode_text(first)).shares == first
    more = replace(first, shares={"a": (range(5),), "b": (range(5, 10),)}, live=2)
    assert run.put(KEYS.shares(1), encode_text(more)).shares == more
    for wrong in (
        replace(more, position=Position(consumed=1, holes=(range(10),))),
        replace(more, position=Position(skips=(range(90, 95),), holes=(range(10),))),
        replace(more, shares={"a": (range(5),), "b": (range(6, 10),)}),
        first,
    ):
        snapshot = run.put(KEYS.shares(1), encode_text(wrong))
        assert snapshot.shares == more and snapshot.standing.modified == run.revision


def test_what_is_restored_of_a_run_is_what_was_read_of_it_last():
    old, new = example.commit(round=4, digest="old", epoch=2), example.commit(round=4, digest="new", epoch=3)
    held = example.commit(round=7, digest="held")
    shares = [
        RoundShares(round=5, position=Position(), shares=dict.fromkeys(names, ()), live=1)
        for names in ("a", "ab")
    ]
    records = {
        "a": RecoveryRecord(epoch=2, commit=old, shares=shares[1], held=None),
        "b": RecoveryRecord(epoch=3, commit=new, shares=shares[0], held=replace(held, digest="another")),
        "c": RecoveryRecord(epoch=1, commit=held, shares=None, held=new),
    }
    assert _commits_in(records) == {4: new, 7: held}
    assert _shares(records, new) == shares[0]
    more = {**records, "d": RecoveryRecord(epoch=3, commit=new, shares=shares[1], held=None)}
    assert _shares(more, new) == shares[1]
    nothing = _shares(records, held)
    assert (nothing.round, nothing.shares, nothing.live) == (8, {}, 0)
    assert _peers_ahead(records, new) == ("b", "c")
    members = {"b": member("b", digest="new"), "a": member("a", digest="new"), "c": member("c", digest="")}
    assert _holders(members, new) == ("a", "b") and _holders(members, None) == ()
